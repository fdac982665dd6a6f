"""Triton kernels of quantize.py: each row's chunk to signs and magnitudes under its scale.

Rounding to nearest even is ``(x + 1.5 * 2**23) - 1.5 * 2**23``; divisions are IEEE's, and no multiply-add is
fused: every code and scale equals the definition's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.formats.stochastic import Stochastic
from fewbits.kernels.launch.jit import CompileCase, cdiv, jit, next_power_of_2, on_device_of, tl, triton

_TILE = 4096  # values of a program
_TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def takes(x: Tensor) -> bool:
    """Whether the kernel knows the dtype.

    x may have any shape.
    """
    return triton is not None and x.dtype in _TYPES


@jit
def _rounded(x, dtype: tl.constexpr):
    """float32 rounded to nearest even as in ``dtype``; bfloat16 by its bits: the interpreter's cast cuts."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 32767 + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    elif dtype == tl.float16:
        x = x.to(tl.float16).to(tl.float32)
    return x


@jit
def _values(x_ptr, smooth_ptr, at, column, mask, SMOOTH: tl.constexpr):
    """Values of x as float32; SMOOTH 1 divides, 2 multiplies by the smooth scales, rounded to x's type."""
    loaded = tl.load(x_ptr + at, mask=mask, other=0.0)
    x = loaded.to(tl.float32)
    if SMOOTH > 0:
        smooth = _rounded(tl.load(smooth_ptr + column, mask=mask, other=1.0).to(tl.float32), loaded.dtype)
        x = _rounded(tl.div_rn(x, smooth) if SMOOTH == 1 else x * smooth, loaded.dtype)
    return x


@jit
def _quantize_kernel(
    x_ptr, smooth_ptr, codes_ptr, scales_ptr, num_parts, D, num_chunks, chunk, stride_x,
    MAX_CODE: tl.constexpr, SMOOTH: tl.constexpr, BY_INVERSE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Some parts, a row's chunk each: first their largest magnitudes, then their codes."""
    part = tl.program_id(0).to(tl.int64) * PARTS + tl.arange(0, PARTS)
    row, first = part // num_chunks, (part % num_chunks) * chunk
    length = tl.where(part < num_parts, tl.minimum(chunk, D - first), 0)
    largest = tl.zeros((PARTS,), dtype=tl.float32)
    bad = tl.zeros((PARTS,), dtype=tl.int32)
    for start in range(0, chunk, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs[None, :] < length[:, None]
        column = first[:, None] + offs[None, :]
        x = tl.abs(_values(x_ptr, smooth_ptr, row[:, None] * stride_x + column, column, mask, SMOOTH))
        finite = x <= 3.4028234663852886e38
        largest = tl.maximum(largest, tl.max(tl.where(finite, x, 0.0), axis=1))
        bad = tl.maximum(bad, tl.max(tl.where(finite, 0, 1), axis=1))
    scale = tl.div_rn(tl.maximum(largest, 1e-5), MAX_CODE * 1.0)
    tl.store(scales_ptr + part, tl.where(bad > 0, float("nan"), scale), mask=part < num_parts)
    for start in range(0, chunk, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs[None, :] < length[:, None]
        column = first[:, None] + offs[None, :]
        x = _values(x_ptr, smooth_ptr, row[:, None] * stride_x + column, column, mask, SMOOTH)
        if BY_INVERSE:
            x = x * tl.div_rn(1.0, scale)[:, None]
        else:
            x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        x = tl.where(bad[:, None] > 0, 0.0, x)
        code = (x + 12582912.0) - 12582912.0
        code = tl.minimum(tl.maximum(code, -MAX_CODE * 1.0), MAX_CODE * 1.0)
        tl.store(codes_ptr + row[:, None] * D + column, code.to(tl.int8), mask=mask)


def launch(
    x: Tensor, smooth_scales: Tensor | None, options: Stochastic, *, is_b: bool
) -> tuple[Tensor, Tensor]:
    """Codes and scales of x (..., D) with at least one value; see `quantize_stochastic`."""
    layout = options.layout(tuple(x.shape))
    codes, scales = (torch.empty(s.shape, dtype=s.dtype, device=x.device) for s in layout.values())
    D = x.shape[-1] if x.dim() else 1
    rows = x.reshape(-1, D)
    if rows.stride(1) != 1 and D > 1:
        rows = rows.contiguous()
    chunk, num_chunks = options.chunk_size(D), scales.shape[-1]
    block = min(_TILE, next_power_of_2(chunk))
    num_parts = rows.shape[0] * num_chunks
    # Few rows: a part each, so that they spread over the GPU.
    parts = 1 if num_parts <= 1024 else max(1, _TILE // block)
    smooth = 0 if smooth_scales is None else 2 if is_b else 1
    with on_device_of(x):
        _quantize_kernel[(cdiv(num_parts, parts),)](
            rows, rows if smooth_scales is None else smooth_scales.contiguous(), codes, scales, num_parts, D,
            num_chunks, chunk, rows.stride(0), MAX_CODE=options.max_code, SMOOTH=smooth,
            BY_INVERSE=num_chunks > 1, PARTS=parts, BLOCK=block, num_warps=4 if parts * block > 512 else 1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales


def _case(x: str, smooth: int, parts: int, block: int, num_warps: int) -> CompileCase:
    pointers = {"x_ptr": x, "smooth_ptr": "*fp32", "codes_ptr": "*i8", "scales_ptr": "*fp32"}
    sizes = dict.fromkeys(("num_parts", "D", "num_chunks", "chunk", "stride_x"), "i32")
    constants = {
        "MAX_CODE": 127,
        "SMOOTH": smooth,
        "BY_INVERSE": block == 128,
        "PARTS": parts,
        "BLOCK": block,
    }
    signature = pointers | sizes | dict.fromkeys(constants, "constexpr")
    return CompileCase(
        _quantize_kernel, signature, constants, ("x_ptr", "codes_ptr", "D", "chunk", "stride_x"), num_warps
    )


COMPILE_CASES = (_case("*bf16", 1, 32, 128, 4), _case("*bf16", 0, 1, 128, 1), _case("*fp32", 2, 1, 4096, 4))
