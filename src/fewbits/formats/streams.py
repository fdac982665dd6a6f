"""Stochastic computing: the sequences of numbers that make streams, and the tables of what streams count.

With p = ``sc_prec`` bits, L steps and a grid of R levels, operand x of a and b has the 2**p whole numbers
``x[t]`` below 2**p of its sequence. In a dimension with mask m its stream compares ``r[t] = x[t] XOR m``,
scaled to ``floor(r * R / 2**p)`` where R is not 2**p, with a code's boundary ``B(q) = round(|q| * R / Q)``.

* enabled steps ``K(qa) = #{t < L: ra[t] < B(qa)}``, an entry of `step_tables`;
* the count after k enabled steps ``C(k, qb) = #{t < k: rb[t] < B(qb)}``, an entry of `prefix_tables`;
* the product of two magnitudes ``T(qa, qb) = C(K(qa), qb)``, an entry of `product_tables`.

C does not depend on L beyond its number of rows: the one of the longest stream serves shorter ones too.

That is the arithmetic of scmp_kernels. Others, all defined bit by bit by `operand_bits` and `product_bits`:

* `Streams.gate` "and": both streams advance at every step, ``T = #{t < L: ra[t] < B(qa) and rb[t] < B(qb)}``.
* `Streams.signs` "twos_complement": a code from -Q to Q is one stream, of boundary
  ``B(q) = round((q + Q) * R / (2 * Q))`` (its two's complement with the sign bit inverted), an XNOR
  multiplies, and a counter goes up at each one and down at each zero: ``T = 2 * ones - L``. With the gate
  "enable" this is uGEMM's bipolar product: where a's bit is 0 the next bit of a second reader of b's stream
  counts, inverted.
* `Streams.or_group` G: each G neighbouring dimensions share a counter, which advances once at a step where at
  least one of their products has a 1; one counter for positive products and one for negative ones.
* `Streams.cells`: such a group shares one pair of sequences. The square of (ra, rb) is cut into G cells, and
  a product has its 1s in its own cell alone, so no two collide; each one that is counted stands for G.
* `Streams.flip_rate`: every bit of every code's stream is inverted with this probability, once for all; a
  code 0 (of "magnitude") has no stream and counts nothing, flips or not.
* `Streams.planned`: the streams were made for so many steps, of which the first L run (early termination).

Sequences by family:

* "sobol": direction numbers ``V[i] = seed[i] * 2**(p - 1 - i)``, taken in Gray code order. Seeds are odd and
  below 2**(i + 1), so that all 2**p numbers occur once. By default a's are all ones, b's those of
  scmp_kernels (which at first run along with a's, as they may behind an enable signal), or with the gate
  "and" those of the second Sobol sequence.
* "lfsr": the states of a shift register of p bits with one feedback, moved towards its low end, from a state
  that is not 0. Its stages are the maximal ones of Xilinx's application note XAPP 052 (P. Alfke, "Efficient
  Shift Registers, LFSR Counters, and Long Pseudo-Random Sequence Generators", 1996, table 3): 2**p - 1 states
  follow one another, never 0, and the first comes once more as the last. b takes the states with their bits
  in reverse order.
* "unary": a's numbers rise in equal steps, ``floor(t * R / L)`` (with `planned` in place of L), without a
  mask: its stream is all ones first, then zeros (temporal coding). b's are those of "sobol".
* "halton": the radical inverse of t, in base 2 for a and ``floor(2**p * inverse)`` in base 3 for b; a seed
  is the first t.
* "weyl": ``seed * t mod 2**p`` for an odd seed; by default next to 2**p times the golden section for a, times
  sqrt(2) - 1 for b.
* "random": the upper p bits of the words of `fewbits.formats.rounding` (Philox) under a seed, on every device
  the same; numbers may occur more than once or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import torch
from torch import Tensor

from fewbits.formats.rounding import random_words
from fewbits.formats.table_cache import keep_tables

SEQUENCES = ("sobol", "lfsr", "random", "unary", "halton", "weyl")
GATES = ("enable", "and")
SIGNS = ("magnitude", "twos_complement")
KEY_BITS = 16  # of a dimension's key: its mask or its cell; above them its number for faults
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
        planned: steps that the streams were made for; None: ``length``.
        gate: "enable" or "and", see the module's text.
        signs: "magnitude" or "twos_complement".
        or_group: dimensions that share a counter.
        cells: whether they share one pair of sequences, a cell each.
        flip_rate: probability of a bit to be inverted.
        flip_seed: of the inverted bits.
    """

    sc_prec: int
    length: int
    levels: int
    max_code: int
    sequence: str = "sobol"
    seed_a: Seed = None
    seed_b: Seed = None
    planned: int | None = None
    gate: str = "enable"
    signs: str = "magnitude"
    or_group: int = 1
    cells: bool = False
    flip_rate: float = 0.0
    flip_seed: int = 0

    @property
    def signed(self) -> bool:
        """Whether a code's sign is in its stream, so that tables are over codes from -Q to Q."""
        return self.signs == "twos_complement"

    @property
    def by_prefix(self) -> bool:
        """Whether a product is the count of b's bits after K steps, ``T(qa, qb) = C(K(qa), qb)``."""
        return self.gate == "enable" and not self.signed

    @property
    def num_codes(self) -> int:
        """Codes that have streams of their own, the sides of a product table."""
        return (2 if self.signed else 1) * self.max_code + 1


# Sequences.


def numbers(streams: Streams, operand: str) -> tuple[int, ...]:
    """The 2**sc_prec numbers of the sequence of operand "a" or "b"."""
    seed = streams.seed_a if operand == "a" else streams.seed_b
    if seed is None and operand == "b" and streams.gate == "and" and streams.sequence in ("sobol", "unary"):
        seed = second_directions(streams.sc_prec)
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


def second_directions(sc_prec: int) -> tuple[int, ...]:
    """The direction seeds of the second dimension of Sobol's sequence: powers of 1 + x, modulo 2.

    With the first, all ones, every part of the square has its share of points, as the gate "and" needs it.
    """
    seeds = [1]
    while len(seeds) < sc_prec:
        seeds.append(seeds[-1] ^ seeds[-1] << 1)
    return tuple(seeds)


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


@lru_cache(maxsize=64)
def unary(sc_prec: int, operand: str, seed: Seed = None) -> tuple[int, ...]:
    """For a 0, 1, 2, ..., which `operand_bits` stretches over a stream's length; for b a Sobol sequence."""
    return tuple(range(2**sc_prec)) if operand == "a" else sobol(sc_prec, "b", seed)


@lru_cache(maxsize=64)
def halton(sc_prec: int, operand: str, seed: Seed = None) -> tuple[int, ...]:
    """Radical inverses in base 2 (a) or 3 (b), as whole numbers below 2**sc_prec."""
    assert seed is None or isinstance(seed, int)
    base, first = (2 if operand == "a" else 3), seed or 0
    return tuple(_inverse_digits(t, base, 2**sc_prec) for t in range(first, first + 2**sc_prec))


def _inverse_digits(t: int, base: int, size: int) -> int:
    """``floor(size * x)``, where x has t's digits behind the point, the lowest first."""
    digits, places = 0, 1
    while t:
        t, digit = divmod(t, base)
        digits, places = digits * base + digit, places * base
    return size * digits // places


@lru_cache(maxsize=64)
def weyl(sc_prec: int, operand: str, seed: Seed = None) -> tuple[int, ...]:
    """Multiples of an odd number below 2**sc_prec, modulo 2**sc_prec."""
    assert seed is None or isinstance(seed, int)
    size = 2**sc_prec
    golden, root = (isqrt(5 * size * size) - size) // 2, isqrt(2 * size * size) - size
    step = (golden if operand == "a" else root) | 1 if seed is None else seed
    return tuple(step * t % size for t in range(size))


_FAMILIES: dict[str, Callable[[int, str, Seed], tuple[int, ...]]] = {
    "sobol": sobol,
    "lfsr": lfsr,
    "random": uniform,
    "unary": unary,
    "halton": halton,
    "weyl": weyl,
}


def reversed_bits(number: int, bits: int) -> int:
    """``number`` with its lowest ``bits`` bits in reverse order."""
    return int(f"{number:0{bits}b}"[::-1], 2)


def seed_problem(sequence: str, sc_prec: int, seed: object) -> str | None:
    """What is wrong with a seed for a family, and what would be right; None if it will do."""
    if seed is None:
        return None
    if sequence in ("sobol", "unary"):
        seeds: tuple[int, ...] = seed if isinstance(seed, tuple) else ()
        if len(seeds) == sc_prec and all(
            _is_whole(s, 1, 2 ** (i + 1) - 1) and s % 2 for i, s in enumerate(seeds)
        ):
            return None
        return f"give {sc_prec} odd numbers, the i-th (from 0) below 2**(i + 1)"
    if sequence == "weyl":
        odd = _is_whole(seed, 1, 2**sc_prec - 1) and int(str(seed)) % 2
        return None if odd else f"give an odd number from 1 to {2**sc_prec - 1}"
    low, high = (1, 2**sc_prec - 1) if sequence == "lfsr" else (0, 2**64 - 1)
    return None if _is_whole(seed, low, high) else f"give a whole number from {low} to {high}"


def arithmetic_problem(streams: Streams, *, bipolar: bool) -> str | None:
    """What is wrong with an arithmetic as a whole, one sentence; None if nothing is."""
    rate, planned = streams.flip_rate, streams.planned
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        return f"flip_rate={rate!r} is refused: give the share of inverted bits, from 0 to 1."
    if planned is not None and streams.length > planned:
        return (
            f"{streams.length} steps run longer than the streams of planned_len={planned}; give a stoc_len "
            "of at most that."
        )
    if streams.sequence == "unary" and streams.seed_a is not None:
        return 'the sequence "unary" has no seed_a, as a\'s numbers rise in order; leave it out.'
    if streams.signed and (not bipolar or streams.or_group > 1):
        return (
            f'signs "{streams.signs}" are for mode "bipolar" without or_group (half of a zero\'s bits are '
            'ones, which fill an OR); use signs="magnitude".'
        )
    return _cells_problem(streams) if streams.cells else None


def _cells_problem(streams: Streams) -> str | None:
    group = streams.or_group
    side = cell_side(group)
    if streams.gate != "and" or group < 2 or side * side != group:
        return (
            'scramble "cells" needs gate="and" and an or_group that is a square, such as 4 or 16, not '
            f'gate="{streams.gate}" and or_group={group}.'
        )
    if streams.levels % side or streams.length * group >= 2**15:
        return (
            f"or_group={group} cannot cut a grid of {streams.levels} levels into {side} equal parts a side, "
            f"with {streams.length} steps counted {group}-fold below 32768; choose a smaller power of 4."
        )
    return None


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


# Streams, bit by bit.


def boundaries(streams: Streams) -> Tensor:
    """B(q) of the codes 0 ... max_code, or -max_code ... max_code where their signs are in their streams.

    (num_codes,) int64.
    """
    Q, levels = streams.max_code, streams.levels
    if streams.signed:
        return (torch.arange(2 * Q + 1) * levels + Q) // (2 * Q)
    levels = levels // cell_side(streams.or_group) if streams.cells else levels
    return (2 * torch.arange(Q + 1) * levels + Q) // (2 * Q)


def cell_side(group: int) -> int:
    """How many cells a side of the square has for ``group`` of them."""
    return isqrt(group)


def operand_bits(streams: Streams, operand: str, key: int, length: int) -> Tensor:
    """The first ``length`` bits of the stream of each code of "a" or "b", (num_codes, length) bool.

    Args:
        streams: what is streamed.
        operand: "a" or "b". With the gate "enable", b's bits are in the order in which they are drawn.
        key: of the dimension, from `Stochastic.masks`.
        length: how many bits.
    """
    numbers_t, bounds = _compared(streams, operand, key, length), boundaries(streams)[:, None]
    if streams.cells:
        side = cell_side(streams.or_group)
        cell = divmod(_mask_of(key), side)[operand == "b"]
        size = streams.levels // side
        bits = (numbers_t // size == cell) & (numbers_t % size < bounds)
    else:
        bits = numbers_t < bounds
    if streams.flip_rate:
        bits = bits ^ _flips(streams, operand, key, length)
    if not streams.signed:
        bits[0] = False
    return bits


def product_bits(streams: Streams, key: int) -> Tensor:
    """The product's bit at each step, (num_codes of a, num_codes of b, length) bool: the definition."""
    a, b = (operand_bits(streams, operand, key, streams.length) for operand in "ab")
    if streams.gate == "and":
        return a[:, None] == b if streams.signed else a[:, None] & b
    bits = a[:, None] & _drawn(b, a)
    return bits | (~a[:, None] & ~_drawn(b, ~a)) if streams.signed else bits


def _drawn(b: Tensor, enabled: Tensor) -> Tensor:
    """b's next bit at each step where a is enabled, anything elsewhere: (codes of a, codes of b, length)."""
    position = (enabled.cumsum(1) - 1).clamp_(min=0)
    return b[:, position].transpose(0, 1)


def counted(ones: Tensor, streams: Streams) -> Tensor:
    """What a counter of one product, or of a group of them, has after so many ones; any shape."""
    if streams.signed:
        return 2 * ones - streams.length
    return ones * streams.or_group if streams.cells else ones


def _mask_of(key: int) -> int:
    return key & ((1 << KEY_BITS) - 1)


def _flips(streams: Streams, operand: str, key: int, length: int) -> Tensor:
    """Which bits are inverted, (num_codes, length) bool; of a longer stream the first are the same."""
    seed = streams.flip_seed << 13 | (operand == "b") << 12 | key >> KEY_BITS
    words = random_words(streams.num_codes << streams.sc_prec, seed).view(streams.num_codes, -1)
    return words[:, :length] < round(streams.flip_rate * 2**32)


# Tables.


def product_tables(streams: Streams, masks: tuple[int, ...], device: torch.device) -> Tensor:
    """T(qa, qb) under each mask, (len(masks), num_codes, num_codes) int16; small ones are kept."""
    if len(masks) * table_bytes(streams) <= KEPT_TABLE_BYTES:
        return _kept_products(streams, masks, device)
    return torch.stack([_product(streams, mask) for mask in masks]).to(device)


def prefix_tables(streams: Streams, masks: tuple[int, ...], device: torch.device) -> Tensor:
    """C(k, qb) under each mask, (len(masks), length + 1, num_codes) int16; small ones are kept."""
    if len(masks) * prefix_bytes(streams) <= KEPT_TABLE_BYTES:
        return _kept_prefixes(streams, masks, device)
    return torch.stack([_prefix(streams, mask) for mask in masks]).to(device)


@keep_tables(maxsize=16)
def step_tables(
    streams: Streams, masks: tuple[int, ...], lengths: tuple[int, ...], device: torch.device
) -> Tensor:
    """K(qa) for streams of each length under each mask, (lengths, masks, codes) int16."""
    tables = [[_steps(streams, mask, length) for mask in masks] for length in lengths]
    return torch.stack([torch.stack(of_length) for of_length in tables]).to(torch.int16).to(device)


def table_bytes(streams: Streams) -> int:
    """The size of one mask's product table."""
    return 2 * streams.num_codes**2


def prefix_bytes(streams: Streams) -> int:
    """The size of one mask's prefix table."""
    return 2 * (streams.length + 1) * streams.num_codes


@keep_tables(maxsize=8)
def _kept_products(streams: Streams, masks: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.stack([_product(streams, mask) for mask in masks]).to(device)


@keep_tables(maxsize=8)
def _kept_prefixes(streams: Streams, masks: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.stack([_prefix(streams, mask) for mask in masks]).to(device)


def _product(streams: Streams, mask: int) -> Tensor:
    """As the counts of `product_bits`, without its bits of pairs."""
    length = streams.length
    if streams.gate == "and":
        a, b = (operand_bits(streams, operand, mask, length).float() for operand in "ab")
        ones = a @ b.t()
        if streams.signed:
            ones = ones + (1 - a) @ (1 - b).t()
        return counted(ones, streams).to(torch.int16)
    counts, steps = _prefix(streams, mask), _steps(streams, mask, length)
    if not streams.signed:
        return counts[steps]
    ones = counts[steps].long() + (length - steps)[:, None] - counts[length - steps]
    return counted(ones, streams).to(torch.int16)


def _prefix(streams: Streams, mask: int) -> Tensor:
    ones = operand_bits(streams, "b", mask, streams.length).t()
    counts = torch.zeros(streams.length + 1, streams.num_codes, dtype=torch.int16)
    torch.cumsum(ones, 0, dtype=torch.int16, out=counts[1:])
    return counts


def _steps(streams: Streams, mask: int, length: int) -> Tensor:
    if streams.flip_rate:
        return operand_bits(streams, "a", mask, length).sum(1)
    numbers_below = _compared(streams, "a", mask, length).sort().values
    return torch.searchsorted(numbers_below, boundaries(streams))  # how many lie strictly below


def _compared(streams: Streams, operand: str, key: int, length: int) -> Tensor:
    """r[t], what a stream compares with a boundary."""
    x = torch.tensor(numbers(streams, operand)[:length], dtype=torch.int64)
    if streams.sequence == "unary" and operand == "a":
        return x * streams.levels // (streams.planned or max(length, 1))
    if not streams.cells:
        x = x ^ _mask_of(key)
    size = 2**streams.sc_prec
    return x if streams.levels == size else x * streams.levels // size
