"""Every stochastic arithmetic, clock by clock, in plain Python. Written apart from the library.

It stands beside `generated_streams`, which has scmp_kernels' arithmetic and everything around the counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from decimal import Decimal, getcontext
from fractions import Fraction
from functools import lru_cache
from typing import Any

from tests.formats import generated_streams

getcontext().prec = 60
NEW = ("gate", "signs", "or_group", "flip_rate", "planned_len")


def is_new(o: dict[str, Any]) -> bool:
    """Whether an arithmetic is one of those below."""
    return any(name in o for name in NEW) or o.get("sequence") in ("unary", "halton", "weyl")


def count_rows(row_a: list[int], row_b: list[int], o: dict[str, Any], length: int) -> int:
    """What the counters of one output have at the end, added up."""
    per_dimension = [
        list(_clocked(a, b, d, o, length)) for d, (a, b) in enumerate(zip(row_a, row_b, strict=True))
    ]
    if o.get("signs") == "twos_complement":
        return sum(1 if bit else -1 for bits in per_dimension for bit in bits)
    size, total = o.get("or_group", 1), 0
    for start in range(0, len(row_a), size):
        for t in range(length):
            up = down = False
            for d in range(start, start + size):
                if per_dimension[d][t]:
                    if (row_a[d] < 0) == (row_b[d] < 0):
                        up = True
                    else:
                        down = True
            total += int(up) - int(down)
    return total * size if o["scramble"] == "cells" else total


def _clocked(a: int, b: int, d: int, o: dict[str, Any], length: int) -> Iterator[bool]:
    """The product's bit at each clock."""
    signed = o.get("signs") == "twos_complement"
    if not signed and 0 in (a, b):
        yield from [False] * length
        return
    if not signed:
        a, b = abs(a), abs(b)
    read_by_ones = read_by_zeros = 0
    for t in range(length):
        first = _bit("a", a, d, t, o, length)
        if o.get("gate", "enable") == "and":
            second = _bit("b", b, d, t, o, length)
            yield (first == second) if signed else (first and second)
        elif first:
            yield _bit("b", b, d, read_by_ones, o, length)
            read_by_ones += 1
        else:
            yield signed and not _bit("b", b, d, read_by_zeros, o, length)
            read_by_zeros += 1


@lru_cache(maxsize=100000)
def _bit_of(side: str, code: int, d: int, t: int, frozen: tuple[Any, ...], length: int) -> bool:
    o = dict(frozen)
    Q, _, R = generated_streams._grid(o, length)
    number = _number(side, d, t, o, length)
    if o["scramble"] == "cells":
        edge = int(Decimal(o["or_group"]).sqrt())
        place = d % o["or_group"]
        column = place // edge if side == "a" else place % edge
        width = R // edge
        low = column * width
        bit = low <= number < low + round(Fraction(code * width, Q))
    elif o.get("signs") == "twos_complement":
        share = Fraction((code + Q) * R, 2 * Q)
        bit = number < (share + Fraction(1, 2)).__floor__()
    else:
        bit = number < round(Fraction(code * R, Q))
    return bit ^ _is_flipped(side, code + Q if o.get("signs") == "twos_complement" else code, d, t, o)


def _bit(side: str, code: int, d: int, t: int, o: dict[str, Any], length: int) -> bool:
    plain = {k: v for k, v in o.items() if k not in ("stoc_len", "counter")} | {"stoc_len": None}
    return _bit_of(side, code, d, t, tuple(plain.items()), length)


def _is_flipped(side: str, place: int, d: int, t: int, o: dict[str, Any]) -> bool:
    rate = o.get("flip_rate", 0)
    if not rate:
        return False
    p = o["sc_prec"]
    period = 2**p if o["n_masks"] is None else min(o["n_masks"], 2**p)
    seed = o.get("flip_seed", 0) * 8192 + (4096 if side == "b" else 0) + d % period
    position = place * 2**p + t
    word = _words(position // 4, seed)[position % 4]
    return word < round(rate * 2**32)


@lru_cache(maxsize=100000)
def _words(counter: int, seed: int) -> tuple[int, ...]:
    return tuple(generated_streams._philox(counter, seed))


def _number(side: str, d: int, t: int, o: dict[str, Any], length: int) -> int:
    p, size = o["sc_prec"], 2 ** o["sc_prec"]
    _, _, R = generated_streams._grid(o, length)
    planned = o.get("planned_len") or length
    family = o.get("sequence", "sobol")
    if family == "unary" and side == "a":
        return int(Fraction(t * R, planned))
    x = _sequence(side, t, o) if family in ("halton", "weyl") else _known(side, p, family, o)[t]
    if o["scramble"] != "cells" and (o["scramble_rescale"] if size != R else planned < size):
        x ^= generated_streams._mask(d, o)
    return x if size == R else int(Fraction(x * R, size))


def _known(side: str, p: int, family: str, o: dict[str, Any]) -> list[int]:
    seed = o.get(f"seed_{side}")
    if seed is None and side == "b" and o.get("gate") == "and" and family in ("sobol", "unary"):
        # Pascal's triangle modulo 2: by Kummer, a binomial is odd where no carry occurs.
        seed = tuple(sum(2**k for k in range(i + 1) if k & (i - k) == 0) for i in range(p))
    return _known_of(side, p, "sobol" if family == "unary" else family, seed)


@lru_cache(maxsize=1000)
def _known_of(side: str, p: int, family: str, seed: Any) -> list[int]:
    return generated_streams._sequence({"sc_prec": p, "sequence": family, f"seed_{side}": seed}, side == "b")


def _sequence(side: str, t: int, o: dict[str, Any]) -> int:
    p, seed = o["sc_prec"], o.get(f"seed_{side}")
    if o["sequence"] == "weyl":
        irrational = (Decimal(5).sqrt() - 1) / 2 if side == "a" else Decimal(2).sqrt() - 1
        step = int(irrational * 2**p) if seed is None else seed
        if step % 2 == 0:
            step += 1
        return t * step % 2**p
    base, t = (2 if side == "a" else 3), t + (seed or 0)
    inverse, weight = Fraction(0), Fraction(1, base)
    while t:
        inverse += weight * (t % base)
        t //= base
        weight /= base
    return int(inverse * 2**p)


def random_arithmetic(seed: int) -> tuple[Any, Any, dict[str, Any]]:
    """Operands and options as of `random_case`, and an arithmetic that is not scmp_kernels'."""
    rng = random.Random(seed + 2**20)
    while True:
        a, b, o = generated_streams.random_case(rng.randrange(2**31))
        if o["sc_prec"] > 7 and rng.random() < 0.8:
            continue
        o |= _arithmetic(rng, o)
        D = a.shape[-1] // o.get("or_group", 1) * o.get("or_group", 1)
        if a.shape[-1] > D or o["chunk_d"] % o.get("or_group", 1):
            _regroup(rng, o)
        if D and _fits(o, D) and is_new(o):
            return a[..., :D].copy(), b[..., :D].copy(), o


def _regroup(rng: random.Random, o: dict[str, Any]) -> None:
    """Chunks of whole groups, and stream lengths that do not depend on them."""
    if isinstance(o["stoc_len"], list) and isinstance(o["stoc_len"][0], list):
        o["stoc_len"] = None
    if o["chunk_d"]:
        o["chunk_d"] = o["or_group"] * rng.randint(1, 2)


def _arithmetic(rng: random.Random, o: dict[str, Any]) -> dict[str, Any]:
    p, chosen = o["sc_prec"], {}
    bipolar = o["mode"] == "bipolar"
    if rng.random() < 0.5:
        chosen["gate"] = "and"
    if bipolar and rng.random() < 0.3:
        chosen["signs"] = "twos_complement"
    elif rng.random() < 0.45:
        chosen["or_group"] = rng.choice([2, 3, 4, 4, 5, 9])
        if rng.random() < 0.5:
            chosen |= {
                "scramble": "cells",
                "gate": "and",
                "or_group": rng.choice([4, 4, 9]),
                "rng_levels": None,
            }
    if rng.random() < 0.3:
        chosen |= {"flip_rate": rng.choice([0.0, 0.01, 0.2, 0.5, 1.0]), "flip_seed": rng.getrandbits(32)}
    if rng.random() < 0.3:
        chosen["planned_len"] = rng.randint(1, 2**p)
    if rng.random() < 0.4:
        family = rng.choice(["unary", "halton", "weyl"])
        chosen |= {"sequence": family, "seed_a": None, "seed_b": None}
        if rng.random() < 0.5 and family != "unary":
            chosen["seed_b"] = rng.randrange(1, 2**p, 2) if family == "weyl" else rng.getrandbits(10)
    return chosen


def _fits(o: dict[str, Any], D: int) -> bool:
    p, size, group = o["sc_prec"], o["chunk_d"], o.get("or_group", 1)
    chunks = [min(size, D - start) for start in range(0, D, size)] if 0 < size < D else [D]
    if any(n % group for n in chunks):
        return False
    table = o["stoc_len"]
    flat = [generated_streams._grid(o)[1]]
    if isinstance(table, list):
        flat += [n for row in table for n in (row if isinstance(row, list) else [row])]
    if max(flat) > (o.get("planned_len") or 2**p):
        return False
    if o["scramble"] == "cells":
        edge = {4: 2, 9: 3}.get(group)
        R = generated_streams._grid(o)[2]
        return edge is not None and R % edge == 0 and max(flat) * group < 2**15
    return True
