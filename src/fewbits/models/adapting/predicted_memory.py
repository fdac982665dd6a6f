"""Predicted bytes of a model under a recipe, from its config.json alone.

Counted: weights (packed ones with their scales, a frozen head's 8-bit copies), LoRA adapters, gradients and
AdamW's two float32 moments of whatever trains, and the KV cache. Not counted: activations, the workspace of
kernels, what the allocator wastes.

The model is built without memory (`fewbits.models.packing.model_shapes`) and asked as a loaded one is: which
of its linears and experts the recipe packs is decided by the code that packs them, and which get adapters by
PEFT.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from fewbits.host.spec import spec_for
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.packing.convert import linears_to_replace
from fewbits.models.packing.experts import expert_rules_of
from fewbits.models.packing.model_shapes import built_without_memory, in_float32, model_of_config, numbers_of
from fewbits.models.packing.packed_head import head_rule
from fewbits.recipes.recipe import LoRA, Recipe
from fewbits.recipes.standing_memory import Memory, head_copies

if TYPE_CHECKING:
    from torch import nn

_OPTIMIZER_BYTES = 8  # two float32 moments for each trained value


def predict_memory(
    config: Mapping[str, Any],
    recipe: Recipe,
    *,
    dtype_bytes: int = 2,
    num_tokens: int = 0,
    training: bool = True,
) -> Memory:
    """Bytes of a model under a recipe.

    Args:
        config: the mapping in config.json; one without a ``model_type`` is taken for a Llama's.
        recipe: the recipe.
        dtype_bytes: bytes of a value that is not packed.
        num_tokens: tokens whose keys and values are kept, over all sequences.
        training: count gradients and optimizer.

    Raises:
        BadInput: transformers can build no model of this configuration.
        Unsupported: fewbits does not pack models of this family.
    """
    text = json.dumps(config, sort_keys=True, default=str)
    packed, values, head_values = _weights(text, recipe, dtype_bytes)
    adapters = 0 if recipe.lora is None else _adapter_values(text, recipe.lora)
    trained = 0
    if training:
        packed += head_values * head_copies(recipe) if recipe.lora is not None else 0
        trained = adapters if recipe.lora is not None else values
    return Memory(
        weights=packed,
        lora=adapters * dtype_bytes,
        gradients=trained * dtype_bytes,
        optimizer=trained * _OPTIMIZER_BYTES,
        kv_cache=_cache_bytes(config, recipe, num_tokens, dtype_bytes) if num_tokens else 0,
    )


@lru_cache(maxsize=256)
def _weights(text: str, recipe: Recipe, dtype_bytes: int) -> tuple[int, int, int]:
    """Bytes of weights and tables; values that are not packed; values of the output head."""
    model = model_of_config(json.loads(text))
    linears = {f"{name}.weight": rule.weight for name, rule in linears_to_replace(model, recipe).items()}
    experts = {name: rule.weight for name, rule in expert_rules_of(model, recipe).items()}
    wide = in_float32(model) if dtype_bytes < 4 else set()
    # a buffer that the class makes in the model's dtype is as wide as the model is loaded
    bytes_of = {torch.bfloat16: dtype_bytes}
    stored = sum(b.numel() * bytes_of.get(b.dtype, b.element_size()) for b in model.buffers())
    values = 0
    for name, parameter in model.named_parameters():
        format, shape = (linears | experts).get(name), tuple(parameter.shape)
        if format is None:
            values += parameter.numel()
            stored += parameter.numel() * (4 if name in wide else dtype_bytes)
        elif name in experts and _are_transposed(model, name):
            stored += format.nbytes((shape[0], shape[2], shape[1]))
        elif name in linears and _is_transposed_linear(model, name):
            stored += format.nbytes((shape[1], shape[0]))
        else:
            stored += format.nbytes(shape)
    head = model.get_output_embeddings()
    rule = head_rule(model, spec_for(model), recipe)
    if rule is not None and rule.is_tied and rule.rule.weight is not None:  # a packed copy of the embeddings
        stored += rule.rule.weight.nbytes(tuple(head.weight.shape))
    return stored, values, 0 if head is None else head.weight.numel()


def _are_transposed(model: nn.Module, name: str) -> bool:
    return bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False))


def _is_transposed_linear(model: nn.Module, name: str) -> bool:
    from fewbits.host.transposed import is_transposed

    return is_transposed(model.get_submodule(name.removesuffix(".weight")))


@lru_cache(maxsize=64)
def _adapter_values(text: str, lora: LoRA) -> int:
    """Values of the adapters, as PEFT puts them into a model without memory."""
    with torch.device("meta"):
        adapted = get_peft_model(built_without_memory(json.loads(text)), lora)
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def _cache_bytes(config: Mapping[str, Any], recipe: Recipe, num_tokens: int, dtype_bytes: int) -> int:
    """Bytes of keys and values of every layer that attends."""
    numbers = numbers_of(config)
    kinds = numbers.get("layer_types") or ["attention"] * int(numbers["num_hidden_layers"])
    attending = [kind for kind in kinds if "attention" in kind and "linear" not in kind]
    heads, *sizes = _cached_heads(numbers)
    plain = heads * sum(sizes) * num_tokens * dtype_bytes
    few = plain
    if recipe.kv_cache is not None and not recipe.kv_cache.is_plain:
        sides = zip(("keys", "values"), sizes, strict=True)
        few = heads * sum(recipe.kv_cache.side_bytes(which, num_tokens, size) for which, size in sides)
    # layers of a sliding window and the like keep theirs as the model computes them
    return sum(few if kind in ("attention", "full_attention") else plain for kind in attending)


def _cached_heads(numbers: Mapping[str, Any]) -> tuple[int, int, int]:
    """Heads of one token's keys and values in a layer, and the values of one head of each."""
    heads = int(numbers["num_attention_heads"])
    if numbers.get("kv_lora_rank"):  # latent attention: transformers keeps keys and values as they are used
        keys = int(numbers["qk_nope_head_dim"]) + int(numbers["qk_rope_head_dim"])
        return heads, keys, int(numbers["v_head_dim"])
    size = int(numbers.get("head_dim") or int(numbers["hidden_size"]) // heads)
    num_heads = numbers.get("num_key_value_heads") or numbers.get("num_kv_heads") or heads
    return int(num_heads), size, size


__all__ = ["predict_memory"]
