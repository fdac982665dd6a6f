"""Cases of the kernels that only move bytes between products: gated activations, rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.bench.problem import Case, Problem, differentiated, randn
from fewbits.kernels.gated_activation import gated_activation, gated_activation_backward_ref

# Gated activations.


def gated_activation_cases(max_size: int) -> list[Case]:
    """SwiGLU of Llama-3.1-8B's and Qwen3-1.7B's feed-forward layer, 8192 tokens."""
    made = []
    for M, I in ((8192, 14336), (8192, 6144)):
        M, I = min(M, max_size), min(I, max_size)
        forward = Case(
            op="gated_activation", part="forward", format="bfloat16", M=M, N=I, bytes_moved=3 * M * I * 2,
            tolerance=4e-3, build=_gated_activation_problem,
        )  # fmt: skip
        made += [forward, replace(forward, part="backward", bytes_moved=5 * M * I * 2)]
    return made


def _gated_activation_problem(case: Case, device: torch.device) -> Problem:
    gate_up = randn(device, torch.bfloat16, case.M, 2 * case.N)
    dh = randn(device, torch.bfloat16, case.M, case.N)

    def eager(x: Tensor) -> Tensor:  # what transformers' LlamaMLP does
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    functions: dict[str, Callable[[Tensor], Tensor]] = {"fewbits": gated_activation, "torch_eager": eager}
    if device.type == "cuda":
        functions["torch_compile"] = torch.compile(eager, dynamic=False)
        if find_spec("liger_kernel"):
            from liger_kernel.ops.swiglu import LigerSiLUMulFunction

            functions["liger"] = lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, -1))

    def exact() -> Sequence[Tensor]:
        gate, up = gate_up.double().chunk(2, -1)
        de, du, h = gated_activation_backward_ref(dh.double(), gate, up, "silu")
        return (h,) if case.part == "forward" else (torch.cat([de, du], -1),)

    trained = 0 if case.part == "forward" else 1
    return Problem({name: differentiated(f, (gate_up,), dh, trained) for name, f in functions.items()}, exact)


MAKERS = (gated_activation_cases,)
