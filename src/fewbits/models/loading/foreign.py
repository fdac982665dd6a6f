"""Checkpoints that other libraries packed: how each of their layouts is found and read.

A layout says in which tensors a weight is stored, by which of them a packed linear is known, and how they
become a packed weight of ours, to the bit. `fewbits.models.loading.hf_quantizer` does the loading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fewbits.errors import SpecMismatch, Unsupported
from fewbits.formats import awq, compressed_tensors, float8_files, gptq, hqq, torchao
from fewbits.formats.base import Packed
from fewbits.formats.bitsandbytes import from_bitsandbytes, from_int8


class Target(NamedTuple):
    """The linear that a packed weight is read for.

    Attributes:
        name: of the linear.
        shape: (N, K).
        dtype: of the layer.
        settings: ``quantization_config`` of config.json.
    """

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    settings: Mapping[str, Any]


class Layout(NamedTuple):
    """One library's way of storing packed linears.

    Attributes:
        parts: the tensors of a linear, by their names after the linear's.
        marks: a linear that has one of these is packed.
        read: makes the packed weight.
    """

    parts: tuple[str, ...]
    marks: tuple[str, ...]
    read: Callable[[Mapping[str, Tensor], Target], Packed]


def scheme_of(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The ``weights`` of the config group of compressed-tensors that a linear belongs to.

    Raises:
        SpecMismatch: it is in none.
    """
    for group in dict(settings.get("config_groups") or {}).values():
        for target in group.get("targets") or ():
            pattern = target.removeprefix("re:")
            named = re.match(pattern, name) if target.startswith("re:") else name.endswith(target)
            if target == "Linear" or named:
                return dict(group.get("weights") or {})
    raise SpecMismatch(
        f"{name} is packed in the checkpoint, but no group of its config.json names it; restore the "
        "config.json that was saved with it."
    )


def holds(settings: Mapping[str, Any]) -> bool:
    """Whether every group of a compressed-tensors config has a format here."""
    try:
        for group in dict(settings.get("config_groups") or {}).values():
            compressed_tensors.format_of(group.get("weights") or {}, "a linear")
    except Unsupported:
        return False
    return True


def _compressed(parts: Mapping[str, Tensor], target: Target) -> Packed:
    scheme = scheme_of(target.settings, target.name)
    return compressed_tensors.from_compressed_tensors(parts, target.name, scheme, target.shape, target.dtype)


LAYOUTS = {
    "bitsandbytes": Layout(
        (
            "weight.nested_absmax",
            "weight.nested_quant_map",
            "weight.quant_map",
            "weight.absmax",
            "weight.quant_state.bitsandbytes__nf4",
            "weight.quant_state.bitsandbytes__fp4",
            "weight_format",
            "SCB",
            "weight",
        ),
        (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4", ".SCB"),
        lambda parts, target: (
            from_int8(parts, target.name, target.dtype) if "SCB" in parts else from_bitsandbytes(parts)
        ),
    ),
    "torchao": Layout(
        torchao.PARTS,
        ("._weight_qdata",),
        lambda parts, target: torchao.from_torchao(parts, target.name, target.settings, target.dtype),
    ),
    "gptq": Layout(
        gptq.PARTS,
        (".qweight",),
        lambda parts, target: gptq.from_gptq(parts, target.name, target.settings, target.dtype),
    ),
    "awq": Layout(
        awq.PARTS,
        (".qweight",),
        lambda parts, target: awq.from_awq(parts, target.name, target.settings, target.dtype),
    ),
    "hqq": Layout(
        hqq.PARTS,
        (".W_q",),
        lambda parts, target: hqq.from_hqq(parts, target.name, target.shape, target.dtype),
    ),
    "compressed-tensors": Layout(compressed_tensors.PARTS, (".weight_scale",), _compressed),
    "fp8": Layout(
        float8_files.PARTS,
        (".weight_scale_inv", ".weight_scale"),
        lambda parts, target: float8_files.from_float8(parts, target.name, target.settings, target.dtype),
    ),
}


MXFP4_SOURCE = "mxfp4"  # experts of gpt-oss; no linears: `fewbits.models.loading.expert_checkpoints`
FOREIGN = (*LAYOUTS, MXFP4_SOURCE)


def packed_names(source: str, model: nn.Module, tensors: Mapping[str, Any]) -> list[str]:
    """The packed linears of a checkpoint.

    Raises:
        SpecMismatch: the model has no such module.
        Unsupported: one is no linear.
    """
    marks = LAYOUTS[source].marks
    names = sorted({key.removesuffix(mark) for key in tensors for mark in marks if key.endswith(mark)})
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise SpecMismatch(
                f"the checkpoint holds {name}, which the model that config.json describes lacks; restore the"
                " config.json that belongs to these weights."
            )
        if not isinstance(modules[name], nn.Linear):
            raise Unsupported(
                f"{name} is packed in the checkpoint and is a {type(modules[name]).__name__}; linears are "
                "read packed, so start from the original model."
            )
    return names
