"""Products of prepared stochastic operands in Triton, by running the streams as INT8 numbers: the slow way.

It serves GPUs on which CUDA C++ cannot be compiled; lookup.py and many.py are the fast ones.

A code of a is a thermometer over the steps of its stream, 1 while it is enabled; a code of b is an indicator,
1 where its number lies below the boundary; both with the code's sign. Their product over all steps of all
dimensions is the count. Streams longer than there are codes, of one length for all rows, take codes for
steps: b then has what the count gains from one code of a to the next, a whole number below 3.

The inner dimension grows by the number of steps, rounded up to a power of two: 2 * N * M * D * steps
operations on INT8 matrix units, 15.5 ms for 2048 x 4096 x 14336 and 128 steps at an H200's nominal 1979e12 a
second, 3.9 ms for 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.formats.stochastic import Stochastic
from fewbits.formats.streams import prefix_tables, product_tables, step_tables
from fewbits.formats.table_cache import keep_tables
from fewbits.kernels.launch.grid import check_grid
from fewbits.kernels.launch.jit import CompileCase, cdiv, jit, next_power_of_2, on_device_of, tl
from fewbits.kernels.stochastic.parts import strides_of

CODES = 128
_INNER = 128  # steps of a product of tiles


class Tables(NamedTuple):
    """What operands become; see the module's text."""

    steps: Tensor  # (levels, masks, 128) int16: enabled steps of a code of a
    ones: Tensor  # (masks, 128, steps) int8: what each step counts for a code of b
    masks: Tensor  # (chunk,) int32
    factors: Tensor  # (levels,) float32


@keep_tables(maxsize=16)
def tables_of(
    options: Stochastic, levels: tuple[int, ...], chunk: int, device: torch.device
) -> Tables | None:
    """The tables of a product; None if a gain from one code to the next does not fit 8 bits.

    Nor where the product is not a count of b's bits after some steps and a's rows differ in length.
    """
    masks = options.masks(chunk)
    distinct, cpu = tuple(dict.fromkeys(masks)), torch.device("cpu")
    codes, longest = options.max_code + 1, max(1, *levels)
    streams = options.with_length(longest).streams
    steps = torch.zeros(len(levels), len(distinct), CODES, dtype=torch.int16)
    if not streams.by_prefix and len(levels) > 1:
        return None
    if len(levels) == 1 and (longest > options.max_code or not streams.by_prefix):
        steps[..., :codes] = torch.arange(codes)
        gains = product_tables(streams, distinct, cpu).diff(dim=1)  # (masks, max_code, codes of b)
    else:
        steps[..., :codes] = step_tables(streams, distinct, levels, cpu)
        gains = prefix_tables(streams, distinct, cpu).diff(dim=1)
    if int(gains.abs().amax()) > 127:
        return None
    ones = torch.zeros(len(distinct), CODES, max(16, next_power_of_2(gains.shape[1])), dtype=torch.int8)
    ones[:, :codes, : gains.shape[1]] = gains.mT
    position = {mask: i for i, mask in enumerate(distinct)}
    index = torch.tensor([position[mask] for mask in masks], dtype=torch.int32)
    factors = [options.max_code**2 / length if length else 0.0 for length in levels]
    of_levels = torch.tensor(factors, dtype=torch.float64).float()
    return Tables(steps.to(device), ones.to(device), index.to(device), of_levels.to(device))


@jit
def _thermometer_kernel(
    qa_ptr, sa_ptr, qb_ptr, sb_ptr, levels_ptr, steps_ptr, ones_ptr, masks_ptr, factors_ptr, y_ptr,
    N, M, D, num_chunks, chunk, num_masks, stride_bb, stride_lb, stride_ln, stride_lc,
    HAS_LEVELS: tl.constexpr, STEPS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One tile of y: chunks in ascending order, each one sum of whole numbers."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    batch = tl.program_id(2).to(tl.int64)
    mask_n, mask_m = offs_n < N, offs_m < M
    row_a = batch * N + offs_n
    row_b = batch * stride_bb + offs_m  # stride_bb 0: one b for all
    t = tl.arange(0, STEPS)
    y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for c in range(num_chunks):
        level = tl.zeros((BLOCK_N,), dtype=tl.int32)
        if HAS_LEVELS:
            at_level = levels_ptr + batch * stride_lb + offs_n * stride_ln + c * stride_lc
            level = tl.load(at_level, mask=mask_n, other=0).to(tl.int32)
        first = c * chunk
        length = tl.minimum(chunk, D - first)
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
        for start in range(0, length, BLOCK_D):
            offs_d = start + tl.arange(0, BLOCK_D)
            mask_d = offs_d < length
            which = tl.load(masks_ptr + offs_d, mask=mask_d, other=0)
            at_a = row_a[:, None] * D + (first + offs_d)[None, :]
            a = tl.load(qa_ptr + at_a, mask=mask_n[:, None] & mask_d[None, :], other=0).to(tl.int32)
            at_steps = (level[:, None] * num_masks + which[None, :]) * 128 + tl.abs(a)
            enabled = tl.load(steps_ptr + at_steps).to(tl.int32)
            sign_a = tl.where(a < 0, -1, 1)
            thermometer = tl.where(t[None, None, :] < enabled[:, :, None], sign_a[:, :, None], 0)
            at_b = row_b[:, None] * D + (first + offs_d)[None, :]
            b = tl.load(qb_ptr + at_b, mask=mask_m[:, None] & mask_d[None, :], other=0).to(tl.int32)
            at_ones = (which[None, :] * 128 + tl.abs(b)) * STEPS
            ones = tl.load(ones_ptr + at_ones[:, :, None] + t[None, None, :]).to(tl.int32)
            indicator = tl.where(b[:, :, None] < 0, -ones, ones)
            x = tl.reshape(thermometer.to(tl.int8), (BLOCK_N, BLOCK_D * STEPS))
            w = tl.reshape(indicator.to(tl.int8), (BLOCK_M, BLOCK_D * STEPS))
            acc = tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
        factor = tl.load(factors_ptr + level)
        scale_a = tl.load(sa_ptr + row_a * num_chunks + c, mask=mask_n, other=0.0)
        scale_b = tl.load(sb_ptr + row_b * num_chunks + c, mask=mask_m, other=0.0)
        y += (acc.to(tl.float32) * factor[:, None]) * (scale_a[:, None] * scale_b[None, :])
    at = row_a[:, None] * M + offs_m[None, :]
    tl.store(y_ptr + at, y, mask=mask_n[:, None] & mask_m[None, :])


def launch(
    operands: Sequence[Tensor], tables: Tables, level_index: Tensor | None, chunk: int, y: Tensor
) -> None:
    """A `Launch`, by a Triton kernel."""
    qa, sa, qb, sb = operands
    (B, N, D), M, steps = qa.shape, qb.shape[1], tables.ones.shape[2]
    block_n = min(128, max(16, next_power_of_2(N)))
    block_m = min(128, max(16, next_power_of_2(M)))
    grid = (cdiv(N, block_n), cdiv(M, block_m), B)
    check_grid(grid, "this product")
    with on_device_of(qa):
        _thermometer_kernel[grid](
            qa, sa, qb, sb, qa if level_index is None else level_index, tables.steps, tables.ones,
            tables.masks, tables.factors, y, N, M, D, sa.shape[2], chunk, tables.steps.shape[1],
            0 if qb.shape[0] == 1 else M, *strides_of(level_index),
            HAS_LEVELS=level_index is not None, STEPS=steps, BLOCK_D=max(1, _INNER // steps),
            BLOCK_N=block_n, BLOCK_M=block_m,
            num_warps=8 if block_n * block_m > 4096 else 4, enable_fp_fusion=False,
        )  # fmt: skip


def _case(steps: int, block_n: int, block_m: int, has_levels: bool, num_warps: int) -> CompileCase:
    pointers = {
        "qa_ptr": "*i8", "sa_ptr": "*fp32", "qb_ptr": "*i8", "sb_ptr": "*fp32", "levels_ptr": "*u8",
        "steps_ptr": "*i16", "ones_ptr": "*i8", "masks_ptr": "*i32", "factors_ptr": "*fp32", "y_ptr": "*fp32",
    }  # fmt: skip
    sizes = ("N", "M", "D", "num_chunks", "chunk", "num_masks")
    strides = ("stride_bb", "stride_lb", "stride_ln", "stride_lc")
    constants = {
        "HAS_LEVELS": has_levels,
        "STEPS": steps,
        "BLOCK_D": max(1, _INNER // steps),
        "BLOCK_N": block_n,
        "BLOCK_M": block_m,
    }
    signature = pointers | dict.fromkeys(sizes + strides, "i32") | dict.fromkeys(constants, "constexpr")
    return CompileCase(_thermometer_kernel, signature, constants, ("ones_ptr", "y_ptr"), num_warps)


COMPILE_CASES = (_case(128, 128, 128, False, 8), _case(32, 128, 128, True, 8), _case(128, 16, 128, False, 4))
