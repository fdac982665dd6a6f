"""Triton kernel of emulated.py: the sum of the plain product and of the error's with its scales.

    y = [y] + [base] + error * scale_a * scale_b^T

With scales of rows and columns inside, torch's 8-bit product took a tenth longer on an H200, more than this.
"""

from __future__ import annotations

from torch import Tensor

from fewbits.kernels.launch.grid import programs, split_program
from fewbits.kernels.launch.jit import CompileCase, jit, next_power_of_2, on_device_of, tl, triton

available = triton is not None


@jit
def _add_kernel(
    y_ptr,
    base_ptr,
    error_ptr,
    sa_ptr,
    sb_ptr,
    N,
    M,
    BASE: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's part of y; see the module's text. BASE: there is a base; SUM: y is added to."""
    row, part = split_program(N)
    row = row.to(tl.int64)
    offs = part * BLOCK + tl.arange(0, BLOCK)
    mask = offs < M
    at = row * M + offs
    scale = tl.load(sa_ptr + row) * tl.load(sb_ptr + offs, mask=mask, other=0.0)
    total = tl.load(error_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale
    if BASE:
        total += tl.load(base_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if SUM:
        total += tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=mask)


def add(
    y: Tensor, base: Tensor | None, error: Tensor, scale_a: Tensor, scale_b: Tensor, *, onto: bool
) -> None:
    """Write y (N, M), float32 or bfloat16, of base and error (N, M) bfloat16, all contiguous.

    Args:
        y: written; with ``onto`` read too.
        base: None for none.
        error: of the features.
        scale_a: (N,) or (N, 1) float32.
        scale_b: (M,) or (M, 1) float32.
        onto: whether y's values are added.
    """
    N, M = y.shape
    block = min(1024, next_power_of_2(M))
    with on_device_of(y):
        _add_kernel[programs(N, M, 1, block)](
            y, error if base is None else base, error, scale_a, scale_b, N, M,
            BASE=base is not None, SUM=onto, BLOCK=block, num_warps=4,
        )  # fmt: skip


def _cases() -> tuple[CompileCase, ...]:
    cases = []
    for base, onto, dtype in ((True, False, "*fp32"), (True, False, "*bf16"), (False, True, "*fp32")):
        signature = {
            "y_ptr": dtype,
            "base_ptr": "*bf16",
            "error_ptr": "*bf16",
            "sa_ptr": "*fp32",
            "sb_ptr": "*fp32",
            "N": "i32",
            "M": "i32",
        }
        constants = {"BASE": base, "SUM": onto, "BLOCK": 1024}
        signature |= dict.fromkeys(constants, "constexpr")
        aligned = ("y_ptr", "base_ptr", "error_ptr", "M")
        cases.append(CompileCase(_add_kernel, signature, constants, aligned, 4))
    return tuple(cases)


COMPILE_CASES = _cases()
