"""Which stochastic linears of a Hugging Face model have one input: they may be multiplied as one.

For decoding; see `fewbits.nn.stochastic.group` for what that means, and when it applies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.host.receipt import Receipt
from fewbits.host.record import part_of, put_part, take_part
from fewbits.host.spec import find, layer_names, spec_for
from fewbits.nn.stochastic.group import StochasticGroup, obstacle
from fewbits.nn.stochastic.linear import StochasticLinear

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class SharedInputs:
    """What `share_inputs` leaves on a model."""

    receipt: Receipt


def share_inputs(model: nn.Module) -> Receipt:
    """Let q, k and v, and gate and up, be multiplied as one where few rows pass; in place.

    The model computes the same bits. A layer takes part if its linears are stochastic, with one stream length
    and the same smoothing.

    Returns:
        The receipt: how many groups were made, and why others are none; `fewbits.restore` undoes it.
    """
    spec = spec_for(model)
    num_groups, left = 0, dict[str, int]()
    for layer in layer_names(model, spec):
        for paths in (paths for paths in spec.products if len(paths) > 1):
            modules = [find(model, f"{layer}.{path}") for path in paths]
            linears = [module for module in modules if isinstance(module, StochasticLinear)]
            if len(linears) != len(paths) or any(linear.group is not None for linear in linears):
                continue
            why = obstacle(linears)
            if why:
                left[why] = left.get(why, 0) + 1
            else:
                StochasticGroup(linears)
                num_groups += 1
    said = [f"{num_groups} groups of linears share their input where few rows pass"]
    receipt = Receipt("", notes=said)
    receipt.notes.extend(f"{count} groups do not: {why}" for why, count in left.items())
    if num_groups or part_of(model, SharedInputs) is None:  # a second call finds nothing left to do
        put_part(model, SharedInputs(receipt))
    return receipt


def unshare_inputs(model: nn.Module) -> Receipt:
    """Undo `share_inputs` alone: each linear multiplies for itself again."""
    for module in model.modules():
        if isinstance(module, StochasticLinear) and module.group is not None:
            module.group.dissolve()
    take_part(model, SharedInputs)
    return Receipt("", notes=["linears: each multiplies its input for itself again"])
