"""Stochastic computing: the sequences of numbers that make streams, and the tables of what streams count.

With p = ``sc_prec`` bits, L steps and a grid of R levels, operand x of a and b has the 2**p whole numbers
``x[t]`` below 2**p of its sequence. In a dimension with mask m its stream compares ``r[t] = x[t] XOR m``,
scaled to ``floor(r * R / 2**p)`` where R is not 2**p, with a code's boundary ``B(q) = round(|q| * R / Q)``.

* enabled steps ``K(qa) = #{t < L: ra[t] < B(qa)}``, an entry of `step_tables`;
* the count after k enabled steps ``C(k, qb) = #{t < k: rb[t] < B(qb)}``, an entry of `prefix_tables`;
* the product of two magnitudes ``T(qa, qb) = C(K(qa), qb)``, an entry of `product_tables`.

C does not depend on L beyond its number of rows: the one of the longest stream serves shorter ones too.

Sequences by family:

* "sobol": direction numbers ``V[i] = seed[i] * 2**(p - 1 - i)``, taken in Gray code order. Seeds are odd and
  below 2**(i + 1), so that all 2**p numbers occur once. By default a's are all ones, b's those of
  scmp_kernels.
* "lfsr": the states of a shift register of p bits with one feedback, moved towards its low end, from a state
  that is not 0. Its stages are the maximal ones of Xilinx's application note XAPP 052 (P. Alfke, "Efficient
  Shift Registers, LFSR Counters, and Long Pseudo-Random Sequence Generators", 1996, table 3): 2**p - 1 states
  follow one another, never 0, and the first comes once more as the last. b takes the states with their bits
  in reverse order.
* "random": the upper p bits of the words of `fewbits.formats.rounding` (Philox) under a seed, on every device
  the same; numbers may occur more than once or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fewbits.formats.rounding import random_words
from fewbits.formats.table_cache import keep_tables

SEQUENCES = ("sobol", "lfsr", "random")
Seed = int | tuple[int, ...] | None

# Direction seeds of b's sequence for 8 bits; a's are all ones.
_SEEDS_B8 = (1, 1, 1, 1, 9, 1, 41, 255)
# Stages that are fed back, by the number of bits: XAPP 052; for 1 and 2 bits the only ones there are.
_STAGES = {
    1: (1,), 2: (2, 1), 3: (3, 2), 4: (4, 3), 5: (5, 3), 6: (6, 5), 7: (7, 6), 8: (8, 6, 5, 4), 9: (9, 5),
    10: (10, 7), 11: (11, 9), 12: (12, 6, 4, 1),
}  # fmt: skip
_LFSR_SEED = 125  # of scmp_kernels; its lowest bits serve shorter registers
_RANDOM_SEEDS = {"a": 0, "b": 1}
KEPT_TABLE_BYTES = 2**26  # of one set of masks


@dataclass(frozen=True)
class Streams:
    """What a product table depends on, besides a dimension's mask.

    Attributes:
        sc_prec: bits of the sequences.
        length: steps of a stream.
        levels: size of the grid that sequences and boundaries share.
        max_code: largest magnitude of a code.
        sequence: the family of the sequences.
        seed_a: what a's sequence starts from, as its family says; None for the default.
        seed_b: the same for b.
    """

    sc_prec: int
    length: int
    levels: int
    max_code: int
    sequence: str = "sobol"
    seed_a: Seed = None
    seed_b: Seed = None


# Sequences.


def numbers(streams: Streams, operand: str) -> tuple[int, ...]:
    """The 2**sc_prec numbers of the sequence of operand "a" or "b"."""
    seed = streams.seed_a if operand == "a" else streams.seed_b
    return _FAMILIES[streams.sequence](streams.sc_prec, operand, seed)


@lru_cache(maxsize=64)
def sobol(sc_prec: int, operand: str, seed: Seed = None) -> tuple[int, ...]:
    """A Sobol sequence: 2**sc_prec numbers in Gray code order from direction seeds."""
    seeds = default_directions(sc_prec, operand) if seed is None else seed
    assert isinstance(seeds, tuple)
    directions = [seed << (sc_prec - 1 - i) for i, seed in enumerate(seeds)]
    values = [0]
    for t in range(2**sc_prec - 1):
        lowest_zero_bit = (~t & (t + 1)).bit_length() - 1
        values.append(values[-1] ^ directions[lowest_zero_bit])
    return tuple(values)


def default_directions(sc_prec: int, operand: str) -> tuple[int, ...]:
    """The direction seeds of scmp_kernels."""
    if operand == "a":
        return (1,) * sc_prec
    if sc_prec == len(_SEEDS_B8):
        return _SEEDS_B8
    return tuple({4: 9, 6: 41}.get(i, 1) for i in range(sc_prec))


@lru_cache(maxsize=64)
def lfsr(sc_prec: int, operand: str, seed: Seed = None) -> tuple[int, ...]:
    """The states of a maximal shift register, b's with their bits reversed: 2**sc_prec numbers."""
    state = _LFSR_SEED % 2**sc_prec if seed is None else seed
    assert isinstance(state, int)
    values = []
    for _ in range(2**sc_prec):
        values.append(state if operand == "a" else reversed_bits(state, sc_prec))
        fed_back = 0
        for stage in _STAGES[sc_prec]:
            fed_back ^= state >> (sc_prec - stage) & 1
        state = state >> 1 | fed_back << (sc_prec - 1)
    return tuple(values)


@keep_tables(maxsize=64, of_numbers=True)
def uniform(sc_prec: int, operand: str, seed: Seed = None) -> tuple[int, ...]:
    """2**sc_prec numbers drawn independently."""
    drawn = random_words(2**sc_prec, _RANDOM_SEEDS[operand] if seed is None else int(seed))  # type: ignore[arg-type]
    return tuple((drawn >> (32 - sc_prec)).tolist())


_FAMILIES: dict[str, Callable[[int, str, Seed], tuple[int, ...]]] = {
    "sobol": sobol,
    "lfsr": lfsr,
    "random": uniform,
}


def reversed_bits(number: int, bits: int) -> int:
    """``number`` with its lowest ``bits`` bits in reverse order."""
    return int(f"{number:0{bits}b}"[::-1], 2)


def seed_problem(sequence: str, sc_prec: int, seed: object) -> str | None:
    """What is wrong with a seed for a family, and what would be right; None if it will do."""
    if seed is None:
        return None
    if sequence == "sobol":
        seeds: tuple[int, ...] = seed if isinstance(seed, tuple) else ()
        if len(seeds) == sc_prec and all(
            _is_whole(s, 1, 2 ** (i + 1) - 1) and s % 2 for i, s in enumerate(seeds)
        ):
            return None
        return f"give {sc_prec} odd numbers, the i-th (from 0) below 2**(i + 1)"
    low, high = (1, 2**sc_prec - 1) if sequence == "lfsr" else (0, 2**64 - 1)
    return None if _is_whole(seed, low, high) else f"give a whole number from {low} to {high}"


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


# Tables.


def boundaries(streams: Streams) -> Tensor:
    """B(q) = round(q * levels / max_code) for q = 0 ... max_code, (max_code + 1,) int64."""
    q = torch.arange(streams.max_code + 1)
    return (2 * q * streams.levels + streams.max_code) // (2 * streams.max_code)


def product_tables(streams: Streams, masks: tuple[int, ...], device: torch.device) -> Tensor:
    """T(qa, qb) under each mask, (len(masks), max_code + 1, max_code + 1) int16; small ones are kept."""
    if len(masks) * table_bytes(streams) <= KEPT_TABLE_BYTES:
        return _kept_products(streams, masks, device)
    return torch.stack([_product(streams, mask) for mask in masks]).to(device)


def prefix_tables(streams: Streams, masks: tuple[int, ...], device: torch.device) -> Tensor:
    """C(k, qb) under each mask, (len(masks), length + 1, max_code + 1) int16; small ones are kept."""
    if len(masks) * prefix_bytes(streams) <= KEPT_TABLE_BYTES:
        return _kept_prefixes(streams, masks, device)
    return torch.stack([_prefix(streams, mask) for mask in masks]).to(device)


@keep_tables(maxsize=16)
def step_tables(
    streams: Streams, masks: tuple[int, ...], lengths: tuple[int, ...], device: torch.device
) -> Tensor:
    """K(qa) for streams of each length under each mask, (len(lengths), len(masks), max_code + 1) int16."""
    tables = [[_steps(streams, mask, length) for mask in masks] for length in lengths]
    return torch.stack([torch.stack(of_length) for of_length in tables]).to(torch.int16).to(device)


def table_bytes(streams: Streams) -> int:
    """The size of one mask's product table."""
    return 2 * (streams.max_code + 1) ** 2


def prefix_bytes(streams: Streams) -> int:
    """The size of one mask's prefix table."""
    return 2 * (streams.length + 1) * (streams.max_code + 1)


@keep_tables(maxsize=8)
def _kept_products(streams: Streams, masks: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.stack([_product(streams, mask) for mask in masks]).to(device)


@keep_tables(maxsize=8)
def _kept_prefixes(streams: Streams, masks: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.stack([_prefix(streams, mask) for mask in masks]).to(device)


def _product(streams: Streams, mask: int) -> Tensor:
    return _prefix(streams, mask)[_steps(streams, mask, streams.length)]


def _prefix(streams: Streams, mask: int) -> Tensor:
    bounds = boundaries(streams)
    ones = _compared(streams, "b", mask, streams.length)[:, None] < bounds
    counts = torch.zeros(streams.length + 1, len(bounds), dtype=torch.int16)
    torch.cumsum(ones, 0, dtype=torch.int16, out=counts[1:])
    return counts


def _steps(streams: Streams, mask: int, length: int) -> Tensor:
    numbers_below = _compared(streams, "a", mask, length).sort().values
    return torch.searchsorted(numbers_below, boundaries(streams))  # how many lie strictly below


def _compared(streams: Streams, operand: str, mask: int, length: int) -> Tensor:
    """r[t], what a stream compares with a boundary."""
    x = torch.tensor(numbers(streams, operand)[:length], dtype=torch.int64) ^ mask
    size = 2**streams.sc_prec
    return x if streams.levels == size else x * streams.levels // size
