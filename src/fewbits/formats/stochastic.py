"""Stochastic computing: operands as signs and magnitudes, a product as a count of stream bits.

Hardware turns each magnitude into a bit stream by comparing it with a low-discrepancy sequence; an AND gate
multiplies two streams and a counter adds the bits up. With an enable signal, the second operand's sequence
advances only while the first operand's bit is 1, so the count for two magnitudes is one entry of a fixed
table per inner dimension.

With p = ``sc_prec``, Q the largest code, R the levels of the sequences' grid and L the stream length:

* codes: bipolar ``q = round(x / s)`` in -Q ... Q, Q = 2**(p-1) - 1; unipolar ``q = round(x / s + z)`` in
  0 ... Q, Q = 2**p - 1. Scales s and zero points z belong to the options' ``granularity``.
* a code's boundary on the grid: ``B(q) = round(|q| * R / Q)``; Q is odd, so there are no ties.
* sequences: Sobol integers x[t] below 2**p in Gray code order, a's and b's own; in dimension d XORed with
  ``mask(d)`` where the options scramble, then scaled to ``floor(x * R / 2**p)`` where R is not 2**p.
* a's enabled steps: ``K_d(q) = #{t < L: ra_d[t] < B(q)}``; the product of two magnitudes
  ``T_d(qa, qb) = #{t < K_d(qa): rb_d[t] < B(qb)}``. Not symmetric in a and b.

Here: the options as one frozen value, the quantiser, the sequences and the tables T, in plain torch; the
matmul is in `fewbits.kernels.matmul_stochastic`. Not here yet: packed weights, so this is no `Format` of the
registry; sequences other than the default pair of Sobol sequences; several stream lengths in one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported

GRANULARITIES = ("per_tensor", "per_row", "per_head")
MODES = ("bipolar", "unipolar")
SCRAMBLES = ("bitrev", "counter", "random", "off")

# Direction seeds of b's sequence for 8 bits; a's are all ones.
_SEEDS_B8 = (1, 1, 1, 1, 9, 1, 41, 255)
_RANDOM_MASK_SEED = 0x5A5A5A5A
_MAX_LEVELS = 2**24  # a boundary is a float32 in the hardware's model
_SMALLEST_RANGE = 1e-5
KEPT_TABLE_BYTES = 2**26  # of one set of masks


@dataclass(frozen=True)
class Streams:
    """What a product table depends on, besides a dimension's mask.

    Attributes:
        sc_prec: bits of the sequences.
        length: steps of a stream.
        levels: size of the grid that sequences and boundaries share.
        max_code: largest magnitude of a code.
    """

    sc_prec: int
    length: int
    levels: int
    max_code: int


@dataclass(frozen=True, kw_only=True)
class Stochastic:
    """Every option of a stochastic-computing product, by the names that scmp_kernels gives them.

    Attributes:
        granularity: what shares a scale: "per_tensor", "per_row" (or a group of rows), or "per_head" (an
            entry of the leading axis).
        mode: "bipolar" (sign and magnitude) or "unipolar" (with a zero point).
        sc_prec: bits of an operand, sign included.
        stoc_len: stream length, at most 2**sc_prec; None for the default.
        rng_levels: size of the sequences' grid; None for the default.
        halve_bipolar_stoc_len: for bipolar the two defaults are 2**(sc_prec - 1), not 2**sc_prec.
        chunk_d: inner dimensions that are quantised and counted together; 0 for all.
        group_a: rows of a that share a scale, with "per_row" and without chunks.
        group_b: the same for b.
        scramble: masks of the dimensions: "bitrev", "counter", "random" or "off".
        scramble_rescale: whether masks also apply to sequences on a grid other than 2**sc_prec.
        n_masks: dimension d takes the mask of d mod n_masks; None for no such limit.
    """

    granularity: str = "per_row"
    mode: str = "bipolar"
    sc_prec: int = 8
    stoc_len: int | None = None
    rng_levels: int | None = None
    halve_bipolar_stoc_len: bool = False
    chunk_d: int = 0
    group_a: int = 1
    group_b: int = 1
    scramble: str = "bitrev"
    scramble_rescale: bool = True
    n_masks: int | None = None

    def __post_init__(self) -> None:
        for field, known in (("granularity", GRANULARITIES), ("mode", MODES), ("scramble", SCRAMBLES)):
            value = getattr(self, field)
            if value not in known:
                raise BadInput(f"{field} {value!r} is unknown; choose one of {', '.join(known)}.")
        for field in ("halve_bipolar_stoc_len", "scramble_rescale"):
            if not isinstance(getattr(self, field), bool):
                raise BadInput(f"{field} must be True or False, not {getattr(self, field)!r}.")
        self._check_numbers()
        if self.granularity == "per_head" and not self.bipolar:
            raise BadInput('granularity "per_head" is bipolar only; use "per_row" for unipolar operands.')
        if self.chunk_d and (self.granularity != "per_row" or not self.bipolar):
            raise BadInput(
                f'chunk_d={self.chunk_d} needs granularity "per_row" and mode "bipolar", not '
                f'"{self.granularity}" and "{self.mode}"; use chunk_d=0.'
            )

    def _check_numbers(self) -> None:
        lowest, highest = (2, 12) if self.bipolar else (1, 11)
        _check_integer("sc_prec", self.sc_prec, 1, None)
        if not lowest <= self.sc_prec <= highest:
            raise Unsupported(
                f"sc_prec={self.sc_prec} is out of range for {self.mode} operands; "
                f"choose {lowest} to {highest}."
            )
        for field, low, high in (
            ("stoc_len", 1, 2**self.sc_prec),
            ("rng_levels", 1, _MAX_LEVELS),
            ("n_masks", 1, None),
        ):
            if getattr(self, field) is not None:
                _check_integer(field, getattr(self, field), low, high)
        for field, low in (("chunk_d", 0), ("group_a", 1), ("group_b", 1)):
            _check_integer(field, getattr(self, field), low, None)

    @property
    def bipolar(self) -> bool:
        """Whether codes have signs."""
        return self.mode == "bipolar"

    @property
    def max_code(self) -> int:
        """Q, the largest code."""
        return int(2 ** (self.sc_prec - 1) - 1) if self.bipolar else int(2**self.sc_prec - 1)

    @property
    def _default_length(self) -> int:
        return int(2 ** (self.sc_prec - (self.halve_bipolar_stoc_len and self.bipolar)))

    @property
    def streams(self) -> Streams:
        """What the product tables depend on."""
        return Streams(
            self.sc_prec,
            self._default_length if self.stoc_len is None else self.stoc_len,
            self._default_length if self.rng_levels is None else self.rng_levels,
            self.max_code,
        )

    def chunks(self, D: int) -> list[slice]:
        """The parts of an inner dimension that are quantised and counted together."""
        size = self.chunk_d if 0 < self.chunk_d < D else D
        return [slice(start, min(start + size, D)) for start in range(0, D, max(size, 1))]

    def masks(self, D: int) -> tuple[int, ...]:
        """The mask of each inner dimension of one chunk; the same for both operands."""
        size, streams = 2**self.sc_prec, self.streams
        scrambled = streams.length < size if streams.levels == size else self.scramble_rescale
        if self.scramble == "off" or not scrambled:
            return (0,) * D
        period = D if self.scramble == "random" else size
        if self.n_masks is not None:
            period = min(self.n_masks, size)
        index = [d % period for d in range(D)]
        if self.scramble == "counter":
            return tuple(index)
        if self.scramble == "bitrev":
            return tuple(int(f"{i:0{self.sc_prec}b}"[::-1], 2) for i in index)
        # On every device the CPU's generator, so that the result is the same everywhere.
        generator = torch.Generator("cpu").manual_seed(_RANDOM_MASK_SEED)
        drawn = torch.randint(0, size, (min(period, D),), generator=generator).tolist()
        return tuple(drawn[i] for i in index)


def _check_integer(field: str, value: object, low: int, high: int | None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):  # type: ignore[operator]
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise BadInput(f"{field}={value!r} is refused: give a whole number {bounds}.")


# Sequences and tables.


@lru_cache(maxsize=64)
def sobol(sc_prec: int, operand: str) -> tuple[int, ...]:
    """The 2**sc_prec integers of the sequence of operand "a" or "b", in Gray code order."""
    seeds = [1] * sc_prec
    if operand == "b":
        if sc_prec == len(_SEEDS_B8):
            seeds = list(_SEEDS_B8)
        else:
            seeds = [{4: 9, 6: 41}.get(i, 1) for i in range(sc_prec)]
    directions = [seed << (sc_prec - 1 - i) for i, seed in enumerate(seeds)]
    values = [0]
    for t in range(2**sc_prec - 1):
        lowest_zero_bit = (~t & (t + 1)).bit_length() - 1
        values.append(values[-1] ^ directions[lowest_zero_bit])
    return tuple(values)


def boundaries(streams: Streams) -> Tensor:
    """B(q) = round(q * levels / max_code) for q = 0 ... max_code, (max_code + 1,) int64."""
    q = torch.arange(streams.max_code + 1)
    return (2 * q * streams.levels + streams.max_code) // (2 * streams.max_code)


def product_tables(streams: Streams, masks: tuple[int, ...], device: torch.device) -> Tensor:
    """T(qa, qb) under each mask, (len(masks), max_code + 1, max_code + 1) int16; small ones are kept."""
    if len(masks) * table_bytes(streams) <= KEPT_TABLE_BYTES:
        return _kept_tables(streams, masks, device)
    return torch.stack([_table(streams, mask) for mask in masks]).to(device)


def table_bytes(streams: Streams) -> int:
    """The size of one mask's table."""
    return 2 * (streams.max_code + 1) ** 2


@lru_cache(maxsize=8)
def _kept_tables(streams: Streams, masks: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.stack([_table(streams, mask) for mask in masks]).to(device)


def _table(streams: Streams, mask: int) -> Tensor:
    bounds = boundaries(streams)
    enabled = _sequence(streams, "a", mask).sort().values
    steps = torch.searchsorted(enabled, bounds)  # how many lie strictly below
    ones = _sequence(streams, "b", mask)[:, None] < bounds
    counts = torch.zeros(streams.length + 1, len(bounds), dtype=torch.int16)
    torch.cumsum(ones, 0, dtype=torch.int16, out=counts[1:])
    return counts[steps]


def _sequence(streams: Streams, operand: str, mask: int) -> Tensor:
    x = torch.tensor(sobol(streams.sc_prec, operand)[: streams.length]) ^ mask
    size = 2**streams.sc_prec
    return x if streams.levels == size else x * streams.levels // size


# Quantisation.


class Codes(NamedTuple):
    """An operand as whole numbers; ``x ~ (codes - zero_points) * scales``.

    ``scales`` are float32 (B, rows), or float64 () for "per_tensor"; ``zero_points`` likewise, whole numbers,
    or None for bipolar.
    """

    codes: Tensor  # (B, rows, D) int16
    scales: Tensor
    zero_points: Tensor | None


def quantize_operand(x: Tensor, options: Stochastic, *, group: int = 1, chunked: bool = False) -> Codes:
    """Quantise one operand, or one chunk of it.

    Args:
        x: (B, rows, D) float32, finite and not empty.
        options: the granularity, the mode and the number of codes.
        group: rows that share a scale; for "per_row" without chunks.
        chunked: whether x is one of several chunks, which are multiplied by the inverse scale.

    Raises:
        BadInput: the range of x does not fit float32.
    """
    if options.granularity == "per_tensor":
        return _quantize_tensor(x, options)
    if chunked:
        group = 1
    elif options.granularity == "per_head":
        group = x.shape[1]
    Q = torch.tensor(float(options.max_code), device=x.device)  # a tensor: `/ number` multiplies on a GPU
    high, low = _grouped(x.amax(-1), group), -_grouped(-x.amin(-1), group)
    smallest = torch.tensor(_SMALLEST_RANGE, dtype=torch.float32, device=x.device)
    if options.bipolar:
        scales = torch.maximum(torch.maximum(high, -low), smallest) / Q
        by_inverse = chunked or options.granularity == "per_head"
        scaled = x * (1.0 / scales)[..., None] if by_inverse else x / scales[..., None]
        codes = scaled.round_().clamp_(-options.max_code, options.max_code)
        return Codes(codes.to(torch.int16), scales, None)
    scales = torch.maximum(high - low, smallest) / Q
    if not scales.isfinite().all():
        raise BadInput("An operand's largest minus smallest value exceeds float32; scale it down first.")
    zero_points = (-low / scales).round_().clamp_(0, options.max_code)
    codes = (x / scales[..., None]).add_(zero_points[..., None]).round_().clamp_(0, options.max_code)
    return Codes(codes.to(torch.int16), scales, zero_points)


def _grouped(rows: Tensor, group: int) -> Tensor:
    """The largest of each ``group`` of rows, repeated for its rows: (B, N) to (B, N)."""
    B, N = rows.shape
    group = min(group, N)
    if group == 1:
        return rows
    padded = torch.nn.functional.pad(rows, (0, -N % group), value=-torch.inf)
    return padded.view(B, -1, group).amax(-1).repeat_interleave(group, dim=1)[:, :N]


def _quantize_tensor(x: Tensor, options: Stochastic) -> Codes:
    """One scale, computed in float64, for all of x."""
    Q = torch.tensor(float(options.max_code), dtype=torch.float64, device=x.device)
    high, low = x.max().double(), x.min().double()
    if options.bipolar:
        scale = torch.maximum(high, -low).clamp_(min=_SMALLEST_RANGE) / Q
        codes = (x * (1.0 / scale).float()).round_().clamp_(-options.max_code, options.max_code)
        return Codes(codes.to(torch.int16), scale, None)
    scale = (high - low).clamp_(min=_SMALLEST_RANGE) / Q
    zero_point = (-low / scale).round_().clamp_(0, options.max_code)
    codes = (x * (1.0 / scale).float()).add_(zero_point.float()).round_().clamp_(0, options.max_code)
    return Codes(codes.to(torch.int16), scale, zero_point)
