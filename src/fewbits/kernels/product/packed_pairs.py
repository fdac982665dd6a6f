"""Products of pairs of a token and an expert with packed matrices, where pairs are few: decoding tokens.

Pairs stand sorted by the matrix that they want; those of the stretch g end before ends[g], and want the
matrix chosen[g], or g itself. For a pair p of that stretch, with the token t(p):

    y[p] = W[chosen[g]] x[t(p)]            x (T, K), W (E, N, K) packed, y (P, N) in x's dtype

Decoded values are rounded to x's dtype before they are multiplied, as where a weight is decoded first; sums
are float32. So the numbers are those of `dequantize` and a grouped product but for the order of the sums.

Floor: codes and scales of the matrices that are hit, once each. A token of Qwen3-30B-A3B's shape hits 8 of
128 experts of a layer, whose NF4 weights are 20 MB: 4.5 us at the 4.4 TB/s that an H200's memory gives. The
kernel takes 39 us for both products of one token, 316 us for those of 16 tokens, which hit some 82 experts
(28 November 2026): what it spends is arithmetic of decoding, not memory. Decoding first, as before, took all
128 experts of 16 tokens some 670 us. A program has 16 pairs of a stretch at a time and some outputs, and
decodes its rows of W for them in registers.

No gradient: decoding has none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.formats.base import Format, Packed
from fewbits.kernels.codec.dequantize_triton import (
    FLOAT8,
    NF4_DECODING,
    decoded_groups,
    decoding_of,
    has_triton_kernel,
)
from fewbits.kernels.launch.jit import (
    CompileCase,
    cdiv,
    converts_float8,
    jit,
    next_power_of_2,
    on_device_of,
    tl,
)
from fewbits.kernels.launch.prepared import Launch, keep_plans

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
PAIRS = 16  # of a stretch, which a program takes at a time: the rows of a tensor core's product


class PairTile(NamedTuple):
    """Outputs of a program, inner values that it decodes at a time, and how."""

    outputs: int
    inner: int
    num_warps: int
    num_stages: int


# Of stretches of one pair each, and of all experts', many of them empty: the fastest of six on an H200.
ONE_BY_ONE, SORTED = PairTile(32, 128, 4, 3), PairTile(64, 128, 4, 3)


# 1. The definition.


def packed_pairs_ref(
    x: Tensor, rows: Tensor | None, weight: Packed, ends: Tensor, chosen: Tensor | None
) -> Tensor:
    """The formula above; see `packed_pairs`."""
    x = x if rows is None else x[rows]
    wide = torch.promote_types(x.dtype, torch.float32)
    dense = weight.dequantize(x.dtype)
    y, first = x.new_zeros(len(x), dense.shape[1]), 0
    for number, last in enumerate(ends.tolist()):
        matrix = dense[number if chosen is None else int(chosen[number])]
        y[first:last] = (x[first:last].to(wide) @ matrix.to(wide).t()).to(x.dtype)
        first = last
    return y


# 2. The kernel.


@jit
def _packed_pairs_kernel(
    codes_ptr, scales_ptr, zero_points_ptr, scale_scales_ptr, scale_offset_ptr, scale_table_ptr, values_ptr,
    x_ptr, rows_ptr, ends_ptr, chosen_ptr, out_ptr, N, K, code_pitch, scale_pitch, stride_x, stride_out,
    HAS_ROWS: tl.constexpr, IS_CHOSEN: tl.constexpr, PAIRS: tl.constexpr, OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr, STAGES: tl.constexpr,
    VALUES: tl.constexpr, BITS: tl.constexpr, FLAT_BLOCK: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, SCALE_BLOCK: tl.constexpr, ZERO_POINT: tl.constexpr,
    FLOAT8: tl.constexpr, NATIVE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program has OUTPUTS outputs of a stretch; GROUPS groups of GROUP values of a row at a time."""
    stretch = tl.program_id(1)
    last = tl.load(ends_ptr + stretch)
    first = tl.load(ends_ptr + stretch - 1, mask=stretch > 0, other=0)
    matrix = stretch.to(tl.int64)
    if IS_CHOSEN:
        matrix = tl.load(chosen_ptr + stretch).to(tl.int64)
    lane = tl.arange(0, OUTPUTS * GROUPS)
    output = tl.program_id(0) * OUTPUTS + lane // GROUPS
    offs_n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    offs_k = tl.arange(0, GROUPS * GROUP)
    row = matrix * N + output
    for begin in range(first, last, PAIRS):
        pair = begin + tl.arange(0, PAIRS)
        mask_p = pair < last
        source = pair.to(tl.int64)
        if HAS_ROWS:
            source = tl.load(rows_ptr + pair, mask=mask_p, other=0).to(tl.int64)
        total = tl.zeros((PAIRS, OUTPUTS), tl.float32)
        for k in tl.range(0, K, GROUPS * GROUP, num_stages=STAGES):
            at = k + (lane % GROUPS) * GROUP
            mask = (output < N) & (at < K)
            w = decoded_groups(
                codes_ptr, scales_ptr, zero_points_ptr, scale_scales_ptr, scale_offset_ptr, scale_table_ptr,
                values_ptr, row, at, mask, K, code_pitch, scale_pitch, VALUES, BITS, FLAT_BLOCK, SCALE_ROWS,
                SCALE_COLUMNS, SCALE_BLOCK, ZERO_POINT, FLOAT8, NATIVE, GROUP,
            )  # fmt: skip
            w = tl.where(mask[:, None], w, 0.0).to(x_ptr.dtype.element_ty)
            w = tl.reshape(w, (OUTPUTS, GROUPS * GROUP))
            mask_x = mask_p[:, None] & (k + offs_k < K)[None, :]
            x = tl.load(x_ptr + source[:, None] * stride_x + (k + offs_k)[None, :], mask=mask_x, other=0.0)
            total = tl.dot(x, tl.trans(w), total)
        y_ptrs = out_ptr + pair.to(tl.int64)[:, None] * stride_out + offs_n[None, :]
        tl.store(y_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask_p[:, None] & (offs_n < N)[None, :])


def takes(format: Format, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies packed matrices of ``shape`` (E, N, K) by x of this dtype."""
    return dtype in KERNEL_DTYPES and has_triton_kernel(format, shape) and shape[-1] % PAIRS == 0


class _Facts(NamedTuple):
    """What a launch follows from, beside the format.

    Attributes:
        shape: (E, N, K).
        device: of the operands.
        pitches: the last axes of codes and scales.
        strides: of rows of x and of the output.
        stretches: G.
        has_rows: whether pairs share tokens.
        is_chosen: whether stretches name their matrices.
        tile: of a program.
        native: whether the device converts float8.
    """

    shape: tuple[int, int, int]
    device: torch.device
    pitches: tuple[int, int]
    strides: tuple[int, int]
    stretches: int
    has_rows: bool
    is_chosen: bool
    tile: PairTile
    native: bool


@keep_plans
def _plan(format: Format, kernel: Any, facts: _Facts) -> tuple[Launch, tuple[Tensor, Tensor] | None]:
    """The launch, and the tables of scales and values."""
    _, N, K = facts.shape
    decoding = decoding_of(format, facts.shape, facts.device, facts.pitches, native=facts.native)
    group = decoding.constants["GROUP"]
    constants = {
        "HAS_ROWS": facts.has_rows,
        "IS_CHOSEN": facts.is_chosen,
        "PAIRS": PAIRS,
        "OUTPUTS": facts.tile.outputs,
        "GROUPS": max(PAIRS // group, min(next_power_of_2(K), facts.tile.inner) // group, 1),
        "STAGES": facts.tile.num_stages,
        **decoding.constants,
    }
    grid = (cdiv(N, facts.tile.outputs), facts.stretches, 1)
    numbers = (N, K, *decoding.pitches, *facts.strides)
    return Launch(kernel, grid, numbers, constants, num_warps=facts.tile.num_warps), decoding.tables


def launch(
    x: Tensor,
    rows: Tensor | None,
    weight: Packed,
    ends: Tensor,
    chosen: Tensor | None,
    out: Tensor,
    tile: PairTile | None = None,
) -> None:
    """`packed_pairs_ref` into ``out`` (P, N), for what the kernel `takes`."""
    parts = weight.parts
    codes, scales = parts["codes"], parts["scales"]
    second = parts.get("scale_scales", scales)
    E, N, K = weight.shape
    facts = _Facts(
        shape=(E, N, K),
        device=codes.device,
        pitches=(codes.shape[-1], scales.shape[-1] if scales.dim() else 1),
        strides=(x.stride(0), out.stride(0)),
        stretches=len(ends),
        has_rows=rows is not None,
        is_chosen=chosen is not None,
        tile=tile or (SORTED if chosen is None else ONE_BY_ONE),
        native=codes.is_cuda and converts_float8(codes),
    )
    plan, tables = _plan(weight.format, _packed_pairs_kernel, facts)
    with on_device_of(x):
        plan(
            codes.view(torch.uint8) if codes.dtype in FLOAT8 else codes,
            scales,
            parts.get("zero_points", scales),
            second,
            parts.get("scale_offset", second),
            *(tables or (scales, scales)),
            x,
            ends if rows is None else rows,
            ends,
            ends if chosen is None else chosen,
            out,
        )


_SIGNATURE = {"codes_ptr": "*u8", "scales_ptr": "*u8", "zero_points_ptr": "*u8", "scale_scales_ptr": "*fp32"}
_SIGNATURE |= {"scale_offset_ptr": "*fp32", "scale_table_ptr": "*fp32", "values_ptr": "*fp32"}
_SIGNATURE |= {"x_ptr": "*bf16", "rows_ptr": "*i64", "ends_ptr": "*i32", "chosen_ptr": "*i64"}
_SIGNATURE |= {"out_ptr": "*bf16", "N": "i32", "K": "i32", "code_pitch": "i32", "scale_pitch": "i32"}
_SIGNATURE |= {"stride_x": "i32", "stride_out": "i32"}
_NF4 = {"HAS_ROWS": True, "IS_CHOSEN": True, "PAIRS": PAIRS, "OUTPUTS": 32, "GROUPS": 4, "STAGES": 3}
_NF4 |= NF4_DECODING
_INT4 = {**_NF4, "VALUES": False, "FLAT_BLOCK": 0, "SCALE_BLOCK": 0, "SCALE_ROWS": 1, "SCALE_COLUMNS": 64}
_INT4 |= {"HAS_ROWS": False, "IS_CHOSEN": False}
_SIGNATURE |= dict.fromkeys(_NF4, "constexpr")
_ALIGNED = ("codes_ptr", "scales_ptr", "x_ptr", "out_ptr", "N", "K", "code_pitch", "stride_x", "stride_out")
COMPILE_CASES = (
    CompileCase(_packed_pairs_kernel, _SIGNATURE, _NF4, _ALIGNED),
    CompileCase(_packed_pairs_kernel, {**_SIGNATURE, "scales_ptr": "*fp32"}, _INT4, _ALIGNED),
)


# 3. The public function, for inference.


def packed_pairs(
    x: Tensor, rows: Tensor | None, weight: Packed, ends: Tensor, chosen: Tensor | None = None
) -> Tensor:
    """Each pair's token times the packed matrix of its stretch.

    Args:
        x: (T, K), or (P, K) without ``rows``.
        rows: (P,) int64, the token of each pair.
        weight: (E, N, K), for which `takes` says yes on a GPU.
        ends: (G,) int32, where each stretch of pairs ends; the last is P.
        chosen: (G,) int64, the matrix of each stretch; None: the first, the second and so on.

    Returns:
        (P, N) in x's dtype; on a CPU by the definition.
    """
    if not x.is_cuda:
        return packed_pairs_ref(x, rows, weight, ends, chosen)
    out = x.new_empty(len(x) if rows is None else len(rows), weight.shape[1])
    if len(out):
        launch(x if x.stride(1) == 1 else x.contiguous(), rows, weight, ends, chosen, out)
    return out


__all__ = ["KERNEL_DTYPES", "PAIRS", "PairTile", "launch", "packed_pairs", "packed_pairs_ref", "takes"]
