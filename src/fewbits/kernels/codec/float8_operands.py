"""A matrix in float8 as both operands that it is in a training step: its rows, and its columns as rows.

x (M, K) is read once and written twice, as codes (M, K) and as codes of its transpose (K, M), because a GPU
multiplies 8 bits by rows of both operands only.

    `one_multiplier`     codes = float8(cut(x * multiplier)), one multiplier for all; the two hold equal codes
    `block_multipliers`  the same with a multiplier for 128 values of a row of x, and of x^T, or for a tile of
                         128 x 128; multiplier = largest number of the type / amax of the block

cut to plus or minus the largest number, rounded to nearest, ties to even. Multipliers point towards the
codes; what one multiplies by to come back, the scale, is ``1 / multiplier``, in float32. Both as Transformer
Engine documents them, where quantize_float8.py has the formats of this library: a NaN stays a NaN, and an
amax of 0 has the multiplier 1. In place of x an activation of x may be rounded, ``x * sigmoid(p(x))`` with
``p(x) = linear * x + cubic * x**3``, first to x's own 16 bits, or its gradient ``dy * d/dx``; and a bias's
gradient, the sums of columns, may be taken on the way. There is no gradient.

Floor: 2 bytes a value read and 2 written: 15872 x 4096 are 260 MB, 61 us at 4.28 TB/s.

The kernels are in float8_operands.cu, for 16 bits and sides that 8 and 16 divide, and, for all others, in
float8_operands_triton.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.blocks import from_blocks, scale_shape, to_blocks
from fewbits.kernels.codec import float8_operands_cuda as by_hand
from fewbits.kernels.codec.float8_operands_cuda import SmoothActivation
from fewbits.kernels.codec.float8_operands_triton import (
    launch_amax,
    launch_blocks,
    launch_multiplier,
    launch_one,
)
from fewbits.kernels.codec.quantize_float8_triton import has_kernel
from fewbits.kernels.launch.ops import one_by_one, passes_dispatcher, run

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_FLOAT32_MAX = torch.finfo(torch.float32).max


# 1. The definition.


def multiplier_of_amax(
    amax: Tensor, largest: float, *, power_of_two: bool, epsilon: float = 0.0, overflow: float = _FLOAT32_MAX
) -> Tensor:
    """The multiplier that brings ``amax`` to ``largest``.

    Args:
        amax: any shape, float32.
        largest: 448 or 57344.
        power_of_two: the next power of two below instead.
        epsilon: amaxes are at least this.
        overflow: taken where the quotient is infinite: the largest number of the tensor's own type.

    Returns:
        float32 of that shape: 1 where amax is 0, and 0 where it is infinite.
    """
    amax = amax.clamp(min=epsilon)
    multiplier = amax.new_full((), largest) / amax
    multiplier = torch.where(multiplier.isinf(), amax.new_full((), overflow), multiplier)
    if power_of_two:
        bits = multiplier.contiguous().view(torch.int32) & 0x7F800000  # the mantissa goes
        multiplier = torch.where(amax.isnan(), amax, bits.view(torch.float32))
    return torch.where(amax == 0, torch.ones_like(amax), multiplier)


def to_float8(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """To the nearest code, ties to even, cut to plus or minus the largest; a NaN stays one.

    ``scaled`` is float32 of any shape, and the result has the same.
    """
    largest = LARGEST[dtype]
    return scaled.clamp(-largest, largest).to(dtype)


def amax_ref(x: Tensor) -> Tensor:
    """The largest magnitude of x (any shape) as float32 (1,): 0 for an empty tensor, NaN if one is in it."""
    if not x.numel():
        return torch.zeros(1, device=x.device, dtype=torch.float32)
    return x.abs().amax().float().view(1)


def one_multiplier_ref(x: Tensor, multiplier: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes (M, K) of x (M, K) under a multiplier (1,)."""
    return to_float8(x.float() * multiplier, dtype)


def through_ref(x: Tensor, through: SmoothActivation) -> Tensor:
    """What is rounded in place of x (M, K), in x's dtype: x itself where nothing is asked for."""
    if not through.is_on:
        return x
    wide = x.float()
    s = torch.sigmoid(wide * (through.linear + through.cubic * wide**2))
    if not through.dy.numel():
        return (wide * s).to(x.dtype)
    slope = through.linear + 3 * through.cubic * wide**2
    return (through.dy.float() * (s + (wide * s * (1 - s) * slope).nan_to_num(0.0))).to(x.dtype)


def column_sums_ref(x: Tensor) -> Tensor:
    """Sums (K,) of the columns of x (M, K), in float32: a bias's gradient."""
    return x.sum(0, dtype=torch.float32)


def block_multipliers_ref(
    x: Tensor, dtype: torch.dtype, *, tile: bool, power_of_two: bool, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Codes (M, K) and scales (M or ceil(M / 128), ceil(K / 128)); the last blocks may be short."""
    block, shape = (128, 128) if tile else (1, 128), (x.shape[0], x.shape[1])
    blocks = to_blocks(x.float(), block)
    multiplier = multiplier_of_amax(
        blocks.abs().amax(dim=(1, 3), keepdim=True),
        LARGEST[dtype],
        power_of_two=power_of_two,
        epsilon=epsilon,
        overflow=torch.finfo(x.dtype).max,
    )
    codes = from_blocks(to_float8(blocks * multiplier, dtype), shape, block)
    return codes, (1.0 / multiplier).view(scale_shape(shape, block))


# 2. The ops: on a CPU they run the definition, on CUDA the kernels. What is not wanted is of no values.


def _raise_to(largest: Tensor, x: Tensor) -> None:
    if largest.numel():
        largest.copy_(torch.maximum(largest, amax_ref(x).view_as(largest)))


@torch.library.custom_op("fewbits::float8_amax", mutates_args=("largest",))
def _amax(x: Tensor, largest: Tensor) -> None:
    _raise_to(largest, x)


@_amax.register_kernel("cuda")
def _cuda_amax(x: Tensor, largest: Tensor) -> None:
    if x.numel() and has_kernel(x) and x.is_contiguous():
        launch_amax(x, largest)
    else:
        _raise_to(largest, x)


def _write_multiplier(
    amax: Tensor, dtype: torch.dtype, power_of_two: bool, epsilon: float, multiplier: Tensor, scale: Tensor
) -> None:
    multiplier.copy_(
        multiplier_of_amax(amax, LARGEST[dtype], power_of_two=power_of_two, epsilon=epsilon).view(1)
    )
    scale.copy_(1.0 / multiplier)


@torch.library.custom_op("fewbits::float8_multiplier", mutates_args=("multiplier", "scale"))
def _one_scale(
    amax: Tensor, dtype: torch.dtype, power_of_two: bool, epsilon: float, multiplier: Tensor, scale: Tensor
) -> None:
    _write_multiplier(amax, dtype, power_of_two, epsilon, multiplier, scale)


@_one_scale.register_kernel("cuda")
def _cuda_one_scale(
    amax: Tensor, dtype: torch.dtype, power_of_two: bool, epsilon: float, multiplier: Tensor, scale: Tensor
) -> None:
    if has_kernel(amax):
        launch_multiplier(amax, dtype, power_of_two, epsilon, multiplier, scale)
    else:
        _write_multiplier(amax, dtype, power_of_two, epsilon, multiplier, scale)


def _write_sums(sums: Tensor, x: Tensor) -> None:
    if sums.numel():
        sums.copy_(column_sums_ref(x))


class OneArguments(NamedTuple):
    """What the op of `one_multiplier` takes. What is not wanted is of no values."""

    x: Tensor  # (M, K)
    multiplier: Tensor  # (1,)
    rows: Tensor  # (M, K)
    columns: Tensor  # (K, M)
    largest: Tensor  # (1,)
    sums: Tensor  # (K,), of columns
    through: SmoothActivation


def _write_one(o: OneArguments) -> None:
    x = through_ref(o.x, o.through)
    _raise_to(o.largest, x)
    _write_sums(o.sums, x)
    codes = one_multiplier_ref(x, o.multiplier, o.rows.dtype)
    if o.rows.numel():
        o.rows.copy_(codes)
    if o.columns.numel():
        o.columns.copy_(codes.t())


@torch.library.custom_op(
    "fewbits::float8_one_multiplier", mutates_args=("rows", "columns", "largest", "sums")
)
@one_by_one
def _one(o: OneArguments) -> None:
    _write_one(o)


def _cuda_one(o: OneArguments) -> None:
    if by_hand.fits(o.x, o.rows, o.columns, o.through.dy) and by_hand.is_here(o.x.device):
        tiles = by_hand.sums_of_tiles(o.x) if o.sums.numel() else None
        results = by_hand.Results(o.rows, None, o.columns, None)
        others = by_hand.Others(o.multiplier, o.largest, tiles, o.through)
        by_hand.launch(by_hand.call_of_one(o.x, results, others), o.x)
        if tiles is not None:
            torch.sum(tiles, 0, out=o.sums)
    elif o.x.numel() and has_kernel(o.x) and (o.rows.numel() or o.columns.numel()):
        x = through_ref(o.x, o.through)
        launch_one(x, o.multiplier, o.rows, o.columns, o.largest)
        _write_sums(o.sums, x)
    else:
        _write_one(o)


_one.register_kernel("cuda")(one_by_one(_cuda_one))


class BlockArguments(NamedTuple):
    """What the op of `block_multipliers` takes."""

    x: Tensor  # (M, K)
    tile: bool
    power_of_two: bool
    epsilon: float
    rows: Tensor  # (M, K), or of no values
    row_scales: Tensor
    columns: Tensor  # (K, M), or of no values
    column_scales: Tensor
    sums: Tensor  # (K,), of columns; or of no values
    through: SmoothActivation


def _write_blocks(o: BlockArguments) -> None:
    x = through_ref(o.x, o.through)
    _write_sums(o.sums, x)
    sides = ((x, o.rows, o.row_scales), (x.t().contiguous(), o.columns, o.column_scales))
    for matrix, codes, scales in sides:
        if codes.numel():
            results = block_multipliers_ref(
                matrix, codes.dtype, tile=o.tile, power_of_two=o.power_of_two, epsilon=o.epsilon
            )
            codes.copy_(results[0])
            scales.copy_(results[1])


@torch.library.custom_op(
    "fewbits::float8_block_multipliers",
    mutates_args=("rows", "row_scales", "columns", "column_scales", "sums"),
)
@one_by_one
def _blocks(o: BlockArguments) -> None:
    _write_blocks(o)


def _cuda_blocks(o: BlockArguments) -> None:
    if by_hand.fits(o.x, o.rows, o.columns, o.through.dy) and by_hand.is_here(o.x.device):
        results = by_hand.Results(o.rows, o.row_scales, o.columns, o.column_scales)
        tiles = by_hand.sums_of_tiles(o.x) if o.sums.numel() else None
        others = by_hand.Others(None, o.sums[:0], tiles, o.through)
        words = {"tile": o.tile, "power_of_two": o.power_of_two}
        by_hand.launch(by_hand.call_of_blocks(o.x, results, others, epsilon=o.epsilon, **words), o.x)
        if tiles is not None:
            torch.sum(tiles, 0, out=o.sums)
    elif o.x.numel() and has_kernel(o.x):
        x = through_ref(o.x, o.through)
        launch_blocks(x, *o[1:-2])
        _write_sums(o.sums, x)
    else:
        _write_blocks(o)


_blocks.register_kernel("cuda")(one_by_one(_cuda_blocks))


class OnTheWay(NamedTuple):
    """What a quantisation of x (M, K) does beside its codes.

    Attributes:
        sums: (K,) float32, filled with the sums of x's columns; None sums nothing.
        through: an activation that takes x's place first, or its gradient; None: x as it is.
    """

    sums: Tensor | None = None
    through: SmoothActivation | None = None


_NOTHING = OnTheWay()


# 3. The public functions. They have no gradient: they are what autograd nodes of whole layers are made of.


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude of x (any shape) as float32 (1,): 0 for an empty tensor, NaN if one is in it."""
    if x.device.type == "cpu":
        return amax_ref(x.detach())
    largest = torch.zeros(1, dtype=torch.float32, device=x.device)
    record_amax(x, largest)
    return largest


def record_amax(x: Tensor, largest: Tensor, through: SmoothActivation | None = None) -> None:
    """Raise ``largest``, one float32 that is not negative, to the largest magnitude of x (any shape).

    With ``through`` x is (M, K), and the magnitude is that of what takes its place.
    """
    x = x.detach()
    if through is not None:
        beside = OnTheWay(through=through)
        one = torch.ones_like(largest)
        one_multiplier(x, one, torch.float8_e4m3fn, rows=False, columns=False, largest=largest, beside=beside)
        return
    if x.device.type == "cpu":
        _raise_to(largest, x)
    else:
        (_cuda_amax if passes_dispatcher(x) else _amax)(x, largest)


def multiplier_and_scale(
    amax: Tensor, dtype: torch.dtype, *, power_of_two: bool, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`multiplier_of_amax` of one tensor's amax, and the scale: on a GPU one launch, where torch has ten.

    Args:
        amax: (1,) float32.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        power_of_two: see `multiplier_of_amax`.
        epsilon: see there.

    Returns:
        (1,) and (1,), float32.
    """
    multiplier, scale = torch.empty_like(amax), torch.empty_like(amax)
    if amax.device.type == "cpu":
        _write_multiplier(amax, dtype, power_of_two, epsilon, multiplier, scale)
        return multiplier, scale
    launch = _cuda_one_scale if passes_dispatcher(amax) else _one_scale
    launch(amax, dtype, power_of_two, epsilon, multiplier, scale)
    return multiplier, scale


def one_multiplier(
    x: Tensor,
    multiplier: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    largest: Tensor | None = None,
    beside: OnTheWay = _NOTHING,
) -> tuple[Tensor | None, Tensor | None]:
    """Codes of x and of its transpose under one multiplier.

    Args:
        x: (M, K) floating point; rows contiguous but perhaps apart.
        multiplier: (1,) float32.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rows: whether codes (M, K) are wanted.
        columns: whether codes (K, M) are.
        largest: one float32, raised to the largest magnitude of x on the way; None records nothing.
        beside: what else is done on the way.

    Returns:
        The two, or None for what is not wanted; on a GPU both are contiguous.
    """
    x = _as_rows(x, dtype)
    if x.device.type == "cpu":  # whose products take a transpose as it is
        x = x if beside.through is None else through_ref(x, beside.through)
        if largest is not None:
            record_amax(x, largest)
        if beside.sums is not None:
            _write_sums(beside.sums, x)
        codes = one_multiplier_ref(x, multiplier, dtype)
        return codes if rows else None, codes.t() if columns else None
    M, K = x.shape
    by_row, by_column = _codes(x, (M, K), dtype, rows), _codes(x, (K, M), dtype, columns)
    record, of_columns = (t if t is not None else multiplier.new_empty(0) for t in (largest, beside.sums))
    through = SmoothActivation(0.0, 0.0, x[:0]) if beside.through is None else beside.through
    arguments = OneArguments(x, multiplier, by_row, by_column, record, of_columns, through)
    run(_one, _cuda_one, x, arguments)
    return by_row if rows else None, by_column if columns else None


def block_multipliers(
    x: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    tile: bool,
    power_of_two: bool,
    epsilon: float = 0.0,
    beside: OnTheWay = _NOTHING,
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """Codes and scales of x, and of its transpose, by blocks of 128.

    Args:
        x: (M, K) floating point; rows contiguous but perhaps apart.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rows: whether those of x are wanted.
        columns: whether those of its transpose are.
        tile: blocks are of 128 x 128.
        power_of_two: multipliers are rounded down to one.
        epsilon: amaxes are at least this.
        beside: what else is done on the way.

    Returns:
        Codes (M, K), contiguous, and scales (M, ceil(K / 128)), each column contiguous, or of tiles
        (ceil(M / 128), ceil(K / 128)), contiguous, as torch's own products take them; then the same of the
        transpose. None for what is not wanted.
    """
    x = _as_rows(x, dtype)
    M, K = x.shape
    sides = []
    for is_asked_for, outer, inner in ((rows, M, K), (columns, K, M)):
        codes = _codes(x, (outer, inner), dtype, is_asked_for)
        tall, wide = scale_shape((outer, inner), (128, 128) if tile else (1, 128))
        shape = ((tall, wide) if tile else (wide, tall)) if is_asked_for else (0, 0)
        scales = torch.empty(shape, dtype=torch.float32, device=x.device)
        sides.append((codes, scales if tile else scales.t()))
    of_columns = torch.empty(0, dtype=torch.float32, device=x.device) if beside.sums is None else beside.sums
    through = SmoothActivation(0.0, 0.0, x[:0]) if beside.through is None else beside.through
    arguments = BlockArguments(x, tile, power_of_two, epsilon, *sides[0], *sides[1], of_columns, through)
    if x.device.type == "cpu":
        _write_blocks(arguments)
    else:
        run(_blocks, _cuda_blocks, x, arguments)
    return sides[0] if rows else None, sides[1] if columns else None


def _codes(x: Tensor, shape: tuple[int, int], dtype: torch.dtype, is_asked_for: bool) -> Tensor:
    return torch.empty(shape if is_asked_for else (0, 0), dtype=dtype, device=x.device)


def _as_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dim() != 2 or not x.is_floating_point() or dtype not in LARGEST:
        raise BadInput(
            "float8_e4m3fn and float8_e5m2 operands are made of floating-point matrices (M, K), not "
            f"{dtype} of {x.dtype} {tuple(x.shape)}: give a view of two axes."
        )
    x = x.detach()
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
