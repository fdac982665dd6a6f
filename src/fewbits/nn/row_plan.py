"""How the rows of a product run: stream lengths by a row's place among those of its call, or whole numbers.

    m_r = max abs of row r (before any smoothing)      n_r = (m_r - min m) / (max m - min m)      in float32

over the rows of one call; the group of a row is the number of thresholds above n_r. Where all m are equal to
within 1e-8, every row is in group 0. This is how scmp_llm sends rows to stream lengths: a row's length
depends on the other rows of its call, padding and other sequences of a batch included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.stochastic import Stochastic
from fewbits.formats.table_cache import keep_tables

_ALL_EQUAL = 1e-8


@dataclass(frozen=True)
class RowPlan:
    """How the rows of one product run.

    Attributes:
        lengths: of the streams, by group of rows; empty: the options'.
        thresholds: between the groups, descending, of the normalised magnitude; one fewer than lengths.
        integer: whether codes are multiplied as whole numbers, without streams.
    """

    lengths: tuple[int, ...] = ()
    thresholds: tuple[float, ...] = ()
    integer: bool = False

    def __post_init__(self) -> None:
        if len(self.thresholds) != max(len(self.lengths) - 1, 0):
            raise BadInput(
                f"{len(self.lengths)} groups of rows need {max(len(self.lengths) - 1, 0)} thresholds, not "
                f"{len(self.thresholds)}; give one between each two groups."
            )

    def groups(self, x: Tensor) -> Tensor | None:
        """(..., rows) int64 for operands x (..., rows, K), all one call; None where there is one group."""
        if not self.thresholds:
            return None
        together = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        return call_groups(together, _limits(self.thresholds, x.device)).view(x.shape[:-1])

    def steps(self, x: Tensor, options: Stochastic) -> int:
        """The stream lengths of all rows of x (..., rows, K), added up; 0 for whole numbers."""
        rows = x.shape[:-1].numel()
        if self.integer:
            return 0
        groups = self.groups(x)
        if groups is None:
            return rows * (self.lengths[0] if self.lengths else options.streams.length)
        return int(torch.tensor(self.lengths, device=x.device)[groups].sum())


@keep_tables()
def _limits(thresholds: tuple[float, ...], device: torch.device) -> Tensor:
    """Made once: nothing is copied from the host in a step that a CUDA graph records."""
    return torch.tensor(thresholds, dtype=torch.float32, device=device)


STREAMS = RowPlan()  # every row at the options' length


def call_groups(x: Tensor, thresholds: Tensor) -> Tensor:
    """The group of each row among those of its call.

    Args:
        x: (..., rows, K); every leading index is a call of its own.
        thresholds: (G - 1,) float32, descending.

    Returns:
        (..., rows) int64.
    """
    if not x.shape[-2]:
        return torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    least, most = torch.aminmax(x.detach(), dim=-1)  # reads x once, where abs would write it again
    largest = torch.maximum(most, -least).float()
    low = largest.amin(-1, keepdim=True)
    spread = largest.amax(-1, keepdim=True) - low
    share = (largest - low) / spread
    group = (thresholds > share[..., None]).sum(-1)
    return group.masked_fill(spread < _ALL_EQUAL, 0)
