"""Knowing a module that holds experts as transformers does, whatever its class is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbits.nn.experts import QuantizedExperts

if TYPE_CHECKING:
    from torch import nn

WEIGHTS = (("gate_up_proj", "down_proj"), ("up_proj", "down_proj"))


def all_weights_of(module: nn.Module) -> tuple[str, ...]:
    """`weights_of`, with those that packed experts hold as they were."""
    if not isinstance(module, QuantizedExperts):
        return weights_of(module)
    return next((names for names in WEIGHTS if all(hasattr(module, name) for name in names)), ())


def weights_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the 3-D weights of a module that holds experts as transformers does; none if it is no such."""
    if isinstance(module, QuantizedExperts):
        return tuple(module.shapes)
    if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed"):
        return ()
    own = dict(module.named_parameters(recurse=False))
    return next((names for names in WEIGHTS if all(n in own and own[n].dim() == 3 for n in names)), ())
