"""The Triton kernels of gradient_codec.py, which has the formulas and the messages, and their launches.

Codes of E4M3 are made and read with integer arithmetic, so that every GPU has them, also those without the
type. Divisions are IEEE's and no multiply-add is fused: results equal the formats' definitions bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewbits.kernels.codec.gradient_wire import Wire
from fewbits.kernels.codec.quantize_float8_triton import inverse_of, row_largest, scale_of_largest
from fewbits.kernels.launch.jit import CompileCase, cdiv, jit, on_device_of, tl

_TILE = 4096  # values of a program
_LARGEST = {8: 127, 4: 7, 0: 448}  # by KIND: the bits of whole numbers, 0 for E4M3


# 1. What the kernels share.


@jit
def _uniform(seed, first, SHAPE: tl.constexpr, QUARTER: tl.constexpr):
    """Random numbers in [0, 1) of the positions of blocks that begin at ``first`` (a multiple of 4)."""
    counter = first[:, None] // 4 + tl.arange(0, QUARTER)[None, :]
    r0, r1, r2, r3 = tl.randint4x(seed, counter)
    words = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), SHAPE)
    return (words.to(tl.uint32, bitcast=True) >> 8).to(tl.float32) * 5.9604644775390625e-08


@jit
def _whole(y, uniform, STOCHASTIC: tl.constexpr):
    """y (below 2**22) to whole numbers: to nearest even, or up where ``uniform`` is below the fraction."""
    if STOCHASTIC:
        low = tl.floor(y)
        whole = low + tl.where(uniform < y - low, 1.0, 0.0)
    else:
        whole = (y + 12582912.0) - 12582912.0
    return whole


@jit
def _rounded(y, uniform, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Scaled values to those that have a code, and the codes (int32)."""
    if KIND != 0:
        largest: tl.constexpr = 127.0 if KIND == 8 else 7.0
        value = tl.minimum(tl.maximum(_whole(y, uniform, STOCHASTIC), -largest), largest)
        code = value.to(tl.int32)
    else:
        y = tl.minimum(tl.maximum(y, -448.0), 448.0)
        exponent = tl.maximum((y.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)
        step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)  # a power of two: nothing below rounds
        steps = ((257 - exponent) << 23).to(tl.float32, bitcast=True)
        value = _whole(y * steps, uniform, STOCHASTIC) * step
        magnitude = tl.abs(value)
        normal = (magnitude.to(tl.int32, bitcast=True) >> 20) - 960
        code = tl.where(magnitude < 0.015625, (magnitude * 512.0).to(tl.int32), normal)
        signed = value if STOCHASTIC else y
        code = code | ((signed.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return value, code


@jit
def _values(message_ptr, row_at, column, mask, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """The values (float32, without their scale) of blocks that begin at ``column`` of rows at ``row_at``."""
    if KIND == 4:
        at = (row_at + column // 2)[:, None] + tl.arange(0, BLOCK // 2)[None, :]
        byte = tl.load(message_ptr + at, mask=mask[:, None], other=0).to(tl.int32)
        nibble = tl.reshape(tl.join(byte & 15, byte >> 4), (byte.shape[0], BLOCK))
        value = ((nibble ^ 8) - 8).to(tl.float32)
    else:
        at = (row_at + column)[:, None] + tl.arange(0, BLOCK)[None, :]
        byte = tl.load(message_ptr + at, mask=mask[:, None], other=0).to(tl.int32)
        value = ((byte ^ 128) - 128).to(tl.float32)
        if KIND == 0:
            normal = (((byte & 127) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
            magnitude = tl.where((byte & 0x78) == 0, (byte & 7).to(tl.float32) * 0.001953125, normal)
            value = tl.where(byte >= 128, -magnitude, magnitude)
    return value


@jit
def _send(
    x, message_ptr, scales_ptr, row_at, scale_at, column, mask, seed, position,
    KIND: tl.constexpr, LARGEST: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes and scales of blocks x into their messages; what they leave of x, 0 where that is not finite."""
    scale = scale_of_largest(row_largest(x), LARGEST)
    inverse = inverse_of(scale)
    y = tl.where((inverse == inverse)[:, None], x * inverse[:, None], 0.0)
    uniform = y
    if STOCHASTIC:
        uniform = _uniform(seed, position, x.shape, BLOCK // 4)
    value, code = _rounded(y, uniform, KIND, STOCHASTIC)
    if KIND == 4:
        low, high = tl.split(tl.reshape(code & 15, (x.shape[0], BLOCK // 2, 2)))
        at = (row_at + column // 2)[:, None] + tl.arange(0, BLOCK // 2)[None, :]
        tl.store(message_ptr + at, (low | (high << 4)).to(tl.uint8), mask=mask[:, None])
    else:
        at = (row_at + column)[:, None] + tl.arange(0, BLOCK)[None, :]
        tl.store(message_ptr + at, (code & 255).to(tl.uint8), mask=mask[:, None])
    tl.store(scales_ptr + scale_at, scale, mask=mask)
    return tl.where((scale == scale)[:, None], x - value * scale[:, None], 0.0)


# 2. The kernels. A program takes ROWS blocks.


@jit(do_not_specialize=("seed",))  # type: ignore[untyped-decorator]
def _quantize_gradient_kernel(
    gradient_ptr, residual_ptr, message_ptr, scales_ptr, N, row, row_bytes, code_bytes, num_blocks, total,
    seed,
    KIND: tl.constexpr, LARGEST: tl.constexpr, STOCHASTIC: tl.constexpr, FEEDBACK: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Blocks of the gradient: block b is number ``b % num_blocks`` of row ``b // num_blocks``."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w, column = block // num_blocks, block % num_blocks * BLOCK
    offs = column[:, None] + tl.arange(0, BLOCK)[None, :]
    at = w[:, None] * row + offs
    mask = (block < total)[:, None] & (offs < row) & (at < N)
    x = tl.load(gradient_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if FEEDBACK:
        x += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    left = _send(
        x, message_ptr, scales_ptr, w * row_bytes, w * (row_bytes // 4) + code_bytes // 4 + column // BLOCK,
        column, block < total, seed, block * BLOCK, KIND, LARGEST, STOCHASTIC, BLOCK,
    )  # fmt: skip
    if FEEDBACK:
        tl.store(residual_ptr + at, left.to(residual_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=("seed",))  # type: ignore[untyped-decorator]
def _sum_gradients_kernel(
    received_ptr, received_scales_ptr, residual_ptr, out_ptr, out_scales_ptr, num_ranks, row, row_bytes,
    code_bytes, num_blocks, factor, seed,
    KIND: tl.constexpr, LARGEST: tl.constexpr, AGAIN: tl.constexpr, STOCHASTIC: tl.constexpr,
    FEEDBACK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Blocks of one row, of all ranks: their sum, AGAIN as a message, else as values."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = block < num_blocks
    column = block * BLOCK
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    at = block * 0
    for _ in range(num_ranks):
        scale = tl.load(received_scales_ptr + (at + code_bytes) // 4 + block, mask=inside, other=0.0)
        total += _values(received_ptr, at, column, inside, KIND, BLOCK) * scale[:, None]
        at += row_bytes
    total *= factor
    offs = column[:, None] + tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None] & (offs < row)
    if AGAIN:
        if FEEDBACK:
            total += tl.load(residual_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        left = _send(
            tl.where(mask, total, 0.0), out_ptr, out_scales_ptr, block * 0, code_bytes // 4 + block, column,
            inside, seed, column, KIND, LARGEST, STOCHASTIC, BLOCK,
        )  # fmt: skip
        if FEEDBACK:
            tl.store(residual_ptr + offs, left.to(residual_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _dequantize_gradient_kernel(
    message_ptr, scales_ptr, out_ptr, N, row, row_bytes, code_bytes, num_blocks, total,
    KIND: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Blocks of all rows to values, without the padding."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = block < total
    w, column = block // num_blocks, block % num_blocks * BLOCK
    at = w * row_bytes
    scale = tl.load(scales_ptr + (at + code_bytes) // 4 + column // BLOCK, mask=inside, other=0.0)
    value = _values(message_ptr, at, column, inside, KIND, BLOCK) * scale[:, None]
    offs = column[:, None] + tl.arange(0, BLOCK)[None, :]
    to = w[:, None] * row + offs
    mask = inside[:, None] & (offs < row) & (to < N)
    tl.store(out_ptr + to, value.to(out_ptr.dtype.element_ty), mask=mask)


# 3. The launches.


def _constants(wire: Wire) -> dict[str, Any]:
    kind = 0 if wire.coding.is_float8 else wire.bits
    return {"KIND": kind, "BLOCK": wire.block, "ROWS": max(_TILE // wire.block, 1)}


def _seed_bits(seed: int | None) -> int:
    """A seed as Triton always types it, 64 bits: a small one would compile the kernel once more."""
    return 2**62 if seed is None else seed


def launch_quantize(
    gradient: Tensor, residual: Tensor, message: Tensor, wire: Wire, seed: int | None = None
) -> None:
    """`quantize_gradient_ref`, in one pass."""
    constants = _constants(wire)
    total = message.shape[0] * wire.num_blocks
    if not total:
        return
    with on_device_of(gradient):
        _quantize_gradient_kernel[(cdiv(total, constants["ROWS"]),)](
            gradient, residual if residual.numel() else gradient, message, message.view(torch.float32),
            gradient.numel(), wire.row, message.shape[1], wire.code_bytes, wire.num_blocks, total,
            _seed_bits(seed), **constants, LARGEST=_LARGEST[constants["KIND"]], STOCHASTIC=seed is not None,
            FEEDBACK=residual.numel() > 0, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def launch_sum(
    received: Tensor,
    out: Tensor,
    wire: Wire,
    factor: float,
    *,
    residual: Tensor | None = None,
    seed: int | None = None,
) -> None:
    """`reduce_gradients_ref` into values, or with a residual (perhaps empty) `sum_gradients_ref`."""
    constants = _constants(wire)
    if not wire.num_blocks:
        return
    again = residual is not None
    feedback = residual is not None and residual.numel() > 0
    scales = received.view(torch.float32)
    with on_device_of(received):
        _sum_gradients_kernel[(cdiv(wire.num_blocks, constants["ROWS"]),)](
            received, scales, residual if feedback else scales, out,
            out.view(torch.float32) if again else scales, received.shape[0], wire.row,
            received.shape[1], wire.code_bytes, wire.num_blocks, factor, _seed_bits(seed),
            **constants, LARGEST=_LARGEST[constants["KIND"]], AGAIN=again, STOCHASTIC=seed is not None,
            FEEDBACK=feedback, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def launch_dequantize(messages: Tensor, out: Tensor, wire: Wire) -> None:
    """`dequantize_gradient_ref`."""
    constants = _constants(wire)
    total = messages.shape[0] * wire.num_blocks
    if not total or not out.numel():
        return
    with on_device_of(messages):
        _dequantize_gradient_kernel[(cdiv(total, constants["ROWS"]),)](
            messages, messages.view(torch.float32), out, out.numel(), wire.row, messages.shape[1],
            wire.code_bytes, wire.num_blocks, total, **constants, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


_INTS = dict.fromkeys(("row", "row_bytes", "code_bytes", "num_blocks"), "i32")
_WIRE = ("row", "row_bytes", "code_bytes")
_QUANTIZE: dict[str, str] = {
    "gradient_ptr": "*fp32",
    "residual_ptr": "*fp32",
    "message_ptr": "*u8",
    "scales_ptr": "*fp32",
    "N": "i32",
    **_INTS,
    "total": "i32",
    "seed": "i64",
}
_SUM: dict[str, str] = {
    "received_ptr": "*u8", "received_scales_ptr": "*fp32", "residual_ptr": "*fp32", "out_ptr": "*u8",
    "out_scales_ptr": "*fp32", "num_ranks": "i32", **_INTS, "factor": "fp32", "seed": "i64",
}  # fmt: skip
_BACK: dict[str, str] = {
    "message_ptr": "*u8",
    "scales_ptr": "*fp32",
    "out_ptr": "*fp32",
    "N": "i32",
    **_INTS,
    "total": "i32",
}


def _cases() -> list[CompileCase]:
    """Each kernel for each kind of codes; the kinds take turns in being stochastic, and in the plain sum."""
    cases = []
    for kind, block, stochastic in ((8, 128, False), (4, 64, True), (0, 128, True)):
        size = {"BLOCK": block, "ROWS": _TILE // block}
        most = {"KIND": kind, "LARGEST": _LARGEST[kind]}
        constants: dict[str, Any] = {**most, "STOCHASTIC": stochastic, "FEEDBACK": True, **size}
        aligned: tuple[str, ...] = ("gradient_ptr", "residual_ptr", "message_ptr", "scales_ptr", "N", *_WIRE)
        signature = _QUANTIZE | dict.fromkeys(constants, "constexpr")
        cases.append(CompileCase(_quantize_gradient_kernel, signature, constants, aligned))
        again = kind != 0
        constants = {**most, "AGAIN": again, "STOCHASTIC": stochastic, "FEEDBACK": again, **size}
        aligned = ("received_ptr", "received_scales_ptr", "residual_ptr", "out_ptr", "out_scales_ptr", *_WIRE)
        signature = _SUM | {"out_ptr": "*u8" if again else "*fp32"} | dict.fromkeys(constants, "constexpr")
        cases.append(CompileCase(_sum_gradients_kernel, signature, constants, aligned))
        if kind != 8:
            constants = {"KIND": kind, **size}
            aligned = ("message_ptr", "scales_ptr", "out_ptr", "N", *_WIRE)
            signature = _BACK | dict.fromkeys(constants, "constexpr")
            cases.append(CompileCase(_dequantize_gradient_kernel, signature, constants, aligned))
    return cases


COMPILE_CASES = tuple(_cases())
