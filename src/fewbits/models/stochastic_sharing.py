"""Which stochastic linears of a Hugging Face model have one input: they may be multiplied as one.

For decoding; see `fewbits.nn.stochastic_group` for what that means, and when it applies.
"""

from __future__ import annotations

from typing import Any

from fewbits.host.spec import find, layer_names, spec_for
from fewbits.nn.stochastic_group import StochasticGroup, obstacle
from fewbits.nn.stochastic_linear import StochasticLinear

# Linears of a decoder layer that every known family calls with the same tensor, by the ends of their paths.
ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def share_inputs(model: Any) -> list[str]:
    """Let q, k and v, and gate and up, be multiplied as one where few rows pass; in place.

    The model computes the same bits. A layer takes part if its linears are stochastic, with one stream length
    and the same smoothing.

    Returns:
        Sentences for a receipt: how many groups there are, and why others are none.
    """
    spec = spec_for(model)
    num_groups, left = 0, dict[str, int]()
    for layer in layer_names(model, spec):
        for ends in ONE_INPUT:
            paths = [path for end in ends for path in spec.linears if path.endswith(f".{end}")]
            modules = [find(model, f"{layer}.{path}") for path in paths]
            linears = [module for module in modules if isinstance(module, StochasticLinear)]
            if len(linears) != len(ends) or any(linear.group is not None for linear in linears):
                continue
            why = obstacle(linears)
            if why:
                left[why] = left.get(why, 0) + 1
            else:
                StochasticGroup(linears)
                num_groups += 1
    said = [f"{num_groups} groups of linears share their input where few rows pass"]
    return said + [f"{count} groups do not: {why}" for why, count in left.items()]


def unshare_inputs(model: Any) -> None:
    """Undo `share_inputs`."""
    for module in model.modules():
        if isinstance(module, StochasticLinear) and module.group is not None:
            module.group.dissolve()
