"""Cases of 8-bit floating point: quantising activations and gradients, and the products of what they make."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fewbits.bench.problem import Case, Problem, Run, Variant, randn
from fewbits.kernels.quantize_float8 import quantize_blocks, quantize_rows, quantize_tensor

# One rounding to 4 significant bits: 2**-4 at most, 0.026 on average over a binade (see matmul_float8.py).
_ONE_ROUNDING = 0.04
_LARGEST = 448.0


def quantize_cases(max_size: int) -> list[Case]:
    """Activations of Llama-3.1-8B, 8192 tokens: its width, its feed-forward layer's, gate and up together."""
    made = []
    for part, N in (("rows", 4096), ("rows", 14336), ("rows", 28672), ("blocks", 4096), ("tensor", 4096)):
        M, N = min(8192, max_size), min(N, max_size)
        made.append(
            Case(
                op="quantize_float8", part=part, format="float8_e4m3", M=M, N=N,
                bytes_moved=(5 if part == "tensor" else 3) * M * N,
                tolerance=_ONE_ROUNDING, build=_quantize_problem,
            )
        )  # fmt: skip
    return made


def _quantize_problem(case: Case, device: torch.device) -> Problem:
    x = randn(device, torch.bfloat16, case.M, case.N)
    quantize = {"rows": quantize_rows, "blocks": quantize_blocks, "tensor": quantize_tensor}[case.part]
    block = {"rows": case.N, "blocks": min(128, case.N), "tensor": x.numel()}[case.part]
    scale_shape = (1,) if case.part == "tensor" else (case.M, case.N // block)

    def ours() -> Sequence[Tensor]:
        return quantize(x)

    def eager() -> Sequence[Tensor]:  # what a training recipe in plain torch does
        blocks = x.view(-1, block)
        scale = blocks.abs().amax(1, keepdim=True).float() / _LARGEST
        q = (blocks.float() * (1.0 / scale)).to(torch.float8_e4m3fn)
        return q.view(x.shape), scale.view(scale_shape)

    def exact() -> Sequence[Tensor]:
        blocks = x.double().view(-1, block)
        scale = blocks.abs().amax(1, keepdim=True) / _LARGEST
        return (blocks / scale).view(x.shape), scale.view(scale_shape)

    functions = {"fewbits": ours, "torch_eager": eager}
    if device.type == "cuda":
        functions["torch_compile"] = torch.compile(eager, dynamic=False)
    return Problem({name: _plain(f) for name, f in functions.items()}, exact)


def _plain(f: Run) -> Variant:
    return lambda: f


MAKERS = (quantize_cases,)
