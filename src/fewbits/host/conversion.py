"""What a converted model carries along: which recipe it was given, and what takes it out again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fewbits.host.receipt import Receipt
from fewbits.recipes import Recipe

_STATE = "_fewbits_conversion"


@dataclass
class Conversion:
    """What a converted model carries along: its receipt, and what `restore` needs."""

    recipe: Recipe
    receipt: Receipt
    originals: dict[str, nn.Module] = field(default_factory=dict)


def conversion_of(model: Any) -> Conversion | None:
    """What `fewbits.convert` left on this model, through PEFT's wrappers too; None if it is not converted."""
    state = getattr(model, _STATE, None)
    return state if isinstance(state, Conversion) else None


def remember(model: Any, conversion: Conversion) -> None:
    """Leave ``conversion`` on ``model``."""
    setattr(model, _STATE, conversion)


def forget(model: Any) -> None:
    """Take `remember`'s record off ``model``."""
    delattr(model, _STATE)
