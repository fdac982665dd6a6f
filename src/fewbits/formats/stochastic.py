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

Sequences and tables are in `fewbits.formats.streams`, the matmul in `fewbits.kernels.stochastic.matmul`.
Here: the options as one frozen value, which is also the `Format` of prepared operands (bipolar, per row,
codes of at most 8 bits), and the quantiser of every granularity and mode.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.base import Format, Packed, PartSpec
from fewbits.formats.blocks import from_blocks, own_memory, packed_nothing, scale_shape, to_blocks
from fewbits.formats.contract import Contract
from fewbits.formats.rounding import random_uniform, round_to_integer
from fewbits.formats.streams import (
    GATES,
    KEY_BITS,
    SEQUENCES,
    SIGNS,
    Seed,
    arithmetic_problem,
    reversed_bits,
    seed_problem,
)
from fewbits.formats.streams import KEPT_TABLE_BYTES as KEPT_TABLE_BYTES
from fewbits.formats.streams import Streams as Streams
from fewbits.formats.streams import boundaries as boundaries
from fewbits.formats.streams import product_tables as product_tables
from fewbits.formats.streams import sobol as sobol
from fewbits.formats.streams import table_bytes as table_bytes

GRANULARITIES = ("per_tensor", "per_row", "per_head")
MODES = ("bipolar", "unipolar")
SCRAMBLES = ("bitrev", "counter", "random", "off", "cells")

# The fields that say which arithmetic it is; their defaults are that of scmp_kernels.
ARITHMETIC = (
    "sequence",
    "seed_a",
    "seed_b",
    "planned_len",
    "gate",
    "signs",
    "or_group",
    "flip_rate",
    "flip_seed",
)

_RANDOM_MASK_SEED = 0x5A5A5A5A
_MAX_LEVELS = 2**24  # a boundary is a float32 in the hardware's model
_SMALLEST_RANGE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Stochastic(Format):
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
        scramble: masks of the dimensions: "bitrev", "counter", "random" or "off"; or "cells", with or_group.
        scramble_rescale: whether masks also apply to sequences on a grid other than 2**sc_prec.
        n_masks: dimension d takes the mask of d mod n_masks; None for no such limit.
        sequence: family of the sequences: "sobol", "lfsr", "random", "unary", "halton" or "weyl", see
            `fewbits.formats.streams`, as for all that follow.
        seed_a: what a's sequence starts from (a tuple of direction seeds, a register's state, a number); None
            for the family's default.
        seed_b: the same for b.
        planned_len: early termination: streams are made for so many steps, and stoc_len of them run (all,
            where that is None).
        gate: what multiplies two streams: "enable" (b's advances while a's bit is 1) or "and".
        signs: "magnitude" (the sign beside the stream) or "twos_complement" (in it, with an XNOR).
        or_group: dimensions whose products are OR-ed into one counter; 1: each product is counted.
        flip_rate: share of stream bits that are inverted, from 0 to 1.
        flip_seed: which ones.

    The fields' own defaults are those of scmp_kernels' ``sc_matmul``. The registry's value `STOCHASTIC` is
    the point at which scmp_llm runs a model: halved streams, chunks of 128, 64 masks.

    As a format it holds an operand of a product, quantised by rows and chunks: ``codes`` int8 (..., D) in
    -Q ... Q, a sign and a magnitude, and ``scales`` float32 (..., number of chunks). Stream lengths, grid,
    masks and sequences change nothing in it. A row's chunk with a value that is not finite has the scale NaN.
    """

    name: str = "stochastic"
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
    sequence: str = "sobol"
    seed_a: Seed = None
    seed_b: Seed = None
    planned_len: int | None = None
    gate: str = "enable"
    signs: str = "magnitude"
    or_group: int = 1
    flip_rate: float = 0.0
    flip_seed: int = 0

    def __post_init__(self) -> None:
        for field, choices in (
            ("granularity", GRANULARITIES),
            ("mode", MODES),
            ("scramble", SCRAMBLES),
            ("sequence", SEQUENCES),
            ("gate", GATES),
            ("signs", SIGNS),
        ):
            value = getattr(self, field)
            if value not in choices:
                raise BadInput(f"{field} {value!r} is unknown; choose one of {', '.join(choices)}.")
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
        problem = arithmetic_problem(self.streams, bipolar=self.bipolar)
        if problem is not None:
            raise BadInput(problem)
        super().__post_init__()

    def promise(self) -> Contract:
        """See `Format.promise`."""
        return Contract(
            largest_error=1 / self.max_code / 2,
            block=(1, self.chunk_d),
            least_range=_SMALLEST_RANGE,
            product="stochastic",
        )

    def chunk_size(self, D: int) -> int:
        """Dimensions of a chunk of D: all of them where nothing is cut."""
        return self.chunk_d if 0 < self.chunk_d < D else D

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
            ("planned_len", 1, 2**self.sc_prec),
        ):
            if getattr(self, field) is not None:
                _check_integer(field, getattr(self, field), low, high)
        for field, low in (("chunk_d", 0), ("group_a", 1), ("group_b", 1), ("or_group", 1)):
            _check_integer(field, getattr(self, field), low, None)
        _check_integer("flip_seed", self.flip_seed, 0, 2**32 - 1)
        for field in ("seed_a", "seed_b"):
            seed = getattr(self, field)
            problem = seed_problem(self.sequence, self.sc_prec, seed)
            if problem is not None:
                raise BadInput(f'{field}={seed!r} is refused for the sequence "{self.sequence}": {problem}.')

    @property
    def arithmetic(self) -> dict[str, object]:
        """The fields, with their values, that make the arithmetic another than scmp_kernels'."""
        plain = _plain_arithmetic()
        changed = {name: getattr(self, name) for name in ARITHMETIC if getattr(self, name) != plain[name]}
        return {**changed, "scramble": "cells"} if self.scramble == "cells" else changed

    def without_streams(self, bits: int) -> Stochastic:
        """Options of codes of so many bits, multiplied as whole numbers: all of streams has defaults."""
        plain: dict[str, Any] = {**_plain_arithmetic(), "scramble": "bitrev"}
        return replace(self, sc_prec=bits, stoc_len=None, rng_levels=None, **plain)

    @property
    def longest(self) -> int:
        """The most steps that streams of any length have."""
        return 2**self.sc_prec if self.planned_len is None else self.planned_len

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
    def length(self) -> int:
        """L, the steps of a stream."""
        steps = self.planned_len if self.stoc_len is None else self.stoc_len
        return self._default_length if steps is None else steps

    @property
    def streams(self) -> Streams:
        """What the product tables depend on."""
        return Streams(
            self.sc_prec,
            self.length,
            self._default_length if self.rng_levels is None else self.rng_levels,
            self.max_code,
            self.sequence,
            self.seed_a,
            self.seed_b,
            self.planned_len,
            self.gate,
            self.signs,
            self.or_group,
            self.scramble == "cells",
            self.flip_rate,
            self.flip_seed,
        )

    def with_length(self, length: int) -> Stochastic:
        """The same with another stream length; the grid stays."""
        return replace(self, stoc_len=length, rng_levels=self.streams.levels)

    def chunks(self, D: int) -> list[slice]:
        """The parts of an inner dimension that are quantised and counted together."""
        size = self.chunk_size(D)
        return [slice(start, min(start + size, D)) for start in range(0, D, max(size, 1))]

    def num_chunks(self, D: int) -> int:
        """How many `chunks` there are."""
        size = self.chunk_size(D)
        return -(-D // max(size, 1))

    def masks(self, D: int) -> tuple[int, ...]:
        """The mask of each inner dimension of one chunk; the same for both operands.

        It is a key for the functions of `fewbits.formats.streams`: with faults it has the dimension's number
        too, so that dimensions of one mask have faults of their own.
        """
        return _masks(self, D)

    def _new_masks(self, D: int) -> tuple[int, ...]:
        cells = self.scramble == "cells"
        masks = tuple(d % self.or_group for d in range(D)) if cells else self._xor_masks(D)
        if not self.flip_rate:
            return masks
        period = min(self.n_masks or 2**self.sc_prec, 2**self.sc_prec)
        return tuple(mask | d % period << KEY_BITS for d, mask in enumerate(masks))

    def _xor_masks(self, D: int) -> tuple[int, ...]:
        size, streams = 2**self.sc_prec, self.streams
        scrambled = (
            (streams.planned or streams.length) < size if streams.levels == size else self.scramble_rescale
        )
        if self.scramble == "off" or not scrambled:
            return (0,) * D
        period = D if self.scramble == "random" else size
        if self.n_masks is not None:
            period = min(self.n_masks, size)
        index = [d % period for d in range(D)]
        if self.scramble == "counter":
            return tuple(index)
        if self.scramble == "bitrev":
            return tuple(reversed_bits(i, self.sc_prec) for i in index)
        # On every device the CPU's generator, so that the result is the same everywhere.
        generator = torch.Generator("cpu").manual_seed(_RANDOM_MASK_SEED)
        drawn = torch.randint(0, size, (min(period, D),), generator=generator).tolist()
        return tuple(drawn[i] for i in index)

    # Prepared operands.

    @property
    def prepares(self) -> bool:
        """Whether operands can be prepared, that is quantised once and kept as codes of 8 bits."""
        rows = self.granularity == "per_row" and self.group_a == self.group_b == 1
        return self.bipolar and rows and self.sc_prec <= 8

    def layout(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        """``codes`` int8 and ``scales`` float32, see the class.

        Raises:
            Unsupported: operands of these options cannot be prepared.
        """
        if not self.prepares:
            raise Unsupported(
                f"operands are prepared for bipolar streams, a scale per row and at most 8 bits, not for "
                f'mode "{self.mode}", granularity "{self.granularity}", sc_prec={self.sc_prec} or '
                f"groups of {self.group_a} and {self.group_b} rows; give sc_matmul the tensor itself."
            )
        return {
            "codes": PartSpec(shape or (1,), torch.int8),
            "scales": PartSpec(scale_shape(shape, (1, self.chunk_d)), torch.float32),
        }

    def quantize(self, x: Tensor, *, seed: int | None = None) -> Packed:
        """Prepare an operand: codes and scales as `quantize_operand` gives them; see `Format.quantize`."""
        nothing = packed_nothing(self, x)
        if nothing is not None:
            return nothing
        shape = tuple(x.shape)
        layout = self.layout(shape)
        blocks = to_blocks(x.detach(), (1, self.chunk_d)).float()
        scales = _row_scales(blocks.abs().amax(dim=(1, 3), keepdim=True), self.max_code)
        chunked = 0 < self.chunk_d < (shape or (1,))[-1]
        scaled = blocks * (1.0 / scales) if chunked else blocks / scales
        uniform = (
            None if seed is None else to_blocks(random_uniform(shape, seed, x.device), (1, self.chunk_d))
        )
        codes = round_to_integer(scaled, uniform).clamp_(-self.max_code, self.max_code)
        codes = own_memory(
            from_blocks(codes.nan_to_num_(0.0).to(torch.int8), shape or (1,), (1, self.chunk_d))
        )
        return Packed(
            self, shape, x.dtype, {"codes": codes, "scales": scales.reshape(layout["scales"].shape)}
        )

    def dequantize(self, packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
        """Codes times scales: what the streams approximate; see `Format.dequantize`."""
        blocks = to_blocks(packed.codes, (1, self.chunk_d))
        if packed.codes.numel() == 0:
            return torch.empty(packed.shape, dtype=dtype or packed.dtype, device=packed.codes.device)
        scaled = blocks * packed.scales.view(blocks.shape[0], 1, blocks.shape[2], 1)
        return from_blocks(scaled, packed.shape, (1, self.chunk_d)).to(dtype or packed.dtype)


def _plain_arithmetic() -> dict[str, object]:
    return {field.name: field.default for field in fields(Stochastic) if field.name in ARITHMETIC}


@lru_cache(maxsize=64)
def _masks(options: Stochastic, D: int) -> tuple[int, ...]:
    return options._new_masks(D)


def _row_scales(absmax: Tensor, max_code: int) -> Tensor:
    """Scales of rows with these largest magnitudes; NaN where one is not finite."""
    smallest = torch.tensor(_SMALLEST_RANGE, dtype=torch.float32, device=absmax.device)
    # a tensor: `/ number` multiplies on a GPU
    Q = torch.tensor(float(max_code), device=absmax.device, dtype=torch.float32)
    return (torch.maximum(absmax, smallest) / Q).masked_fill_(~absmax.isfinite(), torch.nan)


def _check_integer(field: str, value: object, low: int, high: int | None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):  # type: ignore[operator]
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise BadInput(f"{field}={value!r} is refused: give a whole number {bounds}.")


def stochastic_options(format: object) -> Stochastic | None:
    """``format`` as the options of a stochastic product; None if its product is another."""
    return format if isinstance(format, Stochastic) else None


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
    # a tensor: `/ number` multiplies on a GPU
    Q = torch.tensor(float(options.max_code), device=x.device, dtype=torch.float32)
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


STOCHASTIC = Stochastic(halve_bipolar_stoc_len=True, chunk_d=128, n_masks=64)

__all__ = ["STOCHASTIC", "Stochastic"]
