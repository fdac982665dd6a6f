"""Experts in a model: where they are, which of them a recipe packs, putting packed ones in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fewbits.decoder.parts import FLOAT8, FLOAT8_SIDES
from fewbits.errors import BadCheckpoint, Unsupported
from fewbits.families.spec import ModelSpec
from fewbits.formats.base import Packed
from fewbits.host.expert_weights import weights_of
from fewbits.host.spec import find, layer_names, spec_for
from fewbits.kernels.product.matmul_packed import PLAIN, Operands
from fewbits.nn.experts import QuantizedExperts, has_room
from fewbits.nn.linear import operands_of
from fewbits.recipes import Recipe, Rule


def why_not_packed(module: nn.Module) -> str | None:
    """Why the experts of this module stay as they are, or None."""
    if getattr(module, "has_post_expert_norm", False):
        return "each of its experts ends in a norm, which packed experts do not compute"
    return None


def expert_modules(model: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, nn.Module]]:
    """Full name and module of the experts of each layer that has some, in order."""
    if spec.experts is None:
        return
    for layer in layer_names(model, spec):
        module = find(model, f"{layer}.{spec.experts.path}")
        base = getattr(module, "get_base_layer", None)
        module = module if base is None else base()
        if module is not None and weights_of(module):
            yield f"{layer}.{spec.experts.path}", module


def expert_rules(model: nn.Module, spec: ModelSpec, recipe: Recipe) -> dict[str, Rule]:
    """The rule of every 3-D weight that the recipe stores packed, by the parameter's full name."""
    if recipe.qat is not None:
        return {}
    rules = {}
    for path, module in expert_modules(model, spec):
        for name in () if why_not_packed(module) else weights_of(module):
            rule = recipe.rule_for(f"{path}.{name}")
            if rule.weight is not None and not hasattr(rule.weight, "streams"):
                rules[f"{path}.{name}"] = rule
    return rules


def packed_place(model: nn.Module, path: str, rules: Mapping[str, Rule]) -> QuantizedExperts:
    """The packed experts at ``path``: those that are there, or empty ones put in the host's place.

    Args:
        model: holds experts at this path.
        path: full name.
        rules: by the full names of weights; it has one for each weight at this path that is packed.
    """
    host: Any = model.get_submodule(path)
    if isinstance(host, QuantizedExperts):
        return host
    own = {name: rules[f"{path}.{name}"].weight for name in weights_of(host) if f"{path}.{name}" in rules}
    experts = QuantizedExperts(host, {name: format for name, format in own.items() if format is not None})
    experts.operands = _operands([rules[f"{path}.{name}"] for name in own], experts)
    experts.train(host.training)
    model.set_submodule(path, experts)
    return experts


def _operands(rules: list[Rule], experts: QuantizedExperts) -> Operands:
    """The formats of the operands that a kernel takes; plain ones where a rule asks for others."""
    operands = {operands_of(rule) for rule in rules}
    whole = all(has_room(experts.packed(name)) for name in experts.formats)
    fit = all(side % FLOAT8_SIDES == 0 for shape in experts.shapes.values() for side in shape[1:])
    return FLOAT8 if operands == {FLOAT8} and whole and fit else PLAIN


def expert_rules_of(model: nn.Module, recipe: Recipe) -> dict[str, Rule]:
    """`expert_rules` of a model by its family; none where no spec can be had."""
    try:
        spec = spec_for(model)
    except Unsupported:
        return {}
    return expert_rules(model, spec, recipe)


def place_empty_experts(model: nn.Module, recipe: Recipe, tensors: Mapping[str, Any]) -> None:
    """Put empty packed experts where a checkpoint holds packed ones: it has their scales."""
    rules = expert_rules_of(model, recipe)
    packed = {n: r for n, r in rules.items() if not tensors or any(_parts_in(model, n, r, tensors))}
    for name in packed:
        packed_place(model, name.rpartition(".")[0], packed)


def _parts_in(model: nn.Module, name: str, rule: Rule, tensors: Mapping[str, Any]) -> Iterator[bool]:
    assert rule.weight is not None
    layout = rule.weight.layout((1, 256, 256))
    for part in layout:
        if part != "codes":
            yield f"{name}_{part}" in tensors
    if len(layout) == 1 and name in tensors:  # scales lie among the codes, as in GGUF's types
        path, _, leaf = name.rpartition(".")
        shape = rule.weight.layout(tuple(getattr(model.get_submodule(path), leaf).shape))["codes"].shape
        yield tuple(tensors[name].shape) == shape


def check_experts(model: nn.Module, where: str) -> None:
    """Refuse packed experts of other shapes than their formats make them, and freeze what is right.

    Raises:
        BadCheckpoint: a part is missing or of another shape.
    """
    for path, module in model.named_modules():
        if not isinstance(module, QuantizedExperts):
            continue
        for name in module.shapes:
            packed: Packed = module.packed(name)
            for part, spec in packed.format.layout(packed.shape).items():
                tensor: Tensor = packed.parts[part]
                if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                    raise BadCheckpoint(
                        f"{where}: {path}.{module.key(name, part)} is {tuple(tensor.shape)} {tensor.dtype},"
                        f" its format needs {spec.shape} {spec.dtype}; the weights and config.json belong to "
                        "different models."
                    )
                tensor.requires_grad_(False)


@contextmanager
def own_names(model: Any) -> Iterator[None]:
    """Have transformers write a packed model under the names that its modules have, while this lasts.

    Its conversions to a family's older layout would cut packed weights expert by expert, and rename what
    stands beside them; a packed folder is found by its modules' names.
    """
    before = vars(model).get("_weight_conversions")
    model._weight_conversions = []
    try:
        yield
    finally:
        if before is None:
            del model._weight_conversions
        else:
            model._weight_conversions = before
