"""What spreading a model's parameters over ranks leaves on its record, and what is asked of it afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.host.receipt import Receipt
from fewbits.host.record import part_of

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Sharding:
    """What `shard` (fewbits/training/ranks/fsdp.py) leaves: its receipt, and if layers stay gathered."""

    receipt: Receipt
    stays_gathered: bool


def stays_gathered(model: nn.Module) -> bool:
    """Whether a rank holds the whole model between a forward and a backward pass."""
    sharding = part_of(model, Sharding)
    return sharding is not None and sharding.stays_gathered
