"""LoRA targets that mean experts: names of linears turned into PEFT's ``target_parameters``.

In a model with experts "gate_proj", "up_proj" and "down_proj" are slices of 3-D parameters, which PEFT adapts
by ``target_parameters``. As PEFT does itself, an adapter on gate and up together has twice the rank (and
alpha): it stands for two.

"all-linear" is one rule for all families: all linears of the decoder layers, and the routed experts
wherever an expert is made of linears (transformers 4 kept them so: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE,
DeepSeek-V3, GLM-4.5 and the like). Experts that never were linears (gpt-oss, Granite) it does not mean. The
router is not adapted.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from fewbits.errors import SpecMismatch, Unsupported
from fewbits.families.spec import ModelSpec
from fewbits.host.expert_weights import all_weights_of, weights_of
from fewbits.models.packing.experts import expert_modules

ALL_LINEAR = '"all-linear"'
_BOTH = ("gate_proj", "up_proj")
_INIT_OF_LINEARS = ("orthogonal", "pissa", "olora", "loftq", "eva", "corda", "lora_ga", "mica")


def with_experts(model: nn.Module, spec: ModelSpec | None, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a ``peft.LoraConfig``, names that mean experts moved to ``target_parameters``.

    Args:
        model: the model.
        spec: of its family, if there is one.
        fields: with ``target_modules`` as the user wrote it. PEFT adapts a parameter in every layer and
            whatever is excluded; here ``layers_to_transform``, ``layers_pattern`` and ``exclude_modules``
            decide for experts as for linears; names have the layer then ("layers.0.mlp.experts.down_proj").

    Returns:
        The same fields, changed where names mean experts.

    Raises:
        SpecMismatch: one of gate and up is asked for, and the model stores them as one.
        Unsupported: adapters on experts are to have dropout, first values or a variant that takes a linear.
    """
    targets = fields["target_modules"]
    if spec is None or spec.experts is None or not targets:
        return fields
    module = next((module for _, module in expert_modules(model, spec)), None)
    weights = () if module is None else all_weights_of(module)
    if targets == "all-linear":
        if not made_of_linears(module, spec):
            return fields
        names = {*spec.linear_names, *weights, *(_BOTH if "gate_up_proj" in weights else ())} - {
            "gate_up_proj"
        }
    else:
        names = {targets} if isinstance(targets, str) else set(targets)
        if "gate_up_proj" in names & {*weights}:  # Unsloth's notebooks name it beside the two, or alone
            names = names - {"gate_up_proj"} | {*_BOTH}
    is_fused = "gate_up_proj" in weights
    meant = names & {*weights, *(_BOTH if is_fused else ())}
    if not meant:
        return fields
    names_at = {
        path: {name for name in meant if _is_wanted(fields, path, name)}
        for path, _ in expert_modules(model, spec)
    }
    for some in names_at.values():
        if is_fused and len(some & {*_BOTH}) == 1:
            raise SpecMismatch(
                f"{', '.join(some & {*_BOTH})} of the experts cannot be adapted alone: the model stores"
                f" {' and '.join(_BOTH)} as one weight; name both, or exclude both."
            )
    parameters = {
        f"{_ending(path, spec, whole=names_at)}.{'gate_up_proj' if is_fused and name in _BOTH else name}"
        for path, some in names_at.items()
        for name in some
    }
    beside = set() if peft_moves(model, meant) else meant & set(spec.linear_names)  # shared and dense ones
    fields = {**fields, "target_modules": sorted((names - meant) | beside)}
    if not parameters:
        return fields
    check_on_experts(fields, spec)
    fields["target_parameters"] = sorted({*(fields.get("target_parameters") or ()), *parameters})
    if meant >= {*_BOTH} and is_fused:
        pattern = rf".*\.{re.escape(spec.experts.path)}\.gate_up_proj"
        fields["rank_pattern"] = {pattern: 2 * fields["r"], **(fields.get("rank_pattern") or {})}
        fields["alpha_pattern"] = {pattern: 2 * fields["lora_alpha"], **(fields.get("alpha_pattern") or {})}
    return fields


def _is_wanted(fields: Mapping[str, Any], path: str, name: str) -> bool:
    """Whether an adapter goes on this weight of the experts in ``path``, by PEFT's rule for linears."""
    from peft.tuners.tuners_utils import check_target_module_exists

    experts = path.removeprefix("base_model.model.")
    limits = {key: fields.get(key) for key in ("layers_to_transform", "layers_pattern", "exclude_modules")}
    whole = "gate_up_proj" if name in _BOTH else name
    return all(
        check_target_module_exists(SimpleNamespace(target_modules=[key.rpartition(".")[2]], **limits), key)
        for key in (experts, f"{experts}.{name}", f"{experts}.{whole}")
    )


def _ending(path: str, spec: ModelSpec, whole: Mapping[str, set[str]]) -> str:
    """The experts' name in all layers where they are adapted alike, else with the layer."""
    assert spec.experts is not None
    short = spec.experts.path
    if len({frozenset(names) for names in whole.values()}) == 1:
        return short
    layer = path.removesuffix(f".{short}").split(".")[-2:]
    return ".".join([*layer, short])


def check_on_experts(fields: Mapping[str, Any], spec: ModelSpec) -> None:
    """Refuse what PEFT cannot do in an adapter on a 3-D parameter.

    Args:
        fields: of a ``peft.LoraConfig``.
        spec: of a family with experts.

    Raises:
        Unsupported: dropout, first values, or a variant that takes a linear.
    """
    import peft

    variants = [f.name for f in dataclasses.fields(peft.LoraConfig) if f.metadata.get("is_lora_variant")]
    init = fields.get("init_lora_weights")
    out = f'leave the experts out with exclude_modules=["{_of(spec)}"], or name other targets'
    if fields.get("lora_dropout"):
        raise Unsupported(f"adapters on experts take no dropout; set lora_dropout=0, {out}.")
    if isinstance(init, str) and init.lower().startswith(_INIT_OF_LINEARS):
        raise Unsupported(
            f"init_lora_weights={init!r} needs the weight of one linear, and an adapter on experts stands on"
            f" a 3-D weight; leave the setting out, {out}."
        )
    for name in ("use_dora", "lora_bias", *variants):
        if fields.get(name):
            raise Unsupported(
                f"{name} needs a linear, and an adapter on experts stands on a 3-D weight; leave the setting"
                f" out, {out}."
            )


def check_packed_alike(model: nn.Module, parameters: Any) -> None:
    """Refuse adapters on experts of which a recipe packs one weight and leaves another plain.

    Args:
        model: the model.
        parameters: ``target_parameters`` of a ``peft.LoraConfig``, or None.

    Raises:
        Unsupported: there are such experts, and they are to be adapted.
    """
    for path, module in model.named_modules() if parameters else ():
        plain = sorted({*all_weights_of(module)} - {*weights_of(module)})
        names = [f"{path}.{name}" for name in all_weights_of(module)]
        if plain and any(name.endswith(f".{end}") for name in names for end in parameters):
            raise Unsupported(
                f"{plain[0]} of {path} is plain beside a packed weight, and adapters take experts whose"
                " weights are stored alike; give both a format, or leave experts out with exclude_modules."
            )


def _of(spec: ModelSpec) -> str:
    """What the module with the experts is called."""
    return "experts" if spec.experts is None else spec.experts.path.rpartition(".")[2]


def made_of_linears(module: nn.Module | None, spec: ModelSpec) -> bool:
    """Whether the experts in a module are linears side by side: no bias, weights as a linear has them."""
    if (
        module is None
        or "gate_up_proj" not in all_weights_of(module)
        or not (spec.experts and spec.experts.are_linears)
    ):
        return False
    has_bias = any(name.endswith("_bias") for name, _ in module.named_parameters(recurse=False))
    return not has_bias and not getattr(module, "is_transposed", False)


def peft_moves(model: Any, names: set[str]) -> bool:
    """Whether PEFT itself, for this model, makes target_parameters of such names in target_modules."""
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = peft.LoraConfig(target_modules=sorted(names))
    convert_peft_config_for_transformers(config, model, conversions=None)
    return set(config.target_modules) != names  # type: ignore[arg-type]


def told_of_all_linear(model: nn.Module, spec: ModelSpec | None, parameters: Any) -> str | None:
    """What "all-linear" means of a model's experts, in a sentence.

    None where it has none, or where they are excluded: then no ``parameters`` are adapted.
    """
    if spec is None or spec.experts is None:
        return None
    module = next((module for _, module in expert_modules(model, spec)), None)
    if module is None:
        return None
    if made_of_linears(module, spec):
        return parameters and (
            f"{ALL_LINEAR} means the routed experts too, each with matrices of its own;"
            f' exclude_modules=["{_of(spec)}"] leaves them out'
        )
    return (
        f"{ALL_LINEAR} leaves out the routed experts, which are no linears in this family; name"
        " gate_proj, up_proj and down_proj to adapt them"
    )


def expert_paths(model: nn.Module) -> set[str]:
    """Full names of the modules that hold experts, without PEFT's wrappers."""
    return {
        path.removeprefix("base_model.model.").replace(".base_layer", "")
        for path, module in model.named_modules()
        if all_weights_of(module)
    }
