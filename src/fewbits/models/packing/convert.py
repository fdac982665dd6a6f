"""`convert` puts a recipe into a model by replacing module instances; `restore` takes it out again.

No class, function or global of another library is changed. A model on the meta device is converted as well as
a real one: its packed layers are then empty and wait for a checkpoint.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fewbits.decoder.parts import FLOAT8_SIDES
from fewbits.errors import SpecMismatch, Unsupported
from fewbits.families.catalog import SAME_AS_LINEAR
from fewbits.families.spec import ModelSpec
from fewbits.host.attention import decoder_of, restore_attention, used_attention
from fewbits.host.conversion import Conversion, conversion_of
from fewbits.host.expert_weights import weights_of
from fewbits.host.packed_rows import keep_rows_apart
from fewbits.host.receipt import Left, Receipt
from fewbits.host.record import notes_of, put_part, receipts_of, take_part
from fewbits.host.spec import find, layer_names, locate, spec_for
from fewbits.host.transposed import as_conv1d, as_linear, is_conv1d, is_transposed
from fewbits.host.unwrap import unwrap
from fewbits.kernels.product.matmul_packed import PLAIN
from fewbits.models.packing.adapters_told import adapters_told
from fewbits.models.packing.cache_choice import check_cache
from fewbits.models.packing.changes import describe, expert_changes, loaded_change, module_change
from fewbits.models.packing.experts import expert_modules, expert_rules, packed_place, why_not_packed
from fewbits.models.packing.gpu_fallbacks import gpu_fallbacks
from fewbits.models.packing.packed_head import head_rule, tie_again, untie
from fewbits.models.packing.recipe_patterns import unmatched_patterns
from fewbits.models.packing.split_experts import join_experts
from fewbits.nn.experts import QuantizedExperts
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.finite import check_finite
from fewbits.nn.linear import LowPrecisionLinear, QuantizedLinear, operands_of, take_parameters
from fewbits.nn.norm import RMSNorm, computes_rmsnorm
from fewbits.nn.packed_layers import fake_layer, packed_layer
from fewbits.nn.split_experts import SplitExperts
from fewbits.recipes import Recipe, Rule, get_recipe
from fewbits.words import counted

Builder = Callable[[str, nn.Linear, Rule], nn.Module | None]
_PEFT_PARTS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
PACKED = (QuantizedLinear, QuantizedExperts)
CONVERTED = (*PACKED, LowPrecisionLinear, FakeQuantizedLinear)


def convert(
    model: nn.Module,
    recipe: str | Recipe | Mapping[str, Any],
    *,
    strict: bool = False,
    keep_original: bool = False,
    fuse_norms: bool = True,
    build: Builder | None = None,
    loaded: bool = False,
) -> Receipt:
    """Replace the linears that ``recipe`` has a rule for, and the norms; in place.

    Args:
        model: a Hugging Face decoder without adapters. Of a family that nobody wrote a spec for, the layers'
            linears are replaced and everything else stays (`fewbits.host.generic`).
        recipe: which format where, by name, value or plain data. With ``qat`` the linears are fake-quantised
            and stay trainable.
        strict: raise where spec and model disagree, before anything is changed, in place of noting it in the
            receipt.
        keep_original: keep the replaced linears in host memory as they are, so that `restore` gives them back
            exactly.
        fuse_norms: replace the RMSNorms by the library's own.
        build: makes the new layer from a linear's full name, the linear and its rule; where it gives None, or
            is None itself, the layer is the usual one.
        loaded: the recipe comes with weights packed by it; a pattern in it that names nothing is only told.

    Returns:
        The receipt; `explain` finds it again later.

    Raises:
        BadInput: there is no recipe of that name, or a pattern in it names no linear.
        Unsupported: the model is no dense decoder and has no spec, it has adapters already, or its heads
            cannot be kept as the recipe's ``kv_cache`` says.
        NotFinite: a weight that is to be packed or rounded holds a NaN or an infinity.
        SpecMismatch: with ``strict``, spec and model disagree.
    """
    recipe = get_recipe(recipe)
    spec = spec_for(model)
    _refuse_converted(model)
    check_cache(recipe.kv_cache, model.config)
    unmatched = unmatched_patterns(model, spec, recipe, loaded=loaded)
    rules, left = _plan(model, spec, recipe)
    experts = expert_rules(model, spec, recipe)
    left.extend(_left_experts(model, spec, experts))
    norms = _plan_norms(model, spec, left) if fuse_norms and not spec.generic else []
    left.extend(_untouched(model, spec, {entry.name for entry in left} | {*experts}))
    receipt = Receipt(f"{spec.model_type}, recipe {recipe.name}", left=left)
    receipt.notes.extend([*unmatched, *_notes(spec, recipe)])
    if strict and receipt.mismatches:
        wrong = "; ".join(f"{entry.name}: {entry.reason}" for entry in receipt.mismatches)
        raise SpecMismatch(
            f"spec {spec.model_type!r} and this model disagree ({wrong}); use strict=False to go on."
        )
    for name, rule in rules.items():
        if rule.weight is not None:  # before anything is changed
            check_finite(model.get_submodule(name).weight, f"{name}.weight")  # type: ignore[arg-type]
    state = Conversion(recipe, receipt)
    head = head_rule(model, spec, recipe)
    for name, rule in rules.items():
        new = _new_layer(name, as_linear(model.get_submodule(name)), rule, build, recipe)
        is_tied = head is not None and head.is_tied and name == head.name
        _replace(model, name, new, state, keep=keep_original and not is_tied)
        if is_tied:
            untie(model, name)
            state.untied_head = name
            receipt.notes.append(f"{name} is a packed copy of the embeddings, which stay as they are")
    for path, host in [*expert_modules(model, spec)] if experts else []:
        _pack_experts(model, path, host, experts, state, keep=keep_original)
    for name in norms:
        norm: Any = model.get_submodule(name)
        new = RMSNorm(norm.weight, _eps(norm), spec.norm.offset).train(norm.training)
        _replace(model, name, new, state, keep=True)
    state.packed_rows = keep_rows_apart(decoder_of(model))
    put_part(model, state)
    receipt.notes.extend([*_notes_of_experts(model, experts), *gpu_fallbacks(model)])
    return receipt


def linears_to_replace(model: nn.Module, recipe: Recipe) -> dict[str, Rule]:
    """Full name and rule of every linear that `convert` would store packed or multiply in few bits.

    Only names and shapes are looked at, so a model on the meta device will do. Under ``recipe.qat`` the
    weights are loaded as they are (`convert` then fake-quantises them), and the answer is empty. A head that
    shares the embedding's weight is not among them: no checkpoint has a weight of that name.
    """
    if recipe.qat is not None:
        return {}
    spec = spec_for(model)
    rules, _ = _plan(model, spec, recipe)
    head = head_rule(model, spec, recipe)
    return rules if head is None or not head.is_tied else {n: r for n, r in rules.items() if n != head.name}


def explain(model: nn.Module) -> Receipt:
    """The receipt of everything that fewbits has put into this model; print it.

    First the conversion, then, in their order, the fused decoder, layers shared by ranks and the like, and
    last the adapters that stand in it. Of a model that was not converted it says so, and lists what layers of
    ours it has all the same.
    """
    receipts = receipts_of(model)
    first = receipts.pop(Conversion, None) or _without_conversion(model)
    further = [*receipts.values(), *adapters_told(model)]
    return replace(first, further=further) if further else first


def _without_conversion(model: nn.Module) -> Receipt:
    receipt = Receipt(f"{type(model).__name__}, without a recipe")
    receipt.notes.extend(notes_of(model))
    receipt.notes.extend(gpu_fallbacks(model))
    ours = {name: layer for name, layer in model.named_modules() if isinstance(layer, CONVERTED)}
    for name, layer in ours.items():
        if isinstance(layer, QuantizedExperts):
            receipt.changes.extend(expert_changes(name, layer))
        else:
            receipt.changes.append(loaded_change(name, layer))
    if not ours:
        receipt.notes.append("no linear is packed or rounded: its arithmetic is the host's")
    return receipt


def restore(model: nn.Module) -> Receipt:
    """Bring back modules of the original classes, in place; the receipt says with which weights.

    Norms and trained linears come back with the parameters that they have now. Packed linears come back as
    they were, in the dtype that the model has now, if it was converted with ``keep_original`` and nothing was
    written into them since (as ``merge_and_unload`` does); otherwise with the dequantised weights. The
    attention becomes the host's again. Under adapters, weights that were packed are frozen.

    Raises:
        Unsupported: the model was not converted, or adapters are merged into packed weights.
    """
    state = conversion_of(model)
    if state is None:
        raise Unsupported(
            f"this {type(model).__name__} was not converted by fewbits; there is nothing to restore."
        )
    refuse_merged(model, "restore()")
    receipt = Receipt(f"restored from recipe {state.recipe.name}")
    model = unwrap(model)  # originals are kept under the names that modules have in it
    replaced = list(_converted(model))
    for name, module in replaced:
        plain = state.originals.get(name_as_converted(name))
        if plain is not None and "modules_to_save" in name:  # a copy that PEFT trains beside the original
            plain = copy.deepcopy(plain)
        original, how = _original(module, plain)
        if name_as_converted(name) == state.untied_head and type(original) is nn.Linear:
            tie_again(model, spec_for(model), name, original)
            how = "the embedding's weight"
        receipt.changes.append(module_change(name, module, original, f"{type(original).__name__} ({how})"))
        model.set_submodule(name, original)
    freeze_under_adapters(model, [name for name, module in replaced if isinstance(module, PACKED)])
    join_experts(model)
    if used_attention(model) is not None:
        receipt.notes.extend(restore_attention(model).notes)
    state.packed_rows.remove()
    take_part(model, Conversion)
    return receipt


def refuse_merged(model: nn.Module, call: str) -> None:
    """Raise `Unsupported` if adapters are merged into packed weights: PEFT could not take them out again."""
    for name, module in model.named_modules():
        base = getattr(module, "get_base_layer", lambda: None)()
        if getattr(module, "merged_adapters", None) and isinstance(base, PACKED):
            raise Unsupported(
                f"{name} has adapters merged into its packed weight; unmerge them (unmerge_adapter()) before "
                f"{call}, or write the merged model with save_pretrained_merged."
            )


def freeze_under_adapters(model: nn.Module, names: Iterable[str]) -> None:
    """Freeze weights that were packed, if PEFT's layers stand in the model or all else is frozen.

    Biases, which adapters may train, and whole copies that PEFT trains stay as they are.
    """
    weights = {
        parameter
        for name in names
        for part, parameter in model.get_submodule(name).named_parameters()
        if not part.endswith("bias") and "modules_to_save" not in name
    }
    adapted = any(hasattr(m, "base_layer") or hasattr(m, "original_module") for m in model.modules())
    if adapted or not any(p.requires_grad for p in model.parameters() if p not in weights):
        for parameter in weights:
            parameter.requires_grad_(False)


def name_as_converted(name: str) -> str:
    """The name that a module had when its model was converted, before PEFT put layers around it."""
    return _PEFT_PARTS.sub("", name)


def record_change(model: nn.Module, name: str, new: nn.Module, receipt: Receipt) -> None:
    """Replace one module and note it in ``receipt``."""
    receipt.changes.append(module_change(name, model.get_submodule(name), new, describe(new)))
    model.set_submodule(name, new)


def _notes(spec: ModelSpec, recipe: Recipe) -> Iterator[str]:
    """What a receipt says beside its tables."""
    if spec.generic:
        yield f"{spec.without_spec}: its linears are packed and trained through its own layers, unfused"
    if recipe.communication is not None:
        yield (
            f"communication={recipe.communication.name}: gradients travel so between processes, if "
            "fewbits' trainer runs them"
        )
    if recipe.kv_cache is not None and not recipe.kv_cache.is_plain:
        yield (
            f"kv_cache={recipe.kv_cache.name}: generate() of FastLanguageModel's models and fewbits' own "
            "evaluation keep keys and values so"
        )
    operands = (recipe.head.weight_operand, recipe.head.activation, recipe.head.gradient)
    codings = {f.name: f.contract.coding for f in operands if f is not None}
    if others := [name for name, coding in codings.items() if coding is None or not coding.is_float8]:
        yield f"the head has products in 8-bit floats alone, not in {others[0]}: they keep their dtype"
    elif codings:
        yield "the head's products keep their dtype until the decoder is fused (fewbits.fuse)"


def _notes_of_experts(model: nn.Module, rules: Mapping[str, Rule]) -> Iterator[str]:
    """What is said of experts whose products the recipe wants in few bits, and cannot have so."""
    paths = {name.rpartition(".")[0] for name, rule in rules.items() if operands_of(rule) != PLAIN}
    plain = [path for path in sorted(paths) if model.get_submodule(path).operands == PLAIN]
    if plain:
        yield (
            f"products of experts in {counted(len(plain), 'layer')} are computed in the dtype of the "
            "activations: the kernel takes weights whose rows are scaled apart, with sides that are multiples"
            f" of {FLOAT8_SIDES}, and both operands in E4M3"
        )


def _plan(model: nn.Module, spec: ModelSpec, recipe: Recipe) -> tuple[dict[str, Rule], list[Left]]:
    rules: dict[str, Rule] = {}
    left: list[Left] = []
    reasons = {f"{layer}.{path}": why for layer in layer_names(model, spec) for path, why in spec.left}
    for name, is_packable in _linear_names(model, spec):
        module = find(model, name)
        rule = _rule(name, recipe)
        if name in reasons:
            left.append(Left(name, f"{reasons[name]}: left as it is"))
        elif not is_packable:
            left.append(Left(name, "the spec does not name it", intended=False))
        elif module is None:
            if not name.endswith(tuple(f".{path}" for path in spec.some_layers)):
                left.append(Left(name, "the spec names it and the model has none", intended=False))
        elif not _is_plain_linear(module):
            reason = f"it is {_kind(module)}, not a plain nn.Linear"
            left.append(Left(name, reason, intended=spec.generic))
        elif rule.is_plain:
            left.append(Left(name, "the recipe leaves it as it is"))
        else:
            rules[name] = rule
    _plan_ends(model, spec, recipe, rules, left)
    return rules, left


def _left_experts(model: nn.Module, spec: ModelSpec, rules: Mapping[str, Rule]) -> Iterator[Left]:
    for path, module in expert_modules(model, spec):
        for name in () if isinstance(module, QuantizedExperts) else weights_of(module):
            if f"{path}.{name}" not in rules:
                reason = why_not_packed(module) or "experts that the recipe leaves as they are"
                yield Left(f"{path}.{name}", reason)


def _pack_experts(
    model: nn.Module, path: str, host: Any, rules: Mapping[str, Rule], state: Conversion, *, keep: bool
) -> None:
    """Put packed experts in the host's place, one note in the receipt for each weight."""
    if isinstance(host, QuantizedExperts):
        return
    names = [name for name in weights_of(host) if f"{path}.{name}" in rules]
    experts = packed_place(model, path, rules)
    for name in names:
        weight = getattr(host, name)
        if not weight.is_meta:
            experts.pack(name, weight)
    if keep:
        state.originals[path] = host.to("cpu")
    state.receipt.changes.extend(expert_changes(path, experts))


def _plan_ends(
    model: nn.Module, spec: ModelSpec, recipe: Recipe, rules: dict[str, Rule], left: list[Left]
) -> None:
    left.append(Left(locate(model, spec, spec.embed), "embeddings stay as they are"))
    head = head_rule(model, spec, recipe)
    if head is None:
        return
    if not head.rule.is_plain:
        rules[head.name] = head.rule
    elif head.is_tied:
        left.append(Left(head.name, "its weight is the embedding's"))
    else:
        left.append(Left(head.name, "the output head stays as it is, unless the recipe's head says more"))


def _linear_names(model: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, bool]]:
    """Full names of the linears in the decoder layers, and whether the spec knows them."""
    for layer in layer_names(model, spec):
        named = [f"{layer}.{path}" for path in spec.linears]
        if spec.generic:  # layers may differ, and nobody said that each has all of them
            named = [name for name in named if find(model, name) is not None]
        yield from ((name, True) for name in named)
        modules = dict(model.get_submodule(layer).named_modules())
        split = [path for path, module in modules.items() if isinstance(module, SplitExperts)]
        for path, module in modules.items():
            name = f"{layer}.{path}"
            if isinstance(module, nn.Linear) and name not in named:
                yield name, name.startswith(tuple(f"{layer}.{inner}." for inner in split))


def _is_plain_linear(module: nn.Module) -> bool:
    same = isinstance(module, nn.Linear) and type(module).__name__ in SAME_AS_LINEAR
    return type(module) is nn.Linear or same or is_conv1d(module)


def _untouched(model: nn.Module, spec: ModelSpec, listed: set[str]) -> Iterator[Left]:
    """What has parameters, stands in no rule and is not listed: modules without inner ones, parameters."""
    names = listed | {name for name, _ in _linear_names(model, spec)}
    if spec.norm.kind == "rms":  # the others stay, and are listed
        names |= {f"{layer}.{path}" for layer in layer_names(model, spec) for path in spec.norms}
    names |= {locate(model, spec, path) for path in (spec.head, *_final_norm(spec))}
    towers = [locate(model, spec, path) for path in spec.towers]
    yield from (Left(name, "it reads other things than text: left as it is") for name in towers)
    for name, module in model.named_modules():
        if any(name == tower or name.startswith(f"{tower}.") for tower in towers):
            continue
        parameters = dict(module.named_parameters(recurse=False))
        if name in names or isinstance(module, CONVERTED) or not parameters:
            continue
        paths = [f"{name}.{leaf}".lstrip(".") for leaf in parameters]
        if next(module.children(), None) is None and name and names.isdisjoint(paths):
            yield Left(name, f"{_kind(module)} that no rule names: left as it is")
        else:
            reason = "a parameter that no rule names: left as it is"
            yield from (Left(path, reason) for path in paths if path not in names)


def _kind(module: nn.Module) -> str:
    name = type(module).__name__
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def _rule(name: str, recipe: Recipe) -> Rule:
    if recipe.qat is None:
        return recipe.rule_for(name)
    named = recipe.named_rule(name)
    if named is not None:
        return named
    return Rule(weight=recipe.qat.weight, activation=recipe.qat.activation)


def _plan_norms(model: nn.Module, spec: ModelSpec, left: list[Left]) -> list[str]:
    if spec.norm.kind != "rms":
        return []
    names = [f"{layer}.{path}" for layer in layer_names(model, spec) for path in spec.norms]
    norms = []
    tried: dict[tuple[Any, ...], bool] = {}
    for name in [*names, *(locate(model, spec, path) for path in _final_norm(spec))]:
        module: Any = find(model, name)
        if module is None:
            left.append(Left(name, "the spec names it and the model has none", intended=False))
            continue
        if isinstance(module, RMSNorm):
            continue
        weight = getattr(module, "weight", None)
        alike = (type(module), _eps(module), None if weight is None else tuple(weight.shape))
        if alike not in tried:
            tried[alike] = computes_rmsnorm(module, _eps(module), spec.norm.offset)
        if tried[alike]:
            norms.append(name)
        else:
            what = f"it is {_kind(module)}, which does not compute the RMSNorm that its spec says"
            left.append(Left(name, what, intended=False))
    return norms


def _final_norm(spec: ModelSpec) -> list[str]:
    return [] if spec.final_norm is None else [spec.final_norm]


def _eps(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _new_layer(name: str, linear: nn.Linear, rule: Rule, build: Builder | None, recipe: Recipe) -> nn.Module:
    new = None if build is None else build(name, linear, rule)
    if new is None and rule.weight is None:
        new = LowPrecisionLinear.from_linear(linear, rule)
    elif new is None:
        new = fake_layer(linear, rule) if recipe.qat is not None else packed_layer(linear, rule)
    if is_transposed(linear):
        new.transposed = True  # type: ignore[assignment]
    return new


def _replace(model: nn.Module, name: str, new: nn.Module, state: Conversion, *, keep: bool) -> None:
    if keep:
        state.originals[name] = model.get_submodule(name)
    record_change(model, name, new, state.receipt)


def _refuse_converted(model: nn.Module) -> None:
    if conversion_of(model) is not None:
        raise Unsupported("this model is converted already; call fewbits.restore first.")
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise Unsupported("this model has adapters already; convert it first and add them afterwards.")


def _converted(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, (*CONVERTED, RMSNorm)):
            yield name, module


def _original(module: Any, original: Any) -> tuple[nn.Module, str]:
    if isinstance(module, RMSNorm):
        original.weight = module.weight
        return original.train(module.training), "the original"
    if isinstance(module, PACKED) and original is not None and not module.repacked:
        original = original.to(module.device, module.dtype).train(module.training)
        if isinstance(module, QuantizedLinear):
            original.register_parameter("bias", module.bias)
        return original, "the original"
    if isinstance(module, QuantizedExperts):
        return module.host(), "dequantised weights"
    if isinstance(module, QuantizedLinear):
        return decoded_linear(module), "dequantised weight"
    linear = take_parameters(nn.Linear, module)
    return as_conv1d(linear) if is_transposed(module) else linear, "the same parameters"


def decoded_linear(layer: QuantizedLinear) -> nn.Module:
    """A plain linear with the weight that ``layer`` stands for, in the dtype that it had.

    For a layer that took the place of a Conv1D, it is one.
    """
    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta", dtype=layer.dtype)
    linear.weight = nn.Parameter(layer.dequantize(), requires_grad=torch.is_grad_enabled())
    linear.register_parameter("bias", layer.bias)
    linear.train(layer.training)
    return as_conv1d(linear) if is_transposed(layer) else linear
