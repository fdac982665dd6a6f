"""GGUF's block types, byte for byte as they lie in a file: what llama.cpp reads, and what it wrote.

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, TQ1_0, TQ2_0 and MXFP4 are rounded as the ``gguf`` package rounds them; Q2_K to
Q6_K, IQ4_NL and IQ4_XS by our own search (`fewbits.formats.k_quants`). Decoding is that package's arithmetic,
in float32. A row of K values takes whole blocks; the last one is filled up with zeros.

Scales are float16, and hold no more: a block with a NaN, an infinity or a magnitude above 65504 decodes to
NaN, and what lies below float16's range decodes to zeros. MXFP4 has powers of two, and those limits do not
apply but to what is not finite.

Requantising a decoded tensor gives the same codes for the types that are rounded plainly, but where the
float16 of a scale is subnormal, and for Q4_1 and Q5_1 in whole blocks only (the zeros that fill up a short
one count in its range). The searched types come back with an error far below their first one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fewbits.formats.base import Family, Format, Packed, PartSpec
from fewbits.formats.blocks import ceil_div, packed_nothing
from fewbits.formats.contract import Contract
from fewbits.formats.gguf_descriptions import DESCRIPTIONS
from fewbits.formats.gguf_layouts import LAYOUTS
from fewbits.formats.gguf_search import GGUFSearch
from fewbits.formats.k_quants import IQ4_VALUES, SEARCHED, Fields, SubBlocks, search
from fewbits.formats.minifloat import E2M1, exponential
from fewbits.formats.rounding import first_of_largest, random_uniform, round_to_integer
from fewbits.formats.scale_search import ScaleSearch
from fewbits.formats.tables import round_to_table, table

_CHUNK = 1 << 20  # values at a time: temporaries stay small however large the tensor
_LARGEST = 65504.0
# Of a rounded value, as a share of its block's largest magnitude. The types in the second line are searched
# for: they may cut a value where that serves the others of its block, which doubles the usual share.
_LARGEST_ERROR = {
    "Q4_0": 1 / 8, "Q5_0": 1 / 16, "Q4_1": 1 / 15, "Q5_1": 1 / 31, "Q8_0": 1 / 254, "MXFP4": 1 / 4,
    "Q2_K": 2 / 3, "Q3_K": 1 / 4, "Q4_K": 2 / 15, "Q5_K": 2 / 31, "Q6_K": 1 / 32,
}  # fmt: skip
# Types that are rounded plainly, and searched under an importance matrix.
_BY_IMPORTANCE = {"Q4_0": SubBlocks(4, 32, 0, False), "Q5_0": SubBlocks(5, 32, 0, False)}


@dataclass(frozen=True, kw_only=True)
class GGUFBlocks(Format):
    """One of GGUF's block types.

    Attributes:
        kind: its name in ``gguf.GGMLQuantizationType``, such as "Q4_K".

    Parts: ``codes`` (..., blocks of a row * bytes of a block) uint8, scales and all.
    """

    kind: str

    def problem(self) -> str | None:
        """See `Format.problem`."""
        is_listed = self.kind in LAYOUTS
        return None if is_listed else f"kind is {self.kind!r}, and it is one of {', '.join(LAYOUTS)}"

    def promise(self) -> Contract:
        """See `Format.promise`; the float16 of scale and minimum adds 2**-10 to every error."""
        usual = _LARGEST_ERROR.get(self.kind, 1 / 5 if self.kind.startswith("IQ4") else 1 / 2)
        affine = self.kind in ("Q4_1", "Q5_1")
        return Contract(
            largest_error=usual + 2.0**-10,
            block=self.block,
            description=DESCRIPTIONS[self.kind],
            cuts=True,
            magnitudes=(1e-30, 1e37) if self.kind == "MXFP4" else (1e-2, 1e3),
            again="near" if self.kind in SEARCHED else "whole" if affine else "codes",
            names={"gguf": self.kind},
        )

    @property
    def block(self) -> tuple[int, int]:
        """(1, values of a block)."""
        return 1, LAYOUTS[self.kind].size

    def layout(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        """The part named above, for a tensor of ``shape``."""
        *lead, K = shape or (1,)
        sizes = LAYOUTS[self.kind]
        return {"codes": PartSpec((*lead, ceil_div(K, sizes.size) * sizes.nbytes), torch.uint8)}

    def quantize(self, x: Tensor, *, seed: int | None = None) -> Packed:
        """Write x in this format; see `Format.quantize`."""
        return self.quantize_for(x, None, seed=seed)

    def quantize_for(self, x: Tensor, importance: Tensor | None, *, seed: int | None = None) -> Packed:
        """See `Format.quantize_for`; Q4_0 and Q5_0, which are rounded plainly, are then searched for."""
        nothing = packed_nothing(self, x)
        if nothing is not None:
            return nothing
        shape, size = tuple(x.shape), LAYOUTS[self.kind].size
        layout = self.layout(shape)
        blocks = _to_blocks(x.detach().reshape(shape or (1,)), size)
        uniform = None
        if seed is not None:
            uniform = _to_blocks(random_uniform(shape or (1,), seed, x.device), size).split(_CHUNK // size)
        counts = None if importance is None else _to_blocks(importance.to(x.device).float(), size)
        step = _CHUNK // size
        written = []
        for number, piece in enumerate(blocks.split(step)):
            heavy = None
            if counts is not None:
                places = torch.arange(number * step, number * step + len(piece), device=x.device)
                heavy = counts[places % len(counts)]
            written.append(self._write(piece.float(), None if uniform is None else uniform[number], heavy))
        return Packed(self, shape, x.dtype, {"codes": torch.cat(written).view(layout["codes"].shape)})

    def dequantize(self, packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor itself; see `Format.dequantize`."""
        dtype, codes, sizes = dtype or packed.dtype, packed.codes, LAYOUTS[self.kind]
        whole = packed.shape or (1,)
        if codes.numel() == 0:
            return torch.empty(packed.shape, dtype=dtype, device=codes.device)
        raw = codes.reshape(-1, sizes.nbytes)
        out = torch.empty(raw.shape[0], sizes.size, dtype=dtype, device=codes.device)
        step = _CHUNK // sizes.size
        for start in range(0, raw.shape[0], step):
            values = sizes.unpack(raw[start : start + step]).values()
            out[start : start + step] = values.reshape(-1, sizes.size)
        rows = out.view(prod(whole[:-1]), -1)[:, : whole[-1]]
        return rows.reshape(packed.shape).contiguous()

    def scale_search(self, weight: Tensor) -> ScaleSearch | None:
        """See `Format.scale_search`."""
        low, high = _RANGES.get(self.kind, (0, -1))
        numbers = _TABLES.get(self.kind) or tuple(float(q) for q in range(low, high + 1))
        sizes = SEARCHED.get(self.kind, _BY_IMPORTANCE.get(self.kind))
        return GGUFSearch(self.kind, numbers, _PLAIN.get(self.kind), sizes, weight.device)

    def _write(self, blocks: Tensor, uniform: Tensor | None, importance: Tensor | None) -> Tensor:
        """(B, size) float32, and how much each value counts, to (B, bytes of a block) uint8."""
        sizes = LAYOUTS[self.kind]
        absmax = blocks.abs().amax(-1)
        bad = ~absmax.isfinite() if self.kind == "MXFP4" else ~(absmax <= _LARGEST)
        x = blocks.masked_fill(bad[:, None], 0.0).view(-1, sizes.size // sizes.sub, sizes.sub)
        searched = SEARCHED.get(self.kind)
        if importance is not None:
            searched, importance = _BY_IMPORTANCE.get(self.kind, searched), importance.view(x.shape)
        fields = _PLAIN[self.kind](x) if searched is None else search(x, searched, importance)
        if uniform is not None:
            fields.d, fields.dmin = _stored(fields.d, self.kind), _stored(fields.dmin, self.kind)
            _round_stochastic(x, fields, self.kind, uniform.view(x.shape))
        fields.d = fields.d.masked_fill(bad[:, None, None], torch.nan)
        return sizes.pack(fields)


def _to_blocks(x: Tensor, size: int) -> Tensor:
    """(..., K) to (blocks, size), each row filled up with zeros."""
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % size)).reshape(-1, size)


def _stored(scale: Tensor, kind: str) -> Tensor:
    """A scale as the file holds it."""
    return scale if kind == "MXFP4" else scale.half().float()


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0.0, 1 / torch.where(d == 0, 1.0, d))


def _fields(d: Tensor, q: Tensor, low: Tensor | None = None) -> Fields:
    one, zero = torch.ones_like(d), torch.zeros_like(d)
    return Fields(d, one, q, zero, zero) if low is None else Fields(d, one, q, -low, one)


def _signed(x: Tensor, half: int) -> Fields:
    """The value that lies farthest out becomes -half; halves are rounded up."""
    farthest = x.gather(-1, first_of_largest(x.abs()))
    d = farthest / -half
    return _fields(d, (x * _inverse(d) + (half + 0.5)).trunc_().clamp_(0, 2 * half - 1) - half)


def _affine(x: Tensor, most: int) -> Fields:
    low = x.amin(-1, keepdim=True)
    d = (x.amax(-1, keepdim=True) - low) / x.new_full((), most)
    return _fields(d, ((x - low) * _inverse(d) + 0.5).trunc_().clamp_(0, most), low)


def _round_away(x: Tensor) -> Tensor:
    """To nearest, halves away from zero."""
    a = x.abs()
    whole = a.floor()
    return x.sign() * (whole + (2 * (a - whole)).floor_())


def _absmax(x: Tensor, most: int) -> Fields:
    d = x.abs().amax(-1, keepdim=True) / x.new_full((), most)
    return _fields(d, _round_away(x * _inverse(d)))


def _mxfp4(x: Tensor) -> Fields:
    """A power of two, and the nearest element; of two equally near ones the smaller in magnitude."""
    exponent = ((x.abs().amax(-1, keepdim=True).view(torch.int32) >> 23) - 127 - 2).clamp_(min=-127)
    d = exponential(exponent.float())
    values = table(E2M1.values[:8], x.device)
    index = torch.bucketize((x / d).abs(), (values[:-1] + values[1:]) / 2)
    return _fields(d, values[index] * x.sign())


_PLAIN: dict[str, Callable[[Tensor], Fields]] = {
    "Q4_0": lambda x: _signed(x, 8),
    "Q4_1": lambda x: _affine(x, 15),
    "Q5_0": lambda x: _signed(x, 16),
    "Q5_1": lambda x: _affine(x, 31),
    "Q8_0": lambda x: _absmax(x, 127),
    "TQ1_0": lambda x: _absmax(x, 1),
    "TQ2_0": lambda x: _absmax(x, 1),
    "MXFP4": _mxfp4,
}
_RANGES = {
    "Q4_0": (-8, 7), "Q4_1": (0, 15), "Q5_0": (-16, 15), "Q5_1": (0, 31), "Q8_0": (-127, 127),
    "TQ1_0": (-1, 1), "TQ2_0": (-1, 1),
    "Q2_K": (0, 3), "Q3_K": (-4, 3), "Q4_K": (0, 15), "Q5_K": (0, 31), "Q6_K": (-32, 31),
}  # fmt: skip
_TABLES = {
    "IQ4_NL": IQ4_VALUES,
    "IQ4_XS": IQ4_VALUES,
    "MXFP4": tuple(sorted({v + 0.0 for v in E2M1.values})),
}


def _round_stochastic(x: Tensor, fields: Fields, kind: str, uniform: Tensor) -> None:
    """Replace the codes by one of the two neighbours of each value, under the same scales."""
    exact = (x + fields.dmin * fields.m) * _inverse(fields.d * fields.s)
    if kind not in _TABLES:
        low, high = _RANGES[kind]
        fields.q = round_to_integer(exact, uniform).clamp_(low, high)
        return
    codes = round_to_table(exact, _TABLES[kind], uniform)
    fields.q = table(_TABLES[kind], x.device)[codes.long()]


GGUF_TYPES = Family(
    (GGUFBlocks(name=f"gguf_{kind.lower()}", kind=kind) for kind in LAYOUTS),
    typical=[f"gguf_{kind}" for kind in ("q4_0", "q4_1", "q8_0", "tq1_0", "mxfp4")],
)

__all__ = ["GGUF_TYPES", "GGUFBlocks"]
