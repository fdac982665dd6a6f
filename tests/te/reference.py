"""The arithmetic of FP8 and FP4 scaling a second time, in numpy, for the tests of fewbits.te.

Nothing here calls fewbits or torch's casts: codes are found among all values of a kind.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

F32 = np.float32
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@cache
def magnitudes(kind: str) -> list[float]:
    """All finite magnitudes of a kind, ascending: their index is the code without its sign."""
    mantissa, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[kind]
    values = []
    for code in range(128):
        exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
        value = (
            math.ldexp(fraction, 1 - bias - mantissa)
            if exponent == 0
            else math.ldexp((1 << mantissa) + fraction, exponent - bias - mantissa)
        )
        if value > LARGEST[kind]:
            break
        values.append(value)
    return values


def codes_of(x: np.ndarray, values: list[float]) -> np.ndarray:
    """Indices of the magnitudes next to |x|, the even one of two as near: the midpoints are exact."""
    middles = (np.array(values[1:]) + np.array(values[:-1])) / 2
    size = np.abs(np.asarray(x, np.float64))
    index = np.searchsorted(middles, size, side="left")
    tie = (index < len(middles)) & (size == middles[np.minimum(index, len(middles) - 1)])
    return np.where(tie & (index % 2 == 1), index + 1, index)


def float8(x: np.ndarray, kind: str) -> np.ndarray:
    """Codes of float32 values, sign in bit 7, cut to the largest."""
    values = magnitudes(kind)
    return (codes_of(x, values) | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def multiplier(
    amax: F32, kind: str, power_of_two: bool, largest_of_type: float = float(np.finfo(F32).max)
) -> F32:
    if amax == 0:
        return F32(1)
    with np.errstate(over="ignore"):
        value = F32(LARGEST[kind]) / F32(amax)
    if np.isinf(value):
        value = F32(largest_of_type)
    if power_of_two:
        value = F32(math.ldexp(1.0, math.frexp(float(value))[1] - 1))
    return value


def per_tensor(x: np.ndarray, kind: str, power_of_two: bool = False) -> tuple[np.ndarray, F32]:
    m = multiplier(F32(np.abs(x).max()), kind, power_of_two)
    return float8((x * m).astype(F32), kind), F32(1) / m


def blocks(x: np.ndarray, rows: int, columns: int):
    """Slices of all blocks of a matrix, with their indices."""
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            yield (i // rows, j // columns), (slice(i, i + rows), slice(j, j + columns))


def by_block(x: np.ndarray, kind: str, rows: int, columns: int, power_of_two: bool):
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((-(-x.shape[0] // rows), -(-x.shape[1] // columns)), F32)
    for index, where in blocks(x, rows, columns):
        codes[where], scales[index] = per_tensor(x[where], kind, power_of_two)
    return codes, scales


def e8m0(amax: float, kind: str) -> int:
    """The biased exponent of the smallest power of two not below amax * (1 / largest), both float32."""
    quotient = float(F32(amax) * F32(1.0 / LARGEST[kind]))
    if quotient == 0:
        return 0
    mantissa, exponent = math.frexp(quotient)
    power = exponent - 1 if mantissa == 0.5 else exponent
    return max(0, min(254, power + 127))


def microscaled(x: np.ndarray, kind: str, rows: int = 1):
    codes = np.zeros(x.shape, np.uint8)
    exponents = np.zeros((-(-x.shape[0] // rows), -(-x.shape[1] // 32)), np.uint8)
    for index, where in blocks(x, rows, 32):
        e = e8m0(np.abs(x[where]).max(), kind)
        exponents[index] = e
        codes[where] = float8((x[where] * F32(math.ldexp(1.0, 127 - e))).astype(F32), kind)
    return codes, exponents


def float4(x: np.ndarray, rows: int = 1):
    """NVFP4: codes (one a value), E4M3 scale codes, amax."""
    amax = F32(np.abs(x).max())
    encode = F32(448.0 * 6.0) / amax
    sixth = encode * (F32(1) / F32(6))
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((-(-x.shape[0] // rows), -(-x.shape[1] // 16)), np.uint8)
    for index, where in blocks(x, rows, 16):
        scale = float8(np.array([F32(np.abs(x[where]).max()) * sixth], F32), "e4m3")[0]
        scales[index] = scale
        value = F32(magnitudes("e4m3")[scale])
        with np.errstate(divide="ignore"):
            inverse = F32(1) / (value * (F32(1) / encode))
        inverse = min(inverse, np.finfo(F32).max)
        scaled = (x[where] * inverse).astype(F32)
        codes[where] = codes_of(scaled, E2M1) | np.where(np.signbit(scaled), 8, 0)
    return codes, scales, amax


def next_scale(amax: F32, scale: F32, kind: str, margin: int) -> F32:
    if not (amax > 0 and np.isfinite(amax)):
        return scale
    with np.errstate(over="ignore"):
        value = (F32(LARGEST[kind]) / amax) / F32(2.0**margin)
    return F32(np.finfo(F32).max) if np.isinf(value) else value
