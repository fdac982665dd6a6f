"""The Triton kernel of fake_quantize.py's effective weight, and its launch.

A program computes a tile of ``B @ A`` (rank at most MAX_RANK) with float32 sums, adds it to its tile of W,
rounds to W's dtype, and then, if the format's blocks lie whole in the tile, rounds each block to the format.
The tile depends only on the types and the rank, never on the format: the sums, and so the effective weight,
are the same bits whether it is rounded here, written out to be merged, or rounded afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.formats.base import Format
from fewbits.kernels.codec.codebook_tables import codebook_tables
from fewbits.kernels.codec.codings import is_known
from fewbits.kernels.codec.quantize_triton import KERNEL_DTYPES
from fewbits.kernels.codec.rounding_triton import codebook_codes, codebook_values, integer_block_codes
from fewbits.kernels.launch.jit import CompileCase, cdiv, jit, next_power_of_2, on_device_of, tl

MAX_RANK = 128
_CODEBOOK, _INTEGER = 1, 2
_FLOAT32_PART = 32  # ranks that products without tensor cores take at once: 128 spill 8 KB a thread


class WeightTile(NamedTuple):
    """Rows and columns of W that one program takes, and its warps."""

    block_n: int
    block_k: int
    num_warps: int


@jit
def _lora_weight_kernel(
    w_ptr, a_ptr, b_ptr, out_ptr, midpoints_ptr, values_ptr, N, K, rank, scaling,
    stride_wn, stride_ar, stride_bn, stride_on,
    KIND: tl.constexpr, ORDER: tl.constexpr, BITS: tl.constexpr, ZERO_POINT: tl.constexpr,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, BLOCK_R: tl.constexpr, PART_R: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``out = round(W + scaling * B @ A)``, a tile; KIND 0 writes W's dtype, 1 and 2 a format's values.

    EVEN: tiles and rank are all whole. PART_R of BLOCK_R ranks are multiplied at a time.
    """
    tiles_k = tl.cdiv(K, BLOCK_K)
    offs_n = tl.program_id(0) // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.program_id(0) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    w_at = offs_n[:, None].to(tl.int64) * stride_wn + offs_k[None, :]
    out_at = offs_n[:, None].to(tl.int64) * stride_on + offs_k[None, :]
    mask = (offs_n < N)[:, None] & (offs_k < K)[None, :]
    w = tl.load(w_ptr + w_at) if EVEN else tl.load(w_ptr + w_at, mask=mask, other=0.0)
    delta = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in tl.range(0, BLOCK_R, PART_R, num_stages=1):
        offs_r = first + tl.arange(0, PART_R)
        b_at = b_ptr + offs_n[:, None] * stride_bn + offs_r[None, :]
        a_at = a_ptr + offs_r[:, None] * stride_ar + offs_k[None, :]
        if EVEN:
            b, a = tl.load(b_at), tl.load(a_at)
        else:
            b = tl.load(b_at, mask=(offs_n < N)[:, None] & (offs_r < rank)[None, :], other=0.0)
            a = tl.load(a_at, mask=(offs_r < rank)[:, None] & (offs_k < K)[None, :], other=0.0)
        delta = tl.dot(b, a, delta, input_precision="ieee")
    x = (w.to(tl.float32) + delta * scaling).to(w_ptr.dtype.element_ty)
    if KIND:
        blocks = tl.reshape(x.to(tl.float32), (BLOCK_N * BLOCK_K // BLOCK, BLOCK))
        if KIND == 1:
            code, scale = codebook_codes(blocks, midpoints_ptr, ORDER, False)
            value = codebook_values(code, values_ptr)
        else:
            value, scale, zero_point = integer_block_codes(blocks, BITS, ZERO_POINT)
            if ZERO_POINT:
                value -= zero_point[:, None]
        x = tl.reshape((value * scale[:, None]).to(out_ptr.dtype.element_ty), (BLOCK_N, BLOCK_K))
    if EVEN:
        tl.store(out_ptr + out_at, x)
    else:
        tl.store(out_ptr + out_at, x, mask=mask)


def takes_lora(weight: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether the kernel takes W (N, K), A (r, K) and B (N, r); else the definition computes."""
    types = all(t.dtype in KERNEL_DTYPES for t in (weight, a, b))
    rows = all(t.stride(1) == 1 or t.shape[1] == 1 for t in (weight, a, b))
    return types and rows and a.dtype == b.dtype and 0 < a.shape[0] <= MAX_RANK and weight.numel() > 0


def rounds_in_tile(format: Format, K: int, out_dtype: torch.dtype) -> bool:
    """Whether the kernel can round to ``format`` itself: blocks of 8 to 128 that divide K."""
    coding = format.contract.coding
    if not is_known(coding) or not format.contract.rounds_plainly:
        return False
    if coding.is_float8 or coding.scale_block or coding.block[0] != 1:
        return False
    block = coding.block[1]
    return block in (8, 16, 32, 64, 128) and K % block == 0 and out_dtype in KERNEL_DTYPES


def weight_tile(dtype: torch.dtype, rank: int) -> WeightTile:
    """By the adapter's dtype and rank alone: see the top of this file."""
    if dtype == torch.float32 or rank > 64:
        return WeightTile(32, 128, 4)
    return WeightTile(64, 128, 4)


def launch_lora(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scaling: float,
    out: Tensor,
    format: Format | None,
    tile: WeightTile | None = None,
) -> None:
    """The effective weight into ``out`` (N, K) with contiguous rows: W's dtype, or rounded to ``format``."""
    (N, K), rank = weight.shape, a.shape[0]
    tile = tile or weight_tile(a.dtype, rank)
    kind, order, bits, zero_point, block = 0, 0, 4, False, tile.block_k
    thresholds = values = weight
    coding = None if format is None else format.contract.coding
    if coding is not None:
        kind, bits, zero_point, block = _INTEGER, coding.bits, coding.zero_point, coding.block[1]
        if coding.kind == "table":
            kind = _CODEBOOK
            order, thresholds, values = codebook_tables(coding.values, weight.device)
    block_r = max(next_power_of_2(rank), 16)
    even = N % tile.block_n == 0 and K % tile.block_k == 0 and rank == block_r
    with on_device_of(weight):
        _lora_weight_kernel[(cdiv(N, tile.block_n) * cdiv(K, tile.block_k),)](
            weight, a, b, out, thresholds, values, N, K, rank, float(scaling),
            weight.stride(0), a.stride(0), b.stride(0), out.stride(0), KIND=kind, ORDER=order, BITS=bits,
            ZERO_POINT=zero_point, BLOCK=block, EVEN=even, BLOCK_R=block_r,
            PART_R=min(block_r, _FLOAT32_PART) if a.dtype == torch.float32 else block_r,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps, enable_fp_fusion=False,
        )  # fmt: skip


_POINTERS = {"w_ptr": "*bf16", "a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*bf16"}
_POINTERS |= {"midpoints_ptr": "*fp32", "values_ptr": "*fp32"}
_SIZES = dict.fromkeys(("N", "K", "rank"), "i32") | {"scaling": "fp32"}
_SIZES |= dict.fromkeys(("stride_wn", "stride_ar", "stride_bn", "stride_on"), "i32")
_CONSTANTS = {
    "KIND": _INTEGER,
    "ORDER": 0,
    "BITS": 4,
    "ZERO_POINT": False,
    "BLOCK": 128,
    "EVEN": True,
    "BLOCK_R": 16,
    "PART_R": 16,
    "BLOCK_N": 64,
    "BLOCK_K": 128,
}
_SIGNATURE = {**_POINTERS, **_SIZES, **dict.fromkeys(_CONSTANTS, "constexpr")}
_ALIGNED = (*_POINTERS, "N", "K", "stride_wn", "stride_ar", "stride_bn", "stride_on")
_NF4 = {**_CONSTANTS, "KIND": _CODEBOOK, "ORDER": 0xFEDCBA9876543210, "BLOCK": 64}
_FLOAT32 = {"a_ptr": "*fp32", "b_ptr": "*fp32"}

COMPILE_CASES = (
    CompileCase(_lora_weight_kernel, _SIGNATURE, _CONSTANTS, _ALIGNED),
    CompileCase(_lora_weight_kernel, _SIGNATURE, {**_CONSTANTS, "ZERO_POINT": True, "BLOCK": 32}, _ALIGNED),
    CompileCase(_lora_weight_kernel, _SIGNATURE, _NF4, _ALIGNED),
    CompileCase(_lora_weight_kernel, _SIGNATURE, {**_CONSTANTS, "KIND": 0, "EVEN": False}, _ALIGNED),
    CompileCase(
        _lora_weight_kernel,
        {**_SIGNATURE, **_FLOAT32},
        {**_CONSTANTS, "BLOCK_R": 128, "PART_R": _FLOAT32_PART, "BLOCK_N": 32},
        _ALIGNED,
    ),
)
