"""Packed layers in a model: put there, looked over, described as a recipe; what a device can run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fewbits import device
from fewbits.errors import BadCheckpoint, SpecMismatch, Unsupported
from fewbits.formats.base import Format, Packed, PartSpec
from fewbits.host.transposed import as_linear, is_transposed
from fewbits.kernels.codec.quantize import quantize
from fewbits.models.folders.checkpoint import TensorEntry
from fewbits.models.packing.split_experts import split_as_stored
from fewbits.nn.experts import QuantizedExperts
from fewbits.nn.finite import FiniteLater, check_finite
from fewbits.nn.linear import QuantizedLinear
from fewbits.nn.packed_layers import packed_layer
from fewbits.nn.stochastic.linear import EXTRAS, StochasticLinear
from fewbits.recipes import Recipe, Rule, get_recipe, recipe_from_config

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I16": torch.int16,
    "U8": torch.uint8,
}
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_packed(model: nn.Module) -> bool:
    """Whether any weight of the model is stored packed."""
    return any(isinstance(module, QuantizedLinear | QuantizedExperts) for module in model.modules())


def refuse_to_pack(recipe: Any) -> Any:
    """A recipe, by any of its names, under which all weights can be trained.

    Raises:
        Unsupported: it packs them.
    """
    chosen = recipe_from_config(recipe) if isinstance(recipe, Mapping) else get_recipe(recipe)
    if chosen.packs:
        raise Unsupported(
            f"full_finetuning trains all weights, but the recipe {chosen.name!r} packs them, and packed"
            " weights are not trained; leave the recipe out, take one that rounds weights as it computes"
            " (float8_full, int4_qat), or leave full_finetuning out and add adapters with get_peft_model."
        )
    return recipe


def train_all(model: nn.Module, where: str) -> None:
    """Make all weights trainable.

    Raises:
        Unsupported: some are packed, as they were in the folder ``where``.
    """
    if is_packed(model):
        raise Unsupported(
            f"full_finetuning trains all weights, but those in {where} are packed, and packed weights are not"
            " trained; load the original model, or leave full_finetuning out and add adapters with"
            " get_peft_model."
        )
    model.requires_grad_(True)


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
    formats = [f for rule in rules for f in (rule.weight_operand, rule.activation, rule.gradient)]
    return [f for f in formats if f is not None]


def quantize_by_rows(format: Format, weight: Tensor, rows: int = 256) -> Packed:
    """``format.quantize(weight)`` (N, K), a few rows at a time where parts allow it: temporaries stay small.

    They allow it if the parts of all pieces, one below the other, have the shapes of the whole weight's
    parts; a scale for the whole tensor, for one, does not. ``rows`` is a multiple of every format's block.
    On a GPU all at once: its kernels have no temporaries of the weight's size.
    """
    if weight.is_cuda:
        return quantize(weight, format)
    pieces = weight.split(rows)
    layout = format.layout(tuple(weight.shape))
    layouts = [format.layout(tuple(piece.shape)) for piece in pieces]
    if len(pieces) < 2 or not all(_stacks(layout, layouts, part) for part in layout):
        return format.quantize(weight)
    parts = {n: torch.empty(s.shape, dtype=s.dtype, device=weight.device) for n, s in layout.items()}
    start = dict.fromkeys(parts, 0)
    for piece in pieces:
        for name, part in format.quantize(piece).parts.items():
            parts[name][start[name] : start[name] + part.shape[0]] = part
            start[name] += part.shape[0]
    return Packed(format, tuple(weight.shape), weight.dtype, parts)


def _stacks(whole: Mapping[str, PartSpec], pieces: list[dict[str, PartSpec]], part: str) -> bool:
    shapes = [piece[part].shape for piece in pieces]
    height = sum(shape[0] if shape else 0 for shape in shapes)
    return bool(shapes[0]) and (height, *shapes[0][1:]) == whole[part].shape


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Make ``layer`` the submodule with this full name."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)


def place_empty(
    model: nn.Module, rules: Mapping[str, Rule], tensors: Mapping[str, TensorEntry] | None = None
) -> None:
    """Replace linears by empty packed layers on the meta device, to be filled from a checkpoint.

    Args:
        model: the model.
        rules: the layers by full name.
        tensors: what the checkpoint holds; it tells which extras stochastic layers have.
    """
    split_as_stored(model, rules)
    for name, rule in rules.items():
        try:
            linear: Any = as_linear(model.get_submodule(name))
        except AttributeError as error:
            raise SpecMismatch(
                f"the checkpoint holds a packed {name}, which the model that config.json describes does not "
                "have; restore the config.json that was saved with it."
            ) from error
        assert rule.weight is not None
        meta = linear
        if not linear.weight.is_meta:  # to make one costs more than the packed layer does
            sizes = (linear.in_features, linear.out_features)
            meta = nn.Linear(*sizes, bias=False, dtype=linear.weight.dtype, device="meta")
            meta.bias = linear.bias
        layer = packed_layer(meta, rule)
        layer.transposed = is_transposed(linear)
        _check_shapes(name, layer, tensors or {})
        if isinstance(layer, StochasticLinear):
            layer.expect_extras(_extras(name, tensors or {}))
        put(model, name, layer)


def _check_shapes(name: str, layer: QuantizedLinear, tensors: Mapping[str, TensorEntry]) -> None:
    """Refuse a checkpoint whose parts have other shapes, before it is read."""
    for part, spec in layer.format.layout((layer.out_features, layer.in_features)).items():
        entry = tensors.get(f"{name}.weight_{part}")
        if entry is not None and entry.shape != spec.shape:
            raise BadCheckpoint(
                f"{entry.file.parent}: {name}.weight_{part} has shape {entry.shape} and its settings make it "
                f"{spec.shape}; the weights and config.json belong to different models."
            )


def _extras(name: str, tensors: Mapping[str, TensorEntry]) -> dict[str, PartSpec]:
    """What the checkpoint holds of a stochastic layer beside its prepared weight."""
    entries = {extra: tensors[f"{name}.{extra}"] for extra in EXTRAS if f"{name}.{extra}" in tensors}
    return {extra: PartSpec(entry.shape, _DTYPES[entry.dtype]) for extra, entry in entries.items()}


def check_parts(model: nn.Module, where: str) -> None:
    """Freeze the packed parts, after checking them against the layout (older transformers set any shape)."""
    later, looked_at = FiniteLater(), {}
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
            looked_at[f"{where}: {name}.weight_{part}"] = parameter
            later.add(parameter, f"{where}: {name}.weight_{part}")
            parameter.requires_grad_(False)
        if isinstance(module, StochasticLinear):
            module.refresh()
            problem = module.problem()
            if problem is not None:
                raise BadCheckpoint(f"{where}: {name} {problem}; the two belong to different models.")
    for wrong in later.wrong():
        check_finite(looked_at[wrong], wrong)


def recipe_of(model: nn.Module, *, name: str) -> Recipe:
    """The recipe that describes how a model is packed: the commonest rule, exceptions, what was skipped.

    Adapters are no part of it: a linear below one has the name that it has without, and theirs are left out.
    """
    modules = dict(_without_adapters(model))
    rules = {n: _rule_of(m) for n, m in modules.items() if isinstance(m, QuantizedLinear)}
    for path, module in modules.items():
        if isinstance(module, QuantizedExperts):
            rules |= {f"{path}.{name}": Rule(weight=format) for name, format in module.formats.items()}
    if not rules:
        return Recipe(name=name)
    rules_there = list(rules.values())
    common = max(rules_there, key=rules_there.count)
    plain = tuple(n for n, m in modules.items() if isinstance(m, nn.Linear) and n not in rules)
    return Recipe(
        name=name, linear=common, overrides=tuple((n, r) for n, r in rules.items() if r != common), skip=plain
    )


def _without_adapters(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules by the names that they have in a model without adapters, whose own are left out."""
    below = module._modules.get("base_layer", module._modules.get("original_module"))
    if below is not None:
        yield from _without_adapters(below, path)
        return
    yield path, module
    for name, child in module.named_children():
        yield from _without_adapters(child, f"{path}.{name}" if path else name)


def _rule_of(layer: QuantizedLinear) -> Rule:
    operands = layer.operands
    return Rule(
        weight=layer.format,
        weight_operand=operands.weight_operand,
        activation=operands.activation,
        gradient=operands.gradient,
    )
