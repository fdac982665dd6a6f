"""NF4 and FP4: a table of 16 values, a scale for each block, optionally scales that are themselves quantised.

A block of ``block`` consecutive values (row-major, through the whole tensor, as in bitsandbytes) is divided
by its largest magnitude; each value then takes the nearest entry of the table, and one that lies exactly
between two takes the lower one. Codes, scales and decoded values equal bitsandbytes' on a CPU bit for bit:
tests/formats/test_bitsandbytes.py holds them to it.

With ``double`` the scales are stored in 8 bits (Dettmers et al. 2023, "double quantisation"): their mean is
taken off, then each block of 256 of them is written in an 8-bit dynamic map with a float32 scale of its own.

Not finite: a block with a NaN or an infinity decodes to NaN. With ``double`` the 8-bit scales cannot say NaN,
so all 256 blocks that share a second-level scale do.

Requantising a decoded tensor: the largest value of a block decodes to plus or minus the scale exactly, so NF4
gives the same codes and scales again. FP4 has a zero of either sign, and a value that decoded to zero may
come back as the other one: the same values, not the same bits. With ``double`` the scales go through their
map a second time and may move by half a step of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor

from fewbits.formats.base import Format, Packed, PartSpec, is_whole
from fewbits.formats.bits import pack_bits, packed_size
from fewbits.formats.blocks import SMALLEST_SCALE, ceil_div, check_floating
from fewbits.formats.contract import Coding, Contract
from fewbits.formats.rounding import random_uniform
from fewbits.formats.scale_search import Grid, ScaleSearch, ascending, shrunk
from fewbits.formats.table_cache import keep_tables
from fewbits.formats.tables import lookup_nibbles, round_to_table, table

# Quantiles of the normal distribution (Dettmers et al. 2023), as bitsandbytes prints them.
# The one copy of this table in the library; kernels receive it as an argument.
NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

# Sign, 2 exponent bits, 1 mantissa bit, assigned as in bitsandbytes (not E2M1 of the OCP MX specification).
# Twelfths, because the largest is 12 before it is brought to 1; rounded to float32 as bitsandbytes does.
_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4_VALUES = tuple(
    (torch.tensor([*_FP4_TWELFTHS, *(-v for v in _FP4_TWELFTHS)], dtype=torch.float32) / 12).tolist()
)

_SMALLEST_ABSMAX = 1e-38  # bitsandbytes' guard against dividing by zero
_SCALE_GRID = 65535  # steps of [-1, 1]: bitsandbytes looks 8-bit codes up in a table of 65536 on the CPU
_CHUNK = 1 << 20  # values at a time: temporaries stay small however large the tensor


def dynamic_map(*, signed: bool = True) -> tuple[float, ...]:
    """The 256 values of the 8-bit dynamic map (Dettmers 2015), ascending, exact in float32.

    A value is a power of ten, from 1e-6 to 1, times a linear fraction: decade e (0 to 6) holds the middles of
    2**e equal parts of [0.1, 1], with either sign, or of twice as many parts without one; 0 and 1 are added.
    """
    values = [0.0, 1.0]
    for e in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (e if signed else e + 1) + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2.0
        decade = 10 ** (e - 6)
        values += (decade * middles).tolist() + ((-decade * middles).tolist() if signed else [])
    return tuple(sorted(values))


_DYNAMIC_MAP = dynamic_map()  # a constant, which torch.compile need not trace


def quantize_dynamic(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Write x in the dynamic map, in blocks, as bitsandbytes does on a CPU.

    Args:
        x: (n,) float32.
        block: values that share a scale.

    Returns:
        codes (n,) uint8 and scales (ceil(n / block),) float32.
    """
    n = x.numel()
    blocks = torch.nn.functional.pad(x, (0, -n % block)).view(-1, block)
    absmax = blocks.abs().amax(-1) if n else x.new_empty(0)
    scaled = blocks * (1.0 / absmax)[:, None]
    grid = ((scaled.clamp_(-1, 1) + 1.0) * (0.5 * _SCALE_GRID) + 0.5).nan_to_num_(0.0).floor_()
    # a block of zeros (0 / 0 is NaN) takes code 0, not that of 0.0; its scale is 0 anyway
    return scale_codes(x.device).index_select(0, grid.view(-1)[:n].to(torch.int32)), absmax


@keep_tables(maxsize=16)
def scale_codes(device: torch.device) -> Tensor:
    """The code of each of the 65536 points of [-1, 1] to which scales are rounded first: (65536,) uint8."""
    with torch.inference_mode(False):
        values = table(_DYNAMIC_MAP, torch.device("cpu"))
        point = torch.arange(_SCALE_GRID + 1, dtype=torch.float32) * (2.0 / _SCALE_GRID) - 1.0
        right = torch.bucketize(point, values).clamp_(1, 255)
        nearer = (values[right] - point).abs() < (point - values[right - 1]).abs()
        return torch.where(nearer, right, right - 1).to(torch.uint8).to(device)


@dataclass(frozen=True, kw_only=True)
class Codebook(Format):
    """A block is divided by its largest magnitude, then each value takes the nearest entry of a table.

    Attributes:
        values: the 16 entries; code i stands for the i-th.
        block: values that share a scale, consecutive in row-major order.
        double: the scales are themselves stored in 8 bits.
        scale_block: scales that share a second-level scale.
        scale_values: the 256 entries for 8-bit scales; None is `dynamic_map`.

    Parts: ``codes`` uint8, two a byte; ``scales`` float32, or with ``double`` uint8 and beside it
    ``scale_scales`` (float32, one for ``scale_block`` scales) and ``scale_offset`` (float32, shape (1,)). If
    the last axis is a multiple of ``block``, codes are (..., K / 2) and scales (..., K / block); if not, both
    are one flat axis.
    """

    values: tuple[float, ...]
    block: int = 64
    double: bool = False
    scale_block: int = 256
    scale_values: tuple[float, ...] | None = None

    @property
    def scale_table(self) -> tuple[float, ...]:
        """The 256 entries for 8-bit scales."""
        return self.scale_values or _DYNAMIC_MAP

    def problem(self) -> str | None:
        """See `Format.problem`."""
        if not is_whole(self.block, 1) or not is_whole(self.scale_block, 1):
            return f"block={self.block!r}, scale_block={self.scale_block!r}; both are numbers of values"
        sizes = {16: self.values, 256: self.scale_table}
        for size, entries in sizes.items():
            if len(entries) != size or not all(isinstance(v, int | float) and isfinite(v) for v in entries):
                return f"a table has {len(entries)} entries, and it must have {size} finite numbers"
        return None if isinstance(self.double, bool) else f"double is {self.double!r}, not true or false"

    def promise(self) -> Contract:
        """See `Format.promise`."""
        one_zero = len(set(self.values)) == len(self.values)
        names = {NF4_VALUES: "nf4", FP4_VALUES: "fp4"}
        second: dict[str, Any] = {"scale_block": self.scale_block, "scale_values": self.scale_table}
        half_gap = max(b - a for a, b in pairwise(sorted(self.values))) / 2
        # The largest magnitude of a block is divided to 1 or -1: a table that lacks one of them cuts there.
        cut = max(1 - max(self.values), 1 + min(self.values))
        reaches_both = {-1.0, 1.0} <= set(self.values)
        return Contract(
            largest_error=max(half_gap, cut),
            cuts=cut > half_gap,
            block=(1, self.block),
            coding=Coding(
                kind="table",
                bits=4,
                block=(1, self.block),
                through=True,
                values=self.values,
                **(second if self.double else {}),
            ),
            rounds_plainly=len(self.values) == 16,
            exact_scale=not self.double,
            # FP4 has a zero of either sign, so the codes of zeros may change; double scales move, and so do
            # those of a table in which a block's largest magnitude is not exact.
            again="nothing" if self.double or not reaches_both else "codes" if one_zero else "values",
            names={"bitsandbytes": names[self.values]} if self.values in names else {},
        )

    def layout(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        """The parts named above, for a tensor of ``shape``."""
        n = prod(shape)
        K = shape[-1] if shape else 1
        if shape and K % self.block == 0 and self.block % 2 == 0:
            codes, scales = (*shape[:-1], K // 2), (*shape[:-1], K // self.block)
        else:
            codes, scales = (packed_size(n, 4),), (ceil_div(n, self.block),)
        if not self.double:
            return {"codes": PartSpec(codes, torch.uint8), "scales": PartSpec(scales, torch.float32)}
        second = ceil_div(prod(scales), self.scale_block)
        return {
            "codes": PartSpec(codes, torch.uint8),
            "scales": PartSpec(scales, torch.uint8),
            "scale_scales": PartSpec((second,), torch.float32),
            "scale_offset": PartSpec((1,), torch.float32),
        }

    def quantize(self, x: Tensor, *, seed: int | None = None) -> Packed:
        """Write x in this format; see `Format.quantize`."""
        check_floating(x)
        shape = tuple(x.shape)
        layout = self.layout(shape)
        flat = x.detach().reshape(-1)
        codes = torch.empty(packed_size(flat.numel(), 4), dtype=torch.uint8, device=x.device)
        absmax = torch.empty(ceil_div(flat.numel(), self.block), dtype=torch.float32, device=x.device)
        for start, stop in self._chunks(flat.numel(), x.device):
            part, scale = self._quantize_chunk(flat[start:stop].float(), start, seed)
            codes[start // 2 : start // 2 + part.numel()] = part
            absmax[start // self.block : start // self.block + scale.numel()] = scale
        parts = {"codes": codes, **(self._quantize_scales(absmax) if self.double else {"scales": absmax})}
        return Packed(
            self, shape, x.dtype, {name: parts[name].view(spec.shape) for name, spec in layout.items()}
        )

    def dequantize(self, packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor itself; see `Format.dequantize`."""
        dtype = dtype or packed.dtype
        n = prod(packed.shape)
        codes, scales = packed.codes.view(-1), self.block_scales(packed)
        out = torch.empty(2 * codes.numel(), dtype=dtype, device=codes.device)
        for start, stop in self._chunks(n, codes.device):
            whole = start + 2 * ceil_div(stop - start, 2)  # the last byte may hold one code only
            target = out[start:whole] if dtype == torch.float32 else None
            values = lookup_nibbles(codes[start // 2 : whole // 2], self.values, out=target)[: stop - start]
            _scale_blocks(values, scales[start // self.block :], self.block)
            if target is None:
                out[start:stop] = values
        return out[:n].view(packed.shape)

    def block_scales(self, packed: Packed) -> Tensor:
        """The scale of every block as float32, flat: (blocks,)."""
        if not self.double:
            return packed.scales.view(-1)
        codes, second = packed.scales.view(-1), packed.parts["scale_scales"]
        scales = table(self.scale_table, codes.device).index_select(0, codes.to(torch.int32))
        return _scale_blocks(scales, second, self.scale_block).add_(packed.parts["scale_offset"])

    def with_plain_scales(self, packed: Packed) -> Packed | None:
        """See `Format.with_plain_scales`: a double-quantised weight with the scales that it decodes to."""
        if not self.double:
            return None
        plain = replace(self, name=self.name.removesuffix("_dq"), double=False)
        shape = plain.layout(tuple(packed.shape))["scales"].shape
        parts = {"codes": packed.codes, "scales": self.block_scales(packed).view(shape)}
        return Packed(plain, packed.shape, packed.dtype, parts)

    def scale_search(self, weight: Tensor) -> ScaleSearch | None:
        """See `Format.scale_search`."""
        return None if self.double else _Search(*ascending(self.values, weight.device))

    def _chunks(self, n: int, device: torch.device) -> Iterator[tuple[int, int]]:
        values = _CHUNK if device.type == "cpu" else 16 * _CHUNK
        step = max(values // (2 * self.block), 1) * 2 * self.block  # whole blocks and whole bytes
        for start in range(0, n, step):
            yield start, min(start + step, n)

    def _quantize_chunk(self, x: Tensor, start: int, seed: int | None) -> tuple[Tensor, Tensor]:
        """Packed codes and scales of (n,) float32 that begins at position ``start``."""
        n, block = x.numel(), self.block
        full = n - n % block
        head, tail = x[:full].view(-1, block), x[full:]
        absmax = _finite(head.abs().amax(-1) if full else x.new_empty(0))
        scaled = (head * (1.0 / absmax.clamp(min=_SMALLEST_ABSMAX))[:, None]).view(-1)
        if tail.numel():
            last = _finite(tail.abs().amax().clamp(min=_SMALLEST_ABSMAX))
            absmax = torch.cat([absmax, last[None]])
            scaled = torch.cat([scaled, tail / last])  # divided, as in bitsandbytes: its last bit may differ
        if n % 2:
            scaled = torch.nn.functional.pad(scaled, (0, 1))
        u = None if seed is None else random_uniform((scaled.numel(),), seed, x.device, offset=start)
        return pack_bits(self._nearest(scaled.clamp_(-1, 1), u), 4), absmax

    def _nearest(self, scaled: Tensor, uniform: Tensor | None) -> Tensor:
        order = tuple(sorted(range(16), key=lambda i: self.values[i]))
        ascending = tuple(self.values[i] for i in order)
        index = round_to_table(scaled, ascending, uniform)
        if order != tuple(range(16)):
            index = table(tuple(map(float, order)), scaled.device).to(torch.uint8)[index.long()]
        return index

    def _quantize_scales(self, absmax: Tensor) -> dict[str, Tensor]:
        finite = absmax.isfinite()
        offset = torch.where(finite, absmax, 0.0).mean() if absmax.numel() else absmax.new_zeros(())
        codes, second = quantize_dynamic(absmax - offset, self.scale_block)
        return {"scales": codes, "scale_scales": second, "scale_offset": offset}


class _Search(ScaleSearch):
    """One scale a block, and no other level."""

    continuous = True

    def candidates(self, block: Tensor) -> Iterator[Grid]:
        """See `ScaleSearch.candidates`."""
        yield from shrunk(block, self.values, self.codes, SMALLEST_SCALE)

    def parts(self, codes: Tensor, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """See `ScaleSearch.parts`."""
        return {"codes": pack_bits(codes, 4), "scales": torch.cat([grid.stored for grid in grids], 1)}


def _scale_blocks(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiply each block of (n,) values by its scale, in place; the last block may be short."""
    full = values.numel() // block
    values[: full * block].view(-1, block).mul_(scales[:full, None])
    if full * block < values.numel():
        values[full * block :].mul_(scales[full])
    return values


def _finite(absmax: Tensor) -> Tensor:
    return absmax.masked_fill(absmax.isinf(), torch.nan)


NF4 = Codebook(name="nf4", values=NF4_VALUES)
NF4_DQ = Codebook(name="nf4_dq", values=NF4_VALUES, double=True)
FP4 = Codebook(name="fp4", values=FP4_VALUES)
FP4_DQ = Codebook(name="fp4_dq", values=FP4_VALUES, double=True)

__all__ = ["FP4", "FP4_DQ", "FP4_VALUES", "NF4", "NF4_DQ", "NF4_VALUES", "Codebook"]
