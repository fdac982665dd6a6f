"""A language model of a given shape with random weights, made where it stays: a packed one is never plain.

The weights follow from their names, so that a plain and a packed model of one shape have the same ones, on
any device of one kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import torch
from torch import nn

from fewbits.bench.train.shapes import SHAPES
from fewbits.models.loading.in_memory import convert
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes.recipe import Recipe

WIDE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
FIELDS = {**SHAPES, "llama-3.1-70b": {**SHAPES["llama-3.1-8b"], **WIDE}}


def config_of(shape: str, layers: int | None = None) -> Any:
    """The configuration of a shape, perhaps of fewer layers."""
    from transformers import AutoConfig

    fields = dict(FIELDS[shape]) | {"use_cache": True}
    if layers is not None:
        fields["num_hidden_layers"] = layers
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def empty_model(config: Any, recipe: Recipe | None = None) -> Any:
    """On the meta device, in bfloat16, converted if a recipe is given."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    if recipe is not None:
        convert(model, recipe)
    return model.eval().requires_grad_(False)


def fill(model: Any, place: Callable[[str], torch.device | str]) -> Any:
    """Weights for an `empty_model`, one tensor after the other, each where ``place`` of its name says."""
    for name, module in model.named_modules():
        device = torch.device(place(name))
        if isinstance(module, QuantizedLinear):
            shape = (module.out_features, module.in_features)
            module.pack(_weight(f"{name}.weight", shape, module.dtype, device))
            continue
        for key, old in module.named_parameters(recurse=False):
            new = _weight(f"{name}.{key}", tuple(old.shape), old.dtype, device)
            module.register_parameter(key, nn.Parameter(new, requires_grad=False))
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, buffer.to(device))
    return model


def _weight(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(crc32(name.encode()))
    return torch.randn(shape, dtype=dtype, device=device, generator=generator).mul_(0.02)
