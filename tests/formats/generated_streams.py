"""Stochastic computing the slow way: every stream is generated bit by bit. Written apart from the library."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import numpy as np

f32 = np.float32


def _gray_sobol(p: int, b_side: bool) -> list[int]:
    """x[t] = XOR of the direction numbers at the ones of t's Gray code."""
    seeds = [1] * p
    if b_side and p == 8:
        seeds = [1, 1, 1, 1, 9, 1, 41, 255]
    elif b_side:
        seeds[4:5] = [9] * (p > 4)
        seeds[6:7] = [41] * (p > 6)
    out = []
    for t in range(2**p):
        gray, x = t ^ (t >> 1), 0
        for i in range(p):
            if gray >> i & 1:
                x ^= seeds[i] * 2 ** (p - 1 - i)
        out.append(x)
    return out


def _mask(d: int, o: dict[str, Any]) -> int:
    p = o["sc_prec"]
    if o["n_masks"] is not None:
        d %= min(o["n_masks"], 2**p)
    if o["scramble"] == "random":  # the plain Mersenne Twister
        twister = np.random.RandomState(0x5A5A5A5A)
        return int(twister.randint(0, 2**32, d + 1, dtype=np.uint32)[d]) % 2**p
    d %= 2**p
    if o["scramble"] == "off":
        return 0
    if o["scramble"] == "counter":
        return d
    return sum(((d >> i) & 1) << (p - 1 - i) for i in range(p))


def _grid(o: dict[str, Any]) -> tuple[int, int, int]:
    """Q, L, R."""
    bipolar, p = o["mode"] == "bipolar", o["sc_prec"]
    default = 2 ** (p - 1) if bipolar and o["halve_bipolar_stoc_len"] else 2**p
    L = default if o["stoc_len"] is None else o["stoc_len"]
    R = default if o["rng_levels"] is None else o["rng_levels"]
    return (2 ** (p - 1) - 1 if bipolar else 2**p - 1), L, R


def _numbers(x: list[int], d: int, o: dict[str, Any]) -> list[int]:
    _, L, R = _grid(o)
    size, mask = 2 ** o["sc_prec"], _mask(d, o)
    if size == R:
        return x[:L] if size == L else [v ^ mask for v in x[:L]]
    if o["scramble_rescale"]:
        x = [v ^ mask for v in x]
    return [int(Fraction(v * R, size)) for v in x[:L]]


def _count(qa: int, qb: int, ra: list[int], rb: list[int], Q: int, R: int) -> int:
    """Clock by clock: b's comparator moves on only when a's bit was 1."""
    limit_a, limit_b = (round(Fraction(abs(q) * R, Q)) for q in (qa, qb))
    count = position = 0
    for number in ra:
        if number < limit_a:
            count += rb[position] < limit_b
            position += 1
    return count if (qa < 0) == (qb < 0) else -count


def _rne(x: Any, low: int, high: int) -> int:
    return int(min(max(np.rint(x), low), high))


def _quantize(x: np.ndarray, o: dict[str, Any], group: int, chunked: bool) -> tuple[list, list, list]:
    """Codes, scale and zero point of each row of x (rows, D) float32; x[i] belongs to its own groups."""
    Q = _grid(o)[0]
    codes, scales, zeros = [], [], []
    for row in range(len(x)):
        first = row // group * group
        values = x[first : first + group]
        high, low = values.max(), values.min()
        if o["mode"] == "bipolar":
            s = f32(max(high, -low, f32(1e-5))) / f32(Q)
            inverse = f32(1) / s
            by_inverse = chunked or o["granularity"] == "per_head"
            q = [_rne(f32(v * inverse) if by_inverse else f32(v / s), -Q, Q) for v in x[row]]
            z = f32(0)
        else:
            s = max(f32(high - low), f32(1e-5)) / f32(Q)
            z = f32(_rne(f32(-low / s), 0, Q))
            q = [_rne(f32(f32(v / s) + z), 0, Q) for v in x[row]]
        codes.append(q)
        scales.append(s)
        zeros.append(z)
    return codes, scales, zeros


def _quantize_tensor(x: np.ndarray, whole: np.ndarray, o: dict[str, Any]) -> tuple[list, list, list]:
    Q = _grid(o)[0]
    high, low = float(whole.max()), float(whole.min())
    if o["mode"] == "bipolar":
        s, z = max(abs(high), abs(low), 1e-5) / Q, 0
    else:
        s = max(high - low, 1e-5) / Q
        z = min(max(round(-low / s), 0), Q)
    inverse = f32(1 / s)
    lowest = -Q if o["mode"] == "bipolar" else 0
    codes = [[_rne(f32(f32(v * inverse) + f32(z)), lowest, Q) for v in row] for row in x]
    return codes, [s] * len(x), [z] * len(x)


def _part(a: np.ndarray, b: np.ndarray, whole: Any, o: dict[str, Any], chunked: bool) -> np.ndarray:
    Q, L, R = _grid(o)
    tensorwise, unipolar = o["granularity"] == "per_tensor", o["mode"] == "unipolar"
    if tensorwise:
        (qa, sa, za), (qb, sb, zb) = (_quantize_tensor(x, w, o) for x, w in zip((a, b), whole, strict=True))
    else:
        heads = o["granularity"] == "per_head"
        groups = (len(a), len(b)) if heads else (1, 1) if chunked else (o["group_a"], o["group_b"])
        (qa, sa, za), (qb, sb, zb) = (
            _quantize(x, o, g, chunked) for x, g in zip((a, b), groups, strict=True)
        )
    D, p = a.shape[1], o["sc_prec"]
    xa, xb = _gray_sobol(p, False), _gray_sobol(p, True)
    ra, rb = ([_numbers(x, d, o) for d in range(D)] for x in (xa, xb))
    c = f32(Q * Q / L)
    y = np.zeros((len(a), len(b)), f32)
    for n in range(len(a)):
        for m in range(len(b)):
            acc = f32(sum(_count(qa[n][d], qb[m][d], ra[d], rb[d], Q, R) for d in range(D)))
            scale = f32(sa[n] * sb[m])
            if o["granularity"] == "per_head":
                y[n, m] = acc * f32(c * scale)
                continue
            raw = f32(acc * c)
            if unipolar:
                first = f32(f32(-f32(zb[m]) * f32(sum(qa[n]))) - f32(f32(za[n]) * f32(sum(qb[m]))))
                last = f32(float(D) * za[n] * zb[m]) if tensorwise else f32(f32(f32(D) * za[n]) * zb[m])
                raw = f32(raw + f32(first + last))
            y[n, m] = raw * scale
    return y


def generated_matmul(a: np.ndarray, b: np.ndarray, o: dict[str, Any]) -> np.ndarray:
    """a b^T for float32 operands of two or three dimensions and every option by name."""
    if a.ndim == 3:
        return np.stack([_part(x, z, (a, b), o, False) for x, z in zip(a, b, strict=True)])
    D, size = a.shape[1], o["chunk_d"]
    if not 0 < size < D:
        return _part(a, b, (a, b), o, False)
    y = np.zeros((len(a), len(b)), f32)
    for start in range(0, D, size):
        part = slice(start, start + size)
        y = y + _part(a[:, part], b[:, part], None, o, True)
    return y


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Operands and options, small enough for generated streams, of every kind that is allowed."""
    rng, values = random.Random(seed), np.random.default_rng(seed)
    mode = rng.choice(["bipolar", "bipolar", "unipolar"])
    granularity = rng.choice(["per_row", "per_row", "per_tensor", *(["per_head"] * (mode == "bipolar"))])
    batched = granularity == "per_head" or rng.random() < 0.25
    p = rng.choice([2, 3, 4, 5, 6, 7, 8, 8, 9]) if mode == "bipolar" else rng.choice([1, 2, 3, 4, 5, 6, 7, 8])
    N, M, D = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 10)
    grid = [None, None, 2**p, 2 ** (p - 1), rng.randint(1, 2 ** (p + 1))]
    groups = [1, 1, 2, 3, 9] if mode == "unipolar" or not batched else [1, 9]
    options = {
        "granularity": granularity,
        "mode": mode,
        "sc_prec": p,
        "stoc_len": rng.choice([None, None, 2**p, rng.randint(1, 2**p), rng.randint(1, 2**p)]),
        "rng_levels": rng.choice(grid),
        "halve_bipolar_stoc_len": rng.random() < 0.5,
        "chunk_d": 0,
        "group_a": rng.choice(groups),
        "group_b": rng.choice(groups),
        "scramble": rng.choice(["bitrev", "bitrev", "counter", "random", "off"]),
        "scramble_rescale": rng.random() < 0.8,
        "n_masks": rng.choice([None, None, 1, 3, 2 ** (p - 1), 2 ** (p + 2)]),
    }
    if granularity == "per_row" and mode == "bipolar" and not batched and rng.random() < 0.5:
        options["chunk_d"] = rng.randint(1, D + 2)
    lead = (rng.randint(1, 3),) if batched else ()
    kind = rng.choice(["normal", "normal", "positive", "steps", "tiny", "zeros"])
    a, b = (values.standard_normal((*lead, rows, D)).astype(f32) for rows in (N, M))
    if kind == "positive":
        a, b = np.abs(a) + f32(1), np.abs(b)
    elif kind == "steps":  # ties in x / scale
        a, b = np.rint(a * 4) / f32(4), np.rint(b * 8) / f32(8)
    elif kind == "tiny":
        a, b = a * f32(1e-6), b * f32(1e4)
    elif kind == "zeros":
        a[..., 0, :] = 0
        b[..., -1] = 0
    return a.astype(f32), b.astype(f32), options
