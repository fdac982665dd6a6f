"""What modules ask of torch.distributed: a group's size, the largest value over a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def group_size(group: Any) -> int:
    """Ranks in a group; 1 without torch.distributed."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size(group)


def largest_of_group(amax: Tensor, group: Any) -> Tensor:
    """The elementwise largest of ``amax`` over a group's ranks.

    ``amax`` is of the same shape on every rank.
    """
    if group_size(group) > 1:
        amax = amax.clone()
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    return amax
