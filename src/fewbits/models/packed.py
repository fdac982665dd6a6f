"""Packed layers in a model: put there, looked over, described as a recipe; what a device can run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fewbits import device
from fewbits.errors import BadCheckpoint, SpecMismatch
from fewbits.formats.base import Format
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import Recipe, Rule

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_device(recipe: Recipe, place: Any) -> None:
    """Refuse a recipe that the device cannot run.

    Args:
        recipe: the recipe.
        place: a device, as device maps name them; a name that means "spread over GPUs", or None, passes.

    Raises:
        Unsupported: there is no such device, or it lacks what the recipe's formats need.
    """
    if place is None or place in ("auto", "balanced", "balanced_low_0", "sequential"):
        return
    chosen = device.pick(f"cuda:{place}" if isinstance(place, int) else place)
    facts = device.describe(chosen)
    for format in _operand_formats(recipe):
        if any(part.dtype in _FLOAT8 for part in format.layout((256, 256)).values()):
            facts.require("float8", f"the recipe {recipe.name!r}")


def _operand_formats(recipe: Recipe) -> list[Format]:
    """Formats in which the recipe multiplies; weights only stored in a format run anywhere."""
    rules = (recipe.linear, *(rule for _, rule in recipe.overrides))
    found = [f for rule in rules for f in (rule.weight_operand, rule.activation, rule.gradient)]
    return [f for f in found if f is not None]


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Make ``layer`` the submodule with this full name."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)


def place_empty(model: nn.Module, rules: Mapping[str, Rule]) -> None:
    """Replace linears by empty packed layers on the meta device, to be filled from a checkpoint."""
    for name, rule in rules.items():
        try:
            linear: Any = model.get_submodule(name)
        except AttributeError as error:
            raise SpecMismatch(
                f"the checkpoint holds a packed {name}, which the model that config.json describes does not "
                "have; restore the config.json that was saved with it."
            ) from error
        assert rule.weight is not None
        meta = nn.Linear(
            linear.in_features, linear.out_features, bias=False, dtype=linear.weight.dtype, device="meta"
        )
        meta.bias = linear.bias
        put(model, name, QuantizedLinear.from_linear(meta, rule))


def check_parts(model: nn.Module, where: str) -> None:
    """Freeze the packed parts, after checking them against the layout (older transformers set any shape)."""
    for name, module in model.named_modules():
        if not isinstance(module, QuantizedLinear):
            continue
        for part, spec in module.format.layout((module.out_features, module.in_features)).items():
            parameter = getattr(module, f"weight_{part}")
            if tuple(parameter.shape) != spec.shape or parameter.dtype != spec.dtype:
                raise BadCheckpoint(
                    f"{where}: {name}.weight_{part} is {tuple(parameter.shape)} {parameter.dtype}, its "
                    f"format needs {spec.shape} {spec.dtype}; the weights and config.json belong to "
                    "different models."
                )
            parameter.requires_grad_(False)


def recipe_of(model: nn.Module, *, name: str) -> Recipe:
    """The recipe that describes how a model is packed: the commonest rule, exceptions, what was skipped."""
    rules = {n: _rule_of(m) for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    if not rules:
        return Recipe(name=name)
    found = list(rules.values())
    common = max(found, key=found.count)
    plain = tuple(n for n, m in model.named_modules() if isinstance(m, nn.Linear))
    return Recipe(
        name=name, linear=common, overrides=tuple((n, r) for n, r in rules.items() if r != common), skip=plain
    )


def _rule_of(layer: QuantizedLinear) -> Rule:
    operands = layer.operands
    return Rule(
        weight=layer.format,
        weight_operand=operands.weight_operand,
        activation=operands.activation,
        gradient=operands.gradient,
    )
