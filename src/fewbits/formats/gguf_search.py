"""What GPTQ and its kind need of GGUF's block types: the scales that columns may take, the bytes of a choice.

A type of 32 values has one scale, and one minimum or none. In a super-block of 256 values the float16 scales
d and dmin are found by the search of `fewbits.formats.k_quants` when its first column is reached; each
sub-block's whole numbers s and m are chosen when its own first column is, because by then earlier errors have
moved its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fewbits.formats.gguf_layouts import LAYOUTS
from fewbits.formats.k_quants import Fields, SubBlocks, fit_affine, fit_symmetric, scale_range, search
from fewbits.formats.minifloat import exponential
from fewbits.formats.scale_search import SHRINK, Grid, ScaleSearch
from fewbits.formats.tables import table

_TINY = 1e-30  # stands for a scale of zero, whose codes all mean the same
Plain = Callable[[Tensor], Fields]


class GGUFSearch(ScaleSearch):
    """The search of one type.

    Args:
        kind: its name, such as "Q4_K".
        numbers: what its codes can stand for before scales, ascending.
        plain: its rounding without a search, of (B, S, n); None: it has none.
        sizes: of its search; None: it has none.
        device: of the weight.
    """

    def __init__(
        self,
        kind: str,
        numbers: tuple[float, ...],
        plain: Plain | None,
        sizes: SubBlocks | None,
        device: torch.device,
    ) -> None:
        codes = torch.arange(len(numbers), dtype=torch.uint8, device=device)
        super().__init__(table(numbers, device), codes)
        self.kind, self.layout, self.plain, self.sizes = kind, LAYOUTS[kind], plain, sizes
        self.size = self.layout.sub
        self.first: Fields | None = None
        self.importance = torch.ones(0, dtype=torch.float32)
        self.sub = 0

    def begin(self, start: int, columns: Tensor, importance: Tensor) -> None:
        """See `ScaleSearch.begin`, for (N, columns of a block)."""
        x = columns.reshape(len(columns), -1, self.layout.sub)
        self.importance = importance.reshape(1, -1, self.layout.sub).expand(x.shape)
        self.sub = 0
        self.first = None if self.sizes is None else search(x, self.sizes, self.importance)

    def candidates(self, block: Tensor) -> Iterator[Grid]:
        """See `ScaleSearch.candidates`, for (N, size)."""
        x, sub = block[:, None], self.sub
        self.sub += 1
        if self.layout.size > self.layout.sub:
            yield from self._in_super_block(x, sub)
            return
        if self.plain is not None:
            yield from self._around(self.plain(x))
        if self.first is not None:
            yield self._grid(self.first.d, self.first.s, self.first.dmin, self.first.m)

    def parts(self, codes: Tensor, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """See `ScaleSearch.parts`, for codes (N, K)."""
        (N, K), layout = codes.shape, self.layout
        blocks, subs = N * K // layout.size, layout.size // layout.sub
        stored = torch.stack([grid.stored for grid in grids], 1).view(blocks, subs, 4)
        d, s, dmin, m = stored[..., None].unbind(2)
        q = self.values[codes.int()].view(blocks, subs, layout.sub)
        packed = layout.pack(Fields(d[:, :1], s, q, dmin[:, :1], m))
        return {"codes": packed.view(N, -1)}

    def _in_super_block(self, x: Tensor, sub: int) -> Iterator[Grid]:
        """Whole numbers s and m next to those of the search, and to what fits the values as they now are."""
        assert self.first is not None and self.sizes is not None
        first, kind, weights = self.first, self.sizes, self.importance[:, sub : sub + 1]
        lowest, most = scale_range(kind)
        begun = (first.s[:, sub : sub + 1], first.m[:, sub : sub + 1])
        if kind.affine:
            scale, minimum = fit_affine(x, kind, weights)
            fitted = (_whole(scale, first.d), _whole(minimum, first.dmin))
        else:
            fitted = (_whole(fit_symmetric(x, kind, weights), first.d), begun[1])
        for s, m in (begun, fitted):
            for ds in (0, -1, 1):
                for dm in (0, -1, 1) if kind.affine else (0,):
                    near_s, near_m = (s + ds).clamp(lowest, most), (m + dm).clamp(0, most)
                    yield self._grid(first.d, near_s, first.dmin, near_m)

    def _around(self, plain: Fields) -> Iterator[Grid]:
        """The type's own scale, and smaller ones; of powers of two the neighbours."""
        if self.kind == "MXFP4":
            exponent = torch.frexp(plain.d)[1].float() - 1
            for step in (0, -1, 1):
                d = exponential((exponent + step).clamp(-127, 127))
                yield self._grid(d, plain.s, plain.dmin, plain.m)
            return
        for part in SHRINK:
            d, dmin = ((scale * part).half().float() for scale in (plain.d, plain.dmin))
            yield self._grid(d, plain.s, dmin, plain.m)

    def _grid(self, d: Tensor, s: Tensor, dmin: Tensor, m: Tensor) -> Grid:
        d, s, dmin, m = (t.reshape(-1, 1) for t in (d, s, dmin, m))
        scale = torch.where(d * s == 0, _TINY, d * s)
        return Grid(self.values, self.codes, scale, dmin * m / scale, torch.cat([d, s, dmin, m], 1))


def _whole(scale: Tensor, of: Tensor) -> Tensor:
    """``scale / of`` as the nearest whole number; 0 where ``of`` is."""
    return torch.where(of == 0, 0.0, scale / torch.where(of == 0, 1.0, of)).round()
