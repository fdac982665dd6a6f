"""Stochastic computing the slow way: every stream is generated bit by bit. Written apart from the library."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import numpy as np

f32 = np.float32


def _gray_sobol(p: int, b_side: bool, own: tuple[int, ...] | None = None) -> list[int]:
    """x[t] = XOR of the direction numbers at the ones of t's Gray code."""
    seeds = [1] * p if own is None else list(own)
    if own is not None:
        pass
    elif b_side and p == 8:
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


def _register(p: int, b_side: bool, state: int | None) -> list[int]:
    """A Fibonacci register: stage 1 takes the parity of the fed back stages, all others move on by one.

    The stages are those of the maximal registers in Xilinx's XAPP 052; stage p is the lowest bit.
    """
    fed_back = {
        1: [1],
        2: [1, 2],
        3: [2, 3],
        4: [3, 4],
        5: [3, 5],
        6: [5, 6],
        7: [6, 7],
        8: [4, 5, 6, 8],
        9: [5, 9],
    }
    number = 125 % 2**p if state is None else state
    stages = [number >> (p - 1 - i) & 1 for i in range(p)]  # stage 1 first
    out = []
    for _ in range(2**p):
        bits = stages if not b_side else stages[::-1]
        out.append(int("".join(map(str, bits)), 2))
        stages = [sum(stages[s - 1] for s in fed_back[p]) % 2, *stages[:-1]]
    return out


def _philox(counter: int, seed: int) -> list[int]:
    """The four words of Philox-4x32-10 (Salmon et al. 2011) for a counter below 2**32."""
    word, (x0, x1, x2, x3) = 2**32, (counter, 0, 0, 0)
    k0, k1 = seed % word, seed // word % word
    for _ in range(10):
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = p1 // word ^ x1 ^ k0, p1 % word, p0 // word ^ x3 ^ k1, p0 % word
        k0, k1 = (k0 + 0x9E3779B9) % word, (k1 + 0xBB67AE85) % word
    return [x0, x1, x2, x3]


def _drawn(p: int, b_side: bool, seed: int | None) -> list[int]:
    seed = int(b_side) if seed is None else seed
    words = [word for i in range(2**p // 4 + 1) for word in _philox(i, seed)]
    return [word // 2 ** (32 - p) for word in words[: 2**p]]


def _sequence(o: dict[str, Any], b_side: bool) -> list[int]:
    family = {"sobol": _gray_sobol, "lfsr": _register, "random": _drawn}[o.get("sequence", "sobol")]
    return family(o["sc_prec"], b_side, o.get("seed_b" if b_side else "seed_a"))


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


def _grid(o: dict[str, Any], length: int | None = None) -> tuple[int, int, int]:
    """Q, L, R; ``length`` stands in place of the options' own."""
    bipolar, p = o["mode"] == "bipolar", o["sc_prec"]
    default = 2 ** (p - 1) if bipolar and o["halve_bipolar_stoc_len"] else 2**p
    own = o["stoc_len"] if isinstance(o["stoc_len"], int) else None
    own = o.get("planned_len") if own is None else own
    L = length if length is not None else default if own is None else own
    R = default if o["rng_levels"] is None else o["rng_levels"]
    return (2 ** (p - 1) - 1 if bipolar else 2**p - 1), L, R


def _numbers(x: list[int], d: int, o: dict[str, Any], length: int | None = None) -> list[int]:
    _, L, R = _grid(o, length)
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


def _part(
    a: np.ndarray,
    b: np.ndarray,
    whole: Any,
    o: dict[str, Any],
    chunked: bool,
    lengths: list[int] | None = None,
) -> np.ndarray:
    """One chunk; ``lengths`` are those of a's rows."""
    Q, own, R = _grid(o)
    lengths = [own] * len(a) if lengths is None else lengths
    tensorwise, unipolar = o["granularity"] == "per_tensor", o["mode"] == "unipolar"
    if tensorwise:
        (qa, sa, za), (qb, sb, zb) = (_quantize_tensor(x, w, o) for x, w in zip((a, b), whole, strict=True))
    else:
        heads = o["granularity"] == "per_head"
        groups = (len(a), len(b)) if heads else (1, 1) if chunked else (o["group_a"], o["group_b"])
        (qa, sa, za), (qb, sb, zb) = (
            _quantize(x, o, g, chunked) for x, g in zip((a, b), groups, strict=True)
        )
    D = a.shape[1]
    counter = o.get("counter")  # of another arithmetic, see `generated_arithmetic`
    sequences = [] if counter else [_sequence(o, b_side) for b_side in (False, True)]
    streams = {
        length: [[_numbers(x, d, o, length) for d in range(D)] for x in sequences] for length in set(lengths)
    }
    y = np.zeros((len(a), len(b)), f32)
    for n, length in enumerate(lengths):
        if not length:
            continue
        c = f32(Q * Q / length)
        for m in range(len(b)):
            if counter:
                acc = f32(counter(qa[n], qb[m], length))
            else:
                ra, rb = streams[length]
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
    table = None if o["stoc_len"] is None or isinstance(o["stoc_len"], int) else np.array(o["stoc_len"])
    if a.ndim == 3:
        of_entries = [None] * len(a) if table is None else np.broadcast_to(table, a.shape[:2]).tolist()
        parts = zip(a, b, of_entries, strict=True)
        return np.stack([_part(x, z, (a, b), o, False, lengths) for x, z, lengths in parts])
    if table is not None:
        table = table[:, None] if table.ndim == 1 else table
        table = np.broadcast_to(table, (len(a), -(-a.shape[1] // (o["chunk_d"] or a.shape[1]))))
    D, size = a.shape[1], o["chunk_d"]
    if not 0 < size < D:
        return _part(a, b, (a, b), o, False, None if table is None else table[:, 0].tolist())
    y = np.zeros((len(a), len(b)), f32)
    for start in range(0, D, size):
        part = slice(start, start + size)
        lengths = None if table is None else table[:, start // size].tolist()
        y = y + _part(a[:, part], b[:, part], None, o, True, lengths)
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
    options |= _random_sequences(rng, p)
    if rng.random() < 0.4:
        chunks = -(-D // options["chunk_d"]) if options["chunk_d"] else 1
        shapes = (
            [(N,), (1, chunks), (N, 1), (N, chunks)]
            if not batched
            else [(N,), (*lead, N), (1, N), (*lead, 1)]
        )
        low, levels = int(mode == "unipolar"), rng.choice([2, 3, 2**p])
        choices = [rng.randint(low, 2**p) for _ in range(levels)] + [2**p] * (rng.random() < 0.2)
        options["stoc_len"] = values.choice(choices, rng.choice(shapes)).tolist()
    return a.astype(f32), b.astype(f32), options


def _random_sequences(rng: random.Random, p: int) -> dict[str, Any]:
    family = rng.choice(["sobol", "sobol", "lfsr", "random"])
    chosen: dict[str, Any] = {"sequence": family}
    for name in ("seed_a", "seed_b"):
        if rng.random() < 0.5:
            continue
        if family == "sobol":
            chosen[name] = tuple(rng.randrange(1, 2 ** (i + 1), 2) for i in range(p))
        else:
            chosen[name] = rng.randint(1, 2**p - 1) if family == "lfsr" else rng.getrandbits(64)
    return chosen
