"""Predicted bytes of a model under a recipe, from its config.json alone.

Counted: weights (packed ones with their scales, a frozen head's 8-bit copies), LoRA adapters, gradients and
AdamW's two float32 moments of whatever trains, and the KV cache. Not counted: activations, the workspace of
kernels, what the allocator wastes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from fewbits.families.shapes import kv_width, linear_shapes
from fewbits.recipes.recipe import LoRA, Recipe

_OPTIMIZER_BYTES = 8  # two float32 moments for each trained value


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by purpose."""

    weights: int
    lora: int
    gradients: int
    optimizer: int
    kv_cache: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.lora + self.gradients + self.optimizer + self.kv_cache


def predict_memory(
    config: Mapping[str, Any],
    recipe: Recipe,
    *,
    dtype_bytes: int = 2,
    num_tokens: int = 0,
    training: bool = True,
) -> Memory:
    """Bytes of a decoder of the Llama family under a recipe.

    Args:
        config: the mapping in config.json.
        recipe: the recipe.
        dtype_bytes: bytes of a value that is not packed.
        num_tokens: tokens whose keys and values are kept, over all sequences.
        training: count gradients and optimizer.
    """
    linears = linear_shapes(config)
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    packed = values = trained = adapters = 0
    for name, shape in linears.items():
        for layer in range(layers):
            full_name = f"model.layers.{layer}.{name}"
            rule = recipe.rule_for(full_name)
            if rule.weight is None:
                values += prod(shape)
            else:
                packed += rule.weight.nbytes(shape)
            if recipe.lora is not None and _is_target(recipe.lora, name):
                adapters += recipe.lora.r * sum(shape)
    vocabulary = int(config["vocab_size"]) * hidden
    values += vocabulary * (1 if config.get("tie_word_embeddings", False) else 2)
    values += (2 * layers + 1) * hidden
    if training:
        packed += vocabulary * head_copies(recipe) if recipe.lora is not None else 0
        trained = adapters if recipe.lora is not None else values
    return Memory(
        weights=packed + values * dtype_bytes,
        lora=adapters * dtype_bytes,
        gradients=trained * dtype_bytes,
        optimizer=trained * _OPTIMIZER_BYTES,
        kv_cache=layers * 2 * _kv_bytes(config, recipe, num_tokens, dtype_bytes),
    )


def head_copies(recipe: Recipe) -> int:
    """How many 8-bit copies of the head's weight its products in training take: one for each direction."""
    return sum(format is not None for format in (recipe.head.weight_operand, recipe.head.gradient))


def _kv_bytes(config: Mapping[str, Any], recipe: Recipe, num_tokens: int, dtype_bytes: int) -> int:
    shape = (num_tokens, kv_width(config))
    return recipe.kv_cache.nbytes(shape) if recipe.kv_cache is not None else prod(shape) * dtype_bytes


def _is_target(lora: LoRA, name: str) -> bool:
    if isinstance(lora.targets, str):
        return lora.targets == "all-linear" or name.endswith(lora.targets)
    return any(name.endswith(target) for target in lora.targets)
