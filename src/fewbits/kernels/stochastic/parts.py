"""What CUDA paths of stochastic products share: levels as their sources read them, and products in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from fewbits.kernels.launch.jit import cdiv


class Launch(Protocol):
    """Computes y of contiguous qa, sa, qb and sb on a GPU, on its current stream.

    qa is (B, N, D), sa (B, N, C), qb (B or 1, M, D), sb (B or 1, M, C), y (B, N, M); ``level_index`` is None
    or (B or 1, N or 1, C or 1).
    """

    def __call__(
        self, operands: Sequence[Tensor], tables: Any, level_index: Any, chunk: int, y: Tensor
    ) -> None:
        """Write y (B, N, M)."""


def strides_of(level_index: Tensor | None) -> list[int]:
    """Strides of an index (B or 1, N or 1, C or 1), 0 where it broadcasts; all 0 for none."""
    if level_index is None:
        return [0, 0, 0]
    return [s if n > 1 else 0 for n, s in zip(level_index.shape, level_index.stride(), strict=True)]


def index_of(level_index: Tensor | None, batch: slice, rows: slice) -> Tensor | None:
    """The index of some of a's rows.

    ``level_index`` is (B or 1, N or 1, C or 1), and so is what is left of it.
    """
    if level_index is None:
        return None
    whole = slice(None)
    return level_index[
        batch if level_index.shape[0] > 1 else whole, rows if level_index.shape[1] > 1 else whole
    ]


def parts_of(batch: int, rows: int, of_group: int, groups: int) -> list[tuple[slice, slice]]:
    """Batches and rows of which no more than ``groups`` times ``of_group`` rows are under way at once.

    Whole entries of the batch where as many fit, else rows of one entry.
    """
    of_entry = cdiv(rows, of_group)
    if groups >= of_entry:
        entries = groups // of_entry
        return [(slice(b, min(b + entries, batch)), slice(None)) for b in range(0, batch, entries)]
    most = groups * of_group
    return [
        (slice(b, b + 1), slice(n, min(n + most, rows))) for b in range(batch) for n in range(0, rows, most)
    ]
