"""Experts that a checkpoint has packed already: gpt-oss in MXFP4, read as they are.

Each 3-D weight is two tensors: ``gate_up_proj_blocks`` (E, outputs, inputs / 32, 16) uint8, two codes a byte
with the earlier one in the lower half, and ``gate_up_proj_scales`` (E, outputs, inputs / 32), exponents of
two plus 127. That is this library's MXFP4 but for the shape, so codes and scales are taken to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter

from fewbits.errors import BadCheckpoint, SpecMismatch
from fewbits.formats import MXFP4
from fewbits.models.packing.experts import packed_place
from fewbits.recipes import Rule

_BLOCKS, _SCALES = "_blocks", "_scales"
_WEIGHTS = ("gate_up_proj", "down_proj")


def mxfp4_converters(operation: Any) -> list[WeightConverter]:
    """What gathers the two tensors of a weight, for transformers."""
    return [WeightConverter([f"{w}{_BLOCKS}", f"{w}{_SCALES}"], w, [operation]) for w in _WEIGHTS]


def mxfp4_rules(model: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Rule]:
    """The packed weights of a checkpoint, by their full names.

    Raises:
        SpecMismatch: the model has no such weight.
    """
    names = [key.removesuffix(_BLOCKS) for key in tensors if key.endswith(_BLOCKS)]
    rules = {name: Rule(weight=MXFP4) for name in names}
    parameters = {name for name, _ in model.named_parameters()}
    for name in names:
        if name not in parameters:
            raise SpecMismatch(
                f"the checkpoint holds {name}, which the model that config.json describes lacks; restore the"
                " config.json that belongs to these weights."
            )
    return rules


def take_mxfp4(
    model: nn.Module, param_name: str, parts: Mapping[str, Tensor], rules: dict[str, Rule]
) -> None:
    """Put the two tensors of a weight into its packed experts, and its rule off the list of what is missing.

    ``parts`` has blocks (E, outputs, inputs / 32, 16) and scales (E, outputs, inputs / 32), both uint8.

    Raises:
        BadCheckpoint: one of the two is missing, or of another shape than config.json makes it.
    """
    path, _, leaf = param_name.rpartition(".")
    experts = packed_place(model, path, rules)
    by_part = {key.rpartition("_")[2]: part for key, part in parts.items()}
    if by_part.keys() != {"blocks", "scales"}:
        raise BadCheckpoint(
            f"{param_name} needs its blocks and its scales, and the checkpoint has only "
            f"{' and '.join(parts)}; copy or download its files again."
        )
    blocks, scales = by_part["blocks"], by_part["scales"]
    codes = blocks.flatten(-2)
    shapes = {
        name: spec.shape
        for name, spec in experts.packed(leaf).format.layout(experts.packed(leaf).shape).items()
    }
    if (tuple(codes.shape), tuple(scales.shape)) != (shapes["codes"], shapes["scales"]):
        raise BadCheckpoint(
            f"{param_name} has blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)} in the "
            f"checkpoint, and config.json makes codes {shapes['codes']} and scales {shapes['scales']}; the "
            "two belong to different models."
        )
    experts.take(leaf, {"codes": codes.contiguous(), "scales": scales.contiguous()})
    rules.pop(param_name, None)


__all__ = ["mxfp4_converters", "mxfp4_rules", "take_mxfp4"]
