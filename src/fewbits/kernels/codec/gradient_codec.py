"""Gradients to messages of few bits and back, with error feedback.

A flat gradient of N values is cut into W rows of ``row`` values, one for each rank; a row becomes a message:

    x = gradient + residual        code = round(x / scale)        residual = x - code * scale

with one scale for a block of values, as `fewbits.formats.integer` and `fewbits.formats.float8` define it.
What rounding takes away in one step is so added in the next (Seide et al. 2014; Karimireddy et al. 2019,
arXiv 1901.09847). The message of a row, of `Wire.row_bytes`; the W messages make one tensor:

    codes (1 or 1/2 byte a value) | scales, float32 (4 bytes a block) | values left in float32 | padding to 16

The rows are filled up with zeros to whole blocks. A block with a NaN or an infinity has NaN as its scale: it
arrives as NaN on every rank, and its residual is 0. Stochastic rounding takes the random bits of position
``w * padded_row + i`` (`fewbits.formats.rounding`): the same on every device.

Four ops: `quantize_gradient` as above; `sum_gradients` decodes what came from W ranks for one row, adds it in
float32 in the order of the ranks, multiplies by a factor, and quantises again with a residual of its own;
`reduce_gradients` is the same without the second quantisation; `dequantize_gradient` decodes W rows.

Floors, in bytes for N values of 4-byte gradients and residuals, and messages of m bytes a value (INT8 and
E4M3 1.031, INT4 0.563): quantise (12 + m) N, one pass; sum and quantise again (W m + 8 + m) N / W; decode
(m + 4) N. For 1 GiB of float32 gradients in INT8 at the 4.28 TB/s that a copy reaches on an H200: 0.82 ms,
0.06 ms + 0.57 ms / W, 0.32 ms. Measured there for W = 4: 0.82, 0.27 and 0.42 ms.

There is no gradient: this is what happens to gradients. The kernels are in gradient_codec_triton.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.codec.dequantize import format_of_text, text_of_format
from fewbits.kernels.codec.gradient_codec_triton import launch_dequantize, launch_quantize, launch_sum
from fewbits.kernels.codec.gradient_wire import Wire, wire_format, wire_of
from fewbits.kernels.launch.ops import one_by_one, passes_dispatcher

__all__ = [
    "Wire",
    "dequantize_gradient",
    "dequantize_gradient_ref",
    "quantize_gradient",
    "quantize_gradient_ref",
    "reduce_gradients",
    "reduce_gradients_ref",
    "sum_gradients",
    "sum_gradients_ref",
    "wire_format",
    "wire_of",
]

# 1. The definition. 2. has no backward.


def quantize_gradient_ref(
    gradient: Tensor, residual: Tensor, message: Tensor, wire: Wire, seed: int | None = None
) -> None:
    """Codes and scales of gradient + residual into ``message`` (W, row_bytes), and the new residual."""
    x = gradient.float() + residual.float() if residual.numel() else gradient.float()
    left = _write(_to_rows(x, message, wire), message, wire, seed)
    if residual.numel():
        residual.copy_(_from_rows(left, residual.numel(), wire).to(residual.dtype))


def reduce_gradients_ref(received: Tensor, out: Tensor, wire: Wire, factor: float = 1.0) -> None:
    """``out`` (row,) = factor * (the sum over ranks of what ``received`` (W, row_bytes) decodes to)."""
    out.copy_(_sum(received, wire, factor)[: out.numel()])


def sum_gradients_ref(
    received: Tensor,
    residual: Tensor,
    message: Tensor,
    wire: Wire,
    factor: float = 1.0,
    seed: int | None = None,
) -> None:
    """`reduce_gradients_ref`, quantised again into ``message`` (1, row_bytes) with ``residual`` (row,)."""
    quantize_gradient_ref(_sum(received, wire, factor)[: wire.row], residual, message, wire, seed)


def dequantize_gradient_ref(messages: Tensor, out: Tensor, wire: Wire) -> None:
    """``out`` (N,) = what ``messages`` (W, row_bytes) decode to, without the padding."""
    out.copy_(_from_rows(wire.packed(messages).dequantize(torch.float32), out.numel(), wire))


def _write(x: Tensor, message: Tensor, wire: Wire, seed: int | None) -> Tensor:
    """Codes and scales of x (W, padded_row) into the messages; what they leave of it, 0 where not finite."""
    packed = wire.format.quantize(x, seed=seed)
    message[:, : wire.code_bytes] = packed.codes.view(torch.uint8)
    wire.scales(message).copy_(packed.scales)
    lost = packed.scales.isnan().repeat_interleave(wire.block, 1)
    return (x - packed.dequantize(torch.float32)).masked_fill_(lost, 0.0)


def _sum(received: Tensor, wire: Wire, factor: float) -> Tensor:
    decoded = wire.packed(received).dequantize(torch.float32)
    total = torch.zeros_like(decoded[0])
    for part in decoded:  # in the order of the ranks, as the kernel
        total += part
    return total.mul_(total.new_full((), factor))


def _to_rows(flat: Tensor, message: Tensor, wire: Wire) -> Tensor:
    """(N,) to (W, padded_row), zeros where there is nothing."""
    rows = message.shape[0]
    whole = torch.nn.functional.pad(flat, (0, rows * wire.row - flat.numel())).view(rows, wire.row)
    return torch.nn.functional.pad(whole, (0, wire.padded_row - wire.row))


def _from_rows(rows: Tensor, count: int, wire: Wire) -> Tensor:
    return rows[:, : wire.row].reshape(-1)[:count]


# 3. The kernels are in gradient_codec_triton.py. 4. The ops: on CUDA the kernels, on a CPU the definition, a
# part at a time, whose temporaries stay in cache: a third of the time.

_PART = 2**16


def _quantize_in_parts(gradient: Tensor, residual: Tensor, message: Tensor, wire: Wire) -> None:
    """`quantize_gradient_ref`, to nearest: blocks know nothing of each other."""
    scales, size = wire.scales(message), max(_PART // wire.block, 1) * wire.block
    for w in range(message.shape[0]):
        end = min((w + 1) * wire.row, gradient.numel())
        for column in range(0, wire.padded_row, size):
            part = Wire(wire.format, min(size, wire.padded_row - column))
            a = min(w * wire.row + column, end)
            b = min(a + part.row, end)
            piece = part.empty(1, message.device)
            quantize_gradient_ref(gradient[a:b], residual[a:b], piece, part)
            at, block = column * wire.bits // 8, column // wire.block
            message[w, at : at + part.code_bytes] = piece[0, : part.code_bytes]
            scales[w, block : block + part.num_blocks] = part.scales(piece)[0]


def _sum_in_parts(received: Tensor, out: Tensor, wire: Wire, factor: float) -> None:
    """`reduce_gradients_ref`."""
    scales, size = wire.scales(received), max(_PART // wire.block, 1) * wire.block
    for column in range(0, wire.padded_row, size):
        part = Wire(wire.format, min(size, wire.padded_row - column))
        piece = part.empty(received.shape[0], received.device)
        at, block = column * wire.bits // 8, column // wire.block
        piece[:, : part.code_bytes] = received[:, at : at + part.code_bytes]
        part.scales(piece).copy_(scales[:, block : block + part.num_blocks])
        reduce_gradients_ref(piece, out[column : column + part.row], part, factor)


@torch.library.custom_op("fewbits::quantize_gradient", mutates_args=("residual", "message"))
def _quantize(
    gradient: Tensor, residual: Tensor, message: Tensor, row: int, format: str, seed: int | None
) -> None:
    wire = _wire(row, format)
    if seed is None:
        _quantize_in_parts(gradient, residual, message, wire)
    else:
        quantize_gradient_ref(gradient, residual, message, wire, seed)


class SumAgain(NamedTuple):
    """The arguments of the op of `sum_gradients`."""

    received: Tensor
    residual: Tensor
    message: Tensor
    row: int
    format: str
    factor: float
    seed: int | None


@torch.library.custom_op("fewbits::sum_gradients", mutates_args=("residual", "message"))
@one_by_one
def _sum_again(o: SumAgain) -> None:
    total = torch.empty(o.row, dtype=torch.float32, device=o.received.device)
    _sum_in_parts(o.received, total, _wire(o.row, o.format), o.factor)
    _quantize(total, o.residual, o.message, o.row, o.format, o.seed)


@torch.library.custom_op("fewbits::reduce_gradients", mutates_args=("out",))
def _reduce(received: Tensor, out: Tensor, row: int, format: str, factor: float) -> None:
    _sum_in_parts(received, out, _wire(row, format), factor)


@torch.library.custom_op("fewbits::dequantize_gradient", mutates_args=("out",))
def _dequantize(messages: Tensor, out: Tensor, row: int, format: str) -> None:
    dequantize_gradient_ref(messages, out, _wire(row, format))


@_quantize.register_kernel("cuda")
def _(gradient: Tensor, residual: Tensor, message: Tensor, row: int, format: str, seed: int | None) -> None:
    launch_quantize(gradient, residual, message, _wire(row, format), seed)


@_sum_again.register_kernel("cuda")
@one_by_one
def _(o: SumAgain) -> None:
    launch_sum(o.received, o.message, _wire(o.row, o.format), o.factor, residual=o.residual, seed=o.seed)


@_reduce.register_kernel("cuda")
def _(received: Tensor, out: Tensor, row: int, format: str, factor: float) -> None:
    launch_sum(received, out, _wire(row, format), factor)


@_dequantize.register_kernel("cuda")
def _(messages: Tensor, out: Tensor, row: int, format: str) -> None:
    launch_dequantize(messages, out, _wire(row, format))


def _wire(row: int, format: str) -> Wire:
    return Wire(format_of_text(format), row)


# 5. The public functions. They write into given tensors.


@torch.no_grad()
def quantize_gradient(
    gradient: Tensor, residual: Tensor | None, message: Tensor, wire: Wire, *, seed: int | None = None
) -> None:
    """A gradient to W messages; what they leave of it becomes the residual.

    Args:
        gradient: (N,) floating point, contiguous, N at most W * ``wire.row``.
        residual: (N,) float32 or bfloat16, added first and renewed; None: no error feedback.
        message: (W, ``wire.row_bytes``) uint8; codes and scales are written, the plain values are not.
        wire: how a row lies in its message.
        seed: None rounds to nearest; a whole number stochastically.
    """
    into = _given(residual, gradient)
    if wire.row and passes_dispatcher(gradient):
        launch_quantize(gradient, into, message, wire, _signed(seed))
    elif wire.row:
        _quantize(gradient, into, message, wire.row, text_of_format(wire.format), _signed(seed))


@torch.no_grad()
def sum_gradients(
    received: Tensor,
    residual: Tensor | None,
    message: Tensor,
    wire: Wire,
    *,
    factor: float = 1.0,
    seed: int | None = None,
) -> None:
    """The messages of W ranks for one row, added in float32 times ``factor``, as one message again.

    Args:
        received: (W, ``wire.row_bytes``) uint8.
        residual: (``wire.row``,) as in `quantize_gradient`.
        message: (1, ``wire.row_bytes``) uint8, to be written; the sum of the plain values too.
        wire: how a row lies in its message.
        factor: 1 / W for the mean.
        seed: as in `quantize_gradient`.
    """
    into = _given(residual, received)
    if wire.row and passes_dispatcher(received):
        launch_sum(received, message, wire, factor, residual=into, seed=_signed(seed))
    elif wire.row:
        _sum_again(received, into, message, wire.row, text_of_format(wire.format), factor, _signed(seed))
    if wire.plain:
        wire.plain_values(message).copy_(wire.plain_values(received).sum(0, keepdim=True).mul_(factor))


@torch.no_grad()
def reduce_gradients(received: Tensor, out: Tensor, wire: Wire, *, factor: float = 1.0) -> None:
    """The messages of W ranks for one row, added in float32 times ``factor``, into ``out`` (row,)."""
    if wire.row and passes_dispatcher(received):
        launch_sum(received, out, wire, factor)
    elif wire.row:
        _reduce(received, out, wire.row, text_of_format(wire.format), factor)


@torch.no_grad()
def dequantize_gradient(messages: Tensor, out: Tensor, wire: Wire) -> None:
    """What W messages decode to, into ``out`` (N,) of any floating-point type, without the padding."""
    if wire.row and passes_dispatcher(messages):
        launch_dequantize(messages, out, wire)
    elif wire.row:
        _dequantize(messages, out, wire.row, text_of_format(wire.format))


def _given(residual: Tensor | None, like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=like.device) if residual is None else residual


def _signed(seed: int | None) -> int | None:
    """An op takes 64 bits with a sign; the generator reads them without one."""
    return None if seed is None else (seed + 2**63) % 2**64 - 2**63
