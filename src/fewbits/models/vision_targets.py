"""Which linears of a class that sees get adapters: the decoder's, all or of one kind, and the towers'."""

from __future__ import annotations

from torch import nn

from fewbits.errors import Unsupported
from fewbits.host.spec import spec_for
from fewbits.models.adapter_files import linears_of


def language_names(model: nn.Module, *, attention: bool, mlp: bool) -> list[str]:
    """Full names of the decoder's linears that are asked for."""
    spec = spec_for(model)
    if not (attention and mlp) and (spec.attention is None or spec.mlp is None):
        raise Unsupported(
            f"{spec.without_spec}, so which of its linears are attention's is not known; name them in "
            "target_modules."
        )
    wanted = set(spec.linears)
    if spec.attention is not None and not attention:
        wanted -= set(spec.attention.linears)
    if spec.mlp is not None and not mlp:
        wanted -= set(spec.mlp.linears)
    inside = f"{spec.layers}."
    found = [name for name in linears_of(model) if name.startswith(inside)]
    return [name for name in found if name.removeprefix(inside).partition(".")[2] in wanted]


def vision_names(model: nn.Module) -> list[str]:
    """Full names of the linears in the towers."""
    towers = tuple(f"{path}." for path in spec_for(model).towers)
    return [name for name in linears_of(model) if name.startswith(towers)] if towers else []


__all__ = ["language_names", "vision_names"]
