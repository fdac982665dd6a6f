"""What a converted model carries along: which recipe it was given, and what takes it out again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fewbits.host.receipt import Receipt
from fewbits.host.record import part_of
from fewbits.recipes import Recipe


@dataclass
class Conversion:
    """What a converted model carries along: its receipt, and what `restore` needs."""

    recipe: Recipe
    receipt: Receipt
    originals: dict[str, nn.Module] = field(default_factory=dict)
    untied_head: str | None = None  # of a head that shared the embedding's weight until it was packed
    packed_rows: Any = None  # the handle of `fewbits.host.packed_rows.keep_rows_apart`


def conversion_of(model: nn.Module) -> Conversion | None:
    """What `fewbits.convert` left on this model, through every wrapper; None if it is not converted."""
    return part_of(model, Conversion)
