"""What remembers on a model's record that it was loaded with ``full_finetuning=True``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.host.record import part_of, put_part

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TrainsWhole:
    """On the record of a model all of whose weights are to train: it gets no adapters."""


def train_whole(model: nn.Module) -> None:
    """Let all weights train, and note that this was asked for."""
    model.requires_grad_(True)
    put_part(model, TrainsWhole())


def trains_whole(model: nn.Module) -> bool:
    """Whether `train_whole` was called; a plain load, with gradients everywhere, does not count."""
    return part_of(model, TrainsWhole) is not None
