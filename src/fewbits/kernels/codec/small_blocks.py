"""A matrix by small blocks with scales of 8 bits: MXFP8 and NVFP4, to codes and back to bfloat16.

x (M, K), blocks of 32 (MXFP8) or 16 (NVFP4) values of a row, or tiles of so many rows and columns:

    E4M3, E5M2   scale e, an exponent: the smallest power of two not below amax / largest;
                 code = float8(cut(x * 2**(127 - e)));   value = code * 2**(e - 127)
    E2M1         g = 448 * 6 / A with A the tensor's amax; scale s = e4m3(amax * (g * (1 / 6)));
                 code = e2m1(x / (s / g)), to nearest or stochastically;   value * g = code * s

A value without A has at most eight significant bits, so that bfloat16 holds it: a GPU without units for these
formats multiplies such values exactly, with sums in float32. Only where an exponent is below 10, a block of
magnitudes under 2**-117, bfloat16 rounds, by less than 2**-133. There is no gradient.

Floor: `small_blocks` reads 2 bytes a value and writes 1 (MXFP8) or 0.5; `small_values` the other way round.
15872 x 4096 in MXFP8: 195 MB each, 46 us at 4.28 TB/s.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.formats.bits import pack_bits, unpack_bits
from fewbits.formats.blocks import from_blocks, scale_shape, to_blocks
from fewbits.formats.minifloat import E2M1, power_of_e8m0
from fewbits.formats.rounding import random_uniform
from fewbits.formats.tables import table
from fewbits.kernels.codec.float8_operands import LARGEST, to_float8
from fewbits.kernels.codec.quantize_float8_triton import has_kernel
from fewbits.kernels.codec.small_blocks_triton import launch_blocks, launch_values
from fewbits.kernels.launch.ops import one_by_one, run

_SIXTH_OF = E2M1.largest
_E4M3_LARGEST = 448.0
_FLOAT32_MAX = torch.finfo(torch.float32).max
_MOST_VALUES = 2**33  # of a matrix whose random numbers the kernel counts in 32 bits, by fours


# 1. The definition.


def exponents_of_amax(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """E8M0: the biased exponent of the smallest power of two that amax / largest does not exceed.

    Args:
        amax: any shape, float32.
        dtype: of the codes.

    Returns:
        uint8 of that shape: 0 for zero, 254 for infinity, 255 for NaN.
    """
    quotient = amax * amax.new_full((), 1.0 / LARGEST[dtype])
    bits = quotient.contiguous().view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    # below 2**-127, half the smallest normal number, exponent 0 is already large enough
    rounds_up = (mantissa > 0) & (exponent < 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = exponent + rounds_up.to(torch.int32)
    exponent = torch.where(quotient.isinf(), torch.full_like(exponent, 254), exponent)
    exponent = torch.where(quotient.isnan(), torch.full_like(exponent, 255), exponent)
    return exponent.to(torch.uint8)


def by_exponents_ref(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes (R, r, C, c) and exponents (R, 1, C, 1) of float32 blocks (R, r, C, c); always to nearest."""
    exponents = exponents_of_amax(blocks.abs().amax(dim=(1, 3), keepdim=True), dtype)
    return to_float8(blocks * power_of_e8m0(exponents, inverse=True), dtype), exponents


def e2m1_codes(x: Tensor, uniform: Tensor | None = None) -> Tensor:
    """Four-bit codes of float32 values, the sign in bit 3; rounded as magnitudes are.

    Args:
        x: any shape, float32; magnitudes above 6, and what is not finite, count as 6.
        uniform: None rounds to nearest, ties to the even code; else numbers in [0, 1) of x's shape: up where
            the number is below the fraction of the step.

    Returns:
        uint8 of that shape.
    """
    size = x.abs().clamp(max=E2M1.largest).nan_to_num(E2M1.largest)
    return E2M1.codes(size, uniform) | (x.signbit().to(torch.uint8) << 3)


def e2m1_values(codes: Tensor) -> Tensor:
    """The float32 values of four-bit codes, any shape."""
    return table(E2M1.values, codes.device)[codes.long()]


def multiplier_of_tensor(amax: Tensor, bound: float) -> Tensor:
    """g of an amax (any shape): ``bound * 6 / amax``, finite and not 0; ``bound`` is the largest scale."""
    encode = (amax.new_full((), bound * _SIXTH_OF) / amax).clamp(max=_FLOAT32_MAX)
    return torch.where(encode == 0, torch.ones_like(encode), encode)


def e4m3_scales(x: Tensor) -> Tensor:
    """x (any shape, float32, not negative) as E4M3, cut to 448."""
    return x.clamp(max=_E4M3_LARGEST).to(torch.float8_e4m3fn)


def inverse_of_scale(scales: Tensor, encode: Tensor) -> Tensor:
    """What values are multiplied by: 1 / (scale / encode), finite; both (R, 1, C, 1) or ()."""
    return (1.0 / (scales.float() * (1.0 / encode))).clamp(max=_FLOAT32_MAX)


def by_e4m3_ref(
    blocks: Tensor, block_amax: Tensor, encode: Tensor, uniform: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes (R, r, C, c) and scales (R, 1, C, 1) of float32 blocks, their amaxes and g.

    Args:
        blocks: (R, r, C, c).
        block_amax: (R, 1, C, 1).
        encode: broadcasts to it.
        uniform: see `e2m1_codes`.
    """
    sixth = encode * (1.0 / encode.new_full((), _SIXTH_OF))
    scales = e4m3_scales(block_amax * sixth)
    return e2m1_codes(blocks * inverse_of_scale(scales, encode), uniform), scales


class SmallBlocks(NamedTuple):
    """What the op of `small_blocks` takes."""

    x: Tensor  # (M, K)
    codes: Tensor  # written: (M, K) of a float8 type, or (M, ceil(K / 2)) uint8, two a byte
    scales: Tensor  # written: uint8 or E4M3, one for each block
    amax: Tensor  # (1,) float32; of no values for float8 codes
    block: list[int]  # rows and columns of a block
    bound: float  # the largest scale, for E2M1
    seed: int  # -1 rounds to nearest


def small_blocks_ref(o: SmallBlocks) -> None:
    """Codes and scales of ``o.x`` into ``o.codes`` and ``o.scales``."""
    (M, K), block = o.x.shape, (o.block[0], o.block[1])
    blocks = to_blocks(o.x.float(), block)
    if o.codes.dtype == torch.uint8:
        uniform = None if o.seed < 0 else to_blocks(random_uniform((M, K), o.seed, o.x.device), block)
        encode = multiplier_of_tensor(o.amax.view(1, 1, 1, 1), o.bound)
        amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
        codes, scales = by_e4m3_ref(blocks, amax, encode, uniform)
        o.codes.copy_(pack_bits(from_blocks(codes, (M, K), block), 4))
    else:
        codes, scales = by_exponents_ref(blocks, o.codes.dtype)
        o.codes.copy_(from_blocks(codes, (M, K), block))
    o.scales.copy_(scales.view(o.scales.shape))


class SmallValues(NamedTuple):
    """What the op of `small_values` takes."""

    codes: Tensor  # as in `SmallBlocks`
    scales: Tensor
    block: list[int]
    values: Tensor  # written: (M, K) bfloat16


def small_values_ref(o: SmallValues) -> None:
    """Values of codes and scales, without the tensor's amax, into ``o.values``."""
    (M, K), block = o.values.shape, (o.block[0], o.block[1])
    is_e2m1 = o.codes.dtype == torch.uint8
    codes = to_blocks(unpack_bits(o.codes, 4, K) if is_e2m1 else o.codes.float(), block)
    scales = o.scales.view(codes.shape[0], 1, codes.shape[2], 1)
    values = e2m1_values(codes) * scales.float() if is_e2m1 else codes * power_of_e8m0(scales)
    o.values.copy_(from_blocks(values, (M, K), block))


# 2. The kernels are in small_blocks_triton.py. 3. The ops: on a CPU the definition, on CUDA the kernels.


@torch.library.custom_op("fewbits::small_blocks", mutates_args=("codes", "scales"))
@one_by_one
def _small_blocks(o: SmallBlocks) -> None:
    small_blocks_ref(o)


def _cuda_small_blocks(o: SmallBlocks) -> None:
    K = o.x.shape[1]
    if has_kernel(o.x) and K % 16 == 0 and o.x.numel() < _MOST_VALUES:
        launch_blocks(*o)
    else:
        small_blocks_ref(o)


_small_blocks.register_kernel("cuda")(one_by_one(_cuda_small_blocks))


@torch.library.custom_op("fewbits::small_values", mutates_args=("values",))
@one_by_one
def _small_values(o: SmallValues) -> None:
    small_values_ref(o)


def _cuda_small_values(o: SmallValues) -> None:
    if has_kernel(o.values) and o.values.shape[1] % 16 == 0:
        launch_values(*o)
    else:
        small_values_ref(o)


_small_values.register_kernel("cuda")(one_by_one(_cuda_small_values))


# 4. The public functions. They have no gradient: they are what autograd nodes of whole layers are made of.


def small_blocks(
    x: Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    *,
    amax: Tensor | None = None,
    bound: float = _E4M3_LARGEST,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of x by small blocks; see the top of this file.

    Args:
        x: (M, K) floating point, of at least one value.
        dtype: float8_e4m3fn or float8_e5m2 under exponents; uint8: E2M1 under E4M3 scales.
        block: rows and columns that share a scale.
        amax: (1,) float32, of the tensor: for E2M1.
        bound: the largest scale, for E2M1.
        seed: of stochastic rounding, for E2M1; None rounds to nearest.

    Returns:
        Codes (M, K), or (M, ceil(K / 2)) of two a byte, the first in the low half; and scales
        (ceil(M / rows), ceil(K / columns)) uint8 or E4M3.
    """
    x = x.detach().contiguous()
    (M, K), is_e2m1 = x.shape, dtype == torch.uint8
    codes = torch.empty(M, -(-K // 2) if is_e2m1 else K, dtype=dtype, device=x.device)
    kind = torch.float8_e4m3fn if is_e2m1 else torch.uint8
    scales = torch.empty(scale_shape((M, K), block), dtype=kind, device=x.device)
    amax = x.new_empty(0, dtype=torch.float32) if amax is None else amax
    arguments = SmallBlocks(x, codes, scales, amax, list(block), bound, -1 if seed is None else seed)
    if x.device.type == "cpu":
        small_blocks_ref(arguments)
    else:
        run(_small_blocks, _cuda_small_blocks, x, arguments)
    return codes, scales


def small_values(codes: Tensor, scales: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """What codes and scales of `small_blocks` stand for, without the tensor's amax, in bfloat16.

    Args:
        codes: as `small_blocks` returns them.
        scales: likewise.
        block: rows and columns that share a scale.
        shape: (M, K).

    Returns:
        (M, K) bfloat16, exact but where the top of this file says.
    """
    values = torch.empty(shape, dtype=torch.bfloat16, device=codes.device)
    arguments = SmallValues(codes.contiguous(), scales.contiguous(), list(block), values)
    if codes.device.type == "cpu":
        small_values_ref(arguments)
    elif values.numel():
        run(_small_values, _cuda_small_values, values, arguments)
    return values
