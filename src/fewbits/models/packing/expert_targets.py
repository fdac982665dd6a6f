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

import re
from typing import Any

from torch import nn

from fewbits.errors import SpecMismatch, Unsupported
from fewbits.families.spec import ModelSpec
from fewbits.host.expert_weights import weights_of
from fewbits.models.packing.experts import expert_modules

ALL_LINEAR = '"all-linear"'
_BOTH = ("gate_proj", "up_proj")


def with_experts(model: nn.Module, spec: ModelSpec | None, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a ``peft.LoraConfig``, names that mean experts moved to ``target_parameters``.

    Args:
        model: the model.
        spec: of its family, if there is one.
        fields: with ``target_modules`` as the user wrote it.

    Returns:
        The same fields, changed where names mean experts.

    Raises:
        SpecMismatch: one of gate and up is asked for, and the model stores them as one.
        Unsupported: adapters on experts are to have dropout.
    """
    targets = fields["target_modules"]
    if spec is None or spec.experts is None or not targets:
        return fields
    module = next((module for _, module in expert_modules(model, spec)), None)
    weights = () if module is None else weights_of(module)
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
    meant = names & {*weights, *(_BOTH if "gate_up_proj" in weights else ())}
    if not meant:
        return fields
    if 0 < len(meant & {*_BOTH}) < 2 and "gate_up_proj" in weights:
        raise SpecMismatch(
            f"{', '.join(meant & {*_BOTH})} of the experts cannot be adapted alone: the model stores"
            f" {' and '.join(_BOTH)} as one weight; name both."
        )
    if fields.get("lora_dropout"):
        raise Unsupported("adapters on experts take no dropout; set lora_dropout=0, or name attention alone.")
    changed = {"gate_up_proj" if meant & {*_BOTH} and name in _BOTH else name for name in meant}
    parameters = {f"{spec.experts.path}.{name}" for name in changed & {*weights}}
    beside = set() if peft_moves(model, meant) else meant & set(spec.linear_names)  # shared and dense ones
    fields = {**fields, "target_modules": sorted((names - meant) | beside)}
    fields["target_parameters"] = sorted({*(fields.get("target_parameters") or ()), *parameters})
    if meant >= {*_BOTH} and "gate_up_proj" in weights:
        pattern = rf".*\.{re.escape(spec.experts.path)}\.gate_up_proj"
        fields["rank_pattern"] = {pattern: 2 * fields["r"], **(fields.get("rank_pattern") or {})}
        fields["alpha_pattern"] = {pattern: 2 * fields["lora_alpha"], **(fields.get("alpha_pattern") or {})}
    return fields


def made_of_linears(module: nn.Module | None, spec: ModelSpec) -> bool:
    """Whether the experts in a module are linears side by side: no bias, weights as a linear has them."""
    if (
        module is None
        or "gate_up_proj" not in weights_of(module)
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


def told_of_all_linear(model: nn.Module, spec: ModelSpec | None) -> str | None:
    """What "all-linear" means of a model's experts, in a sentence; None where it has none."""
    if spec is None or spec.experts is None:
        return None
    module = next((module for _, module in expert_modules(model, spec)), None)
    if module is None:
        return None
    if made_of_linears(module, spec):
        return (
            f"{ALL_LINEAR} means the routed experts too, each with matrices of its own; name the"
            " linears of the attention to leave them out"
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
        if weights_of(module)
    }
