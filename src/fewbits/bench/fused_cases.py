"""Cases of the kernels that only move bytes: dequantisation, gated activations, rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from fewbits.bench.problem import Case, Problem, randn
from fewbits.formats import get_format
from fewbits.kernels.dequantize import dequantize

# Dequantisation.


def dequantize_cases(max_size: int) -> list[Case]:
    """A weight of a Llama-3.1-8B layer from each packed format to bfloat16, and transposed."""
    N, K = min(14336, max_size), min(4096, max_size)
    made = []
    for format in ("nf4_dq", "nf4", "int4_g64", "int8"):
        case = Case(
            op="dequantize", part="forward", format=format, M=N, N=K, tolerance=2.0**-8,
            bytes_moved=get_format(format).nbytes((N, K)) + 2 * N * K, build=_dequantize_problem,
        )  # fmt: skip
        made.append(case)
    return [*made, replace(made[0], part="transposed")]


def _dequantize_problem(case: Case, device: torch.device) -> Problem:
    weight = randn(device, torch.bfloat16, case.M, case.N) * 0.02
    packed = get_format(case.format).quantize(weight)
    transposed = case.part == "transposed"
    functions: dict[str, Callable[[], Tensor]] = {
        "fewbits": lambda: dequantize(packed, torch.bfloat16, transposed=transposed)
    }
    if device.type == "cuda" and find_spec("bitsandbytes") and case.format.startswith("nf4"):
        import bitsandbytes.functional as bnb

        codes, state = bnb.quantize_4bit(
            weight, quant_type="nf4", compress_statistics=case.format == "nf4_dq"
        )
        if not transposed:
            functions["bitsandbytes"] = lambda: bnb.dequantize_4bit(codes, state)

    def exact() -> tuple[Tensor]:
        w = packed.dequantize(torch.float32).double()
        return (w.t() if transposed else w,)

    return Problem({name: lambda f=f: lambda: (f(),) for name, f in functions.items()}, exact)


MAKERS = (dequantize_cases,)
