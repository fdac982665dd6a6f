"""Cases of the stochastic-computing matmul: against the plain product, whose error it has by design."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fewbits.bench.problem import Case, Problem, differentiated, randn
from fewbits.kernels.matmul_stochastic import sc_matmul

# Measured on normal values: 0.022 for full streams, 0.038 for halved ones.
_STREAM_ERROR = 0.06


def stochastic_cases(max_size: int) -> list[Case]:
    """Llama-3.1-8B's gate projection, few rows: halved streams in chunks of 128, as its users run it."""
    made = []
    for M in (1, 16):
        N, K = min(14336, max_size), min(4096, max_size)
        made.append(
            Case(
                op="matmul_stochastic", part="forward", format="sc8_halve", M=M, N=N, K=K,
                flops=2 * M * N * K, bytes_moved=2 * (N * K + M * K) + 4 * M * N,
                tolerance=_STREAM_ERROR, build=_problem,
            )
        )  # fmt: skip
    return made


def _problem(case: Case, device: torch.device) -> Problem:
    x = randn(device, torch.bfloat16, case.M, case.K)
    weight = randn(device, torch.bfloat16, case.N, case.K)
    functions: dict[str, Callable[[], Tensor]] = {
        "fewbits": lambda: sc_matmul(x, weight, halve_bipolar_stoc_len=True, chunk_d=128),
        "torch_bfloat16": lambda: x @ weight.t(),
    }

    def exact() -> Sequence[Tensor]:
        return (x.double() @ weight.double().t(),)

    return Problem({name: differentiated(f, (), x, 0) for name, f in functions.items()}, exact)


MAKERS = (stochastic_cases,)
