"""LoRA targets that mean experts: names of linears turned into PEFT's ``target_parameters``.

In a model with experts "gate_proj", "up_proj" and "down_proj" are slices of 3-D parameters, which PEFT adapts
by ``target_parameters``. As PEFT does itself, an adapter on gate and up together has twice the rank (and
alpha): it stands for two.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from fewbits.errors import SpecMismatch, Unsupported
from fewbits.families.spec import ModelSpec
from fewbits.host.expert_weights import weights_of
from fewbits.models.packing.experts import expert_modules

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
    if spec is None or spec.experts is None or targets == "all-linear" or not targets:
        return fields
    module = next((module for _, module in expert_modules(model, spec)), None)
    names = {targets} if isinstance(targets, str) else set(targets)
    weights = () if module is None else weights_of(module)
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
    fields = {**fields, "target_modules": sorted(names - meant)}
    fields["target_parameters"] = sorted({*(fields.get("target_parameters") or ()), *parameters})
    if meant >= {*_BOTH} and "gate_up_proj" in weights:
        pattern = rf".*\.{re.escape(spec.experts.path)}\.gate_up_proj"
        fields["rank_pattern"] = {pattern: 2 * fields["r"], **(fields.get("rank_pattern") or {})}
        fields["alpha_pattern"] = {pattern: 2 * fields["lora_alpha"], **(fields.get("alpha_pattern") or {})}
    return fields


def expert_paths(model: nn.Module) -> set[str]:
    """Full names of the modules that hold experts, without PEFT's wrappers."""
    return {
        path.removeprefix("base_model.model.").replace(".base_layer", "")
        for path, module in model.named_modules()
        if weights_of(module)
    }
