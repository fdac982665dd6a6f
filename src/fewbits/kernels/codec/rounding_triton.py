"""Rounding in registers, in Triton: blocks of values to the codes and scales of NF4, FP4, INT8 and INT4.

No kernel stands here: those of quantize_triton.py and of fake_quantize_triton.py call these. Largest
magnitudes are found on the bits of the float32 numbers, as integers: without their sign these sort
as the numbers do, with infinity and NaN above all others, so that one maximum also says whether a block is
finite. Rounding to nearest even is ``(x + 1.5 * 2**23) - 1.5 * 2**23``, exact below 2**22, which also makes
a zero of either sign positive, as a code is.

Divisions are IEEE's (`tl.div_rn`), and no multiply-add is fused: results equal the formats' definitions.
"""

from __future__ import annotations

from fewbits.kernels.launch.jit import jit, tl


@jit
def _sixteenth(x, midpoints_ptr):
    """How many of 15 ascending thresholds lie below x, 15 for NaN: int32, by a tree of 4 comparisons."""
    m0, m1, m2 = tl.load(midpoints_ptr), tl.load(midpoints_ptr + 1), tl.load(midpoints_ptr + 2)
    m3, m4, m5 = tl.load(midpoints_ptr + 3), tl.load(midpoints_ptr + 4), tl.load(midpoints_ptr + 5)
    m6, m7, m8 = tl.load(midpoints_ptr + 6), tl.load(midpoints_ptr + 7), tl.load(midpoints_ptr + 8)
    m9, m10, m11 = tl.load(midpoints_ptr + 9), tl.load(midpoints_ptr + 10), tl.load(midpoints_ptr + 11)
    m12, m13, m14 = tl.load(midpoints_ptr + 12), tl.load(midpoints_ptr + 13), tl.load(midpoints_ptr + 14)
    b3 = m7 >= x
    b2 = tl.where(b3, m3, m11) >= x
    b1 = tl.where(b3, tl.where(b2, m1, m5), tl.where(b2, m9, m13)) >= x
    low = tl.where(b2, tl.where(b1, m0, m2), tl.where(b1, m4, m6))
    high = tl.where(b2, tl.where(b1, m8, m10), tl.where(b1, m12, m14))
    b0 = tl.where(b3, low, high) >= x
    return tl.where(b3, 0, 8) + tl.where(b2, 0, 4) + tl.where(b1, 0, 2) + tl.where(b0, 0, 1)


@jit
def _sixteenth_by_cell(x, midpoints_ptr):
    """The same for x in [-1, 1] if each of 33 cells around the multiples of 1/16 has one threshold at most.

    Beside the thresholds lie the 64 cells' own thresholds (infinity for none), and how many lie below each.
    """
    # x * 16 is exact, and the sum's last bits are the multiple: the cell
    cell = (x * 16.0 + 12582928.0).to(tl.int32, bitcast=True) & 63
    flat = tl.reshape(cell, (x.shape[0] * x.shape[1],))
    thresholds = tl.load(midpoints_ptr + 16 + tl.arange(0, 64))
    below = tl.load(midpoints_ptr + 80 + tl.arange(0, 64)).to(tl.int32)
    threshold = tl.reshape(tl.gather(thresholds, flat, 0), x.shape)
    code = tl.reshape(tl.gather(below, flat, 0), x.shape)
    return code + tl.where(threshold >= x, 0, 1)


@jit
def codebook_codes(x, midpoints_ptr, ORDER: tl.constexpr, DIVIDE: tl.constexpr):
    """Codes (int32) and scales of blocks x (blocks, values); DIVIDE: as a tensor's short last block."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    absmax = tl.where(bits >= 0x7F800000, float("nan"), bits.to(tl.float32, bitcast=True))
    smallest = tl.full((), 1e-38, tl.float32)  # a plain 1e-38, below normal numbers, would be a float64
    guarded = tl.where(absmax < smallest, smallest, absmax)
    scaled = x * tl.div_rn(1.0, guarded)[:, None]
    if DIVIDE:
        scaled = tl.div_rn(x, tl.broadcast_to(guarded[:, None], x.shape))
        absmax = guarded
    # beyond -1 and 1 all thresholds are on one side: nothing need be cut
    if ORDER == 0xFEDCBA9876543210:
        code = _sixteenth_by_cell(scaled, midpoints_ptr)
        code = tl.where((bits >= 0x7F800000)[:, None], 15, code)
    else:
        code = _sixteenth(scaled, midpoints_ptr)
    if (ORDER != 0xFEDCBA9876543210) & (ORDER != 0):
        high: tl.constexpr = ORDER >> 32
        low: tl.constexpr = ORDER & 0xFFFFFFFF
        nibbles = tl.where(code >= 8, tl.full(code.shape, high, tl.int64), tl.full(code.shape, low, tl.int64))
        code = ((nibbles >> ((code & 7) * 4).to(tl.int64)) & 15).to(tl.int32)
    return code, absmax


@jit
def codebook_values(code, values_ptr):
    """float32 values of 4-bit codes (blocks, values); dequantize_triton.py explains the gather."""
    entries = tl.load(values_ptr + tl.arange(0, 16))
    flat = tl.reshape(code, (code.shape[0] * code.shape[1],))
    return tl.reshape(tl.gather(entries, flat, 0), code.shape)


@jit
def high_bits(x, ZERO_POINT: tl.constexpr):
    """The bits of magnitudes: of all numbers, or with a zero point of those that are not negative."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.maximum(bits, 0) if ZERO_POINT else bits & 0x7FFFFFFF


@jit
def low_bits(x):
    """The bits of the magnitudes of negative numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits & 0x7FFFFFFF, 0)


@jit
def integer_scale(high, low, BITS: tl.constexpr, ZERO_POINT: tl.constexpr):
    """Scale and zero point (float32) from the bits of the largest magnitudes above and below zero."""
    largest: tl.constexpr = 2 ** (BITS - 1) - 1
    bad = tl.maximum(high, low) >= 0x7F800000
    top = high.to(tl.float32, bitcast=True)
    bottom = low.to(tl.float32, bitcast=True)
    scale = tl.div_rn(top + bottom, 2.0 * largest + 1.0) if ZERO_POINT else tl.div_rn(top, largest * 1.0)
    scale = tl.where(scale < 2.0**-126, 2.0**-126, scale)
    scale = tl.where(bad | (scale == float("inf")), float("nan"), scale)
    zero_point = scale * 0.0
    if ZERO_POINT:
        steps = (tl.div_rn(bottom, scale) + 12582912.0) - 12582912.0
        steps = tl.where(steps == steps, tl.minimum(steps, 2.0 * largest + 1.0), 0.0)
        zero_point = steps - (largest + 1.0)
    return scale, zero_point


@jit
def integer_codes(x, inverse, zero_point, BITS: tl.constexpr, ZERO_POINT: tl.constexpr):
    """Codes of x as whole float32 numbers."""
    largest: tl.constexpr = 2 ** (BITS - 1) - 1
    code = (x * inverse + 12582912.0) - 12582912.0
    lowest = -largest * 1.0
    if ZERO_POINT:
        code += zero_point
        lowest -= 1.0
    code = tl.where(code == code, code, 0.0)
    return tl.minimum(tl.maximum(code, lowest), largest * 1.0)


@jit
def integer_block_codes(x, BITS: tl.constexpr, ZERO_POINT: tl.constexpr):
    """Codes (whole float32), scales and zero points of blocks x (blocks, values)."""
    high = tl.max(high_bits(x, ZERO_POINT), 1)
    low = high
    if ZERO_POINT:
        low = tl.max(low_bits(x), 1)
    scale, zero_point = integer_scale(high, low, BITS, ZERO_POINT)
    code = integer_codes(x, tl.div_rn(1.0, scale)[:, None], zero_point[:, None], BITS, ZERO_POINT)
    return code, scale, zero_point


@jit
def nibbles_to_bytes(code):
    """(blocks, values) 4-bit codes to (blocks, values / 2) bytes, the first in the low nibble."""
    pairs = tl.reshape(code & 15, (code.shape[0], code.shape[1] // 2, 2))
    low, high = tl.split(pairs)
    return low | (high << 4)
