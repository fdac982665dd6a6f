"""Cases of gradients on their way: to messages and back, and the sum of what several ranks sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fewbits.bench.problem import Case, Problem, Run, Variant, randn
from fewbits.formats import get_format
from fewbits.kernels.codec.gradient_codec import (
    dequantize_gradient,
    dequantize_gradient_ref,
    quantize_gradient,
    quantize_gradient_ref,
    sum_gradients,
    sum_gradients_ref,
    wire_of,
)

_RANKS = 8
_EXACT = 1e-6  # both give the same bits; messages are compared byte by byte, as numbers
_PARTS = ("quantize", "sum", "dequantize")


def gradient_cases(max_size: int) -> list[Case]:
    """A bucket of 25 MiB of float32, DDP's own size, between 8 ranks: M rows of N values."""
    listed = []
    N = min(25 * 2**20 // 4 // _RANKS, max_size * 16)
    for format in ("int8", "int4", "float8_e4m3"):
        wire = wire_of(get_format(format), N * _RANKS, _RANKS)
        message, values = _RANKS * wire.row_bytes, N * _RANKS
        floors = (12 * values + message, message + 8 * N + wire.row_bytes, message + 4 * values)
        for part, bytes_moved in zip(_PARTS, floors, strict=True):
            listed.append(
                Case(
                    op="gradient_codec",
                    part=part,
                    format=format,
                    M=_RANKS,
                    N=N,
                    bytes_moved=bytes_moved,
                    tolerance=_EXACT,
                    build=_gradient_problem,
                )
            )
    return listed


def _gradient_problem(case: Case, device: torch.device) -> Problem:
    wire = wire_of(get_format(case.format), case.M * case.N, case.M)
    gradient = randn(device, torch.float32, case.M * case.N)
    received = wire.empty(case.M, device)
    quantize_gradient_ref(gradient, gradient.new_empty(0), received, wire)
    size = wire.row if case.part == "sum" else gradient.numel()

    def variant(op: Callable[..., None]) -> Variant:
        residual, out = torch.empty(size, device=device, dtype=torch.float32), torch.empty_like(gradient)
        message = wire.empty(1 if case.part == "sum" else case.M, device)

        def prepare() -> Run:
            residual.zero_()  # every run begins where the exact one began; not timed
            return run

        def run() -> Sequence[Tensor]:
            if case.part == "dequantize":
                op(received, out, wire)
                return (out,)
            op(gradient if case.part == "quantize" else received, residual, message, wire)
            return message, residual

        return prepare

    functions: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
        "quantize": (quantize_gradient, quantize_gradient_ref),
        "sum": (sum_gradients, sum_gradients_ref),
        "dequantize": (dequantize_gradient, dequantize_gradient_ref),
    }
    ours, definition = functions[case.part]
    exact = variant(definition)
    return Problem({"fewbits": variant(ours), "definition": variant(definition)}, lambda: exact()())


MAKERS = (gradient_cases,)
