"""Keys and values in few bits in a step of decoding: their tensors, and what a prompt leaves in them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.families.shapes import head_dim
from fewbits.formats.kv_cache import PLAIN, KVCache
from fewbits.kernels.generation.decode_attention import Rules
from fewbits.kernels.generation.packed_attention import (
    PackedAttention,
    PackedKeysValues,
    empty_cache,
    why_not_packed,
)
from fewbits.models.generation.own_caches import stored_tokens

if TYPE_CHECKING:
    from torch import nn


def why_not_cache(model: Any, kind: KVCache | None) -> str:
    """Why no step of this model reads such a cache; "" if it can, or there is none."""
    if kind is None:
        return ""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    group = heads // (getattr(config, "num_key_value_heads", None) or heads)
    return why_not_packed(kind, head_dim(config.to_dict()), group)


def packed_layer(
    step: Any, number: int, kind: KVCache, qkv: Tensor, attended: Tensor, rules: Rules
) -> tuple[PackedKeysValues, PackedAttention]:
    """The cache of one layer of a step, zeros, and the launch that attends to it and appends.

    Args:
        step: the step, whose positions and tables of the rotation the launch reads.
        number: the layer's.
        kind: which formats.
        qkv: (batch, (heads + 2 kv_heads) D) float32.
        attended: (batch, heads D) in 16 bits: where the result goes.
        rules: how scores come about.

    Raises:
        Unsupported: a format, head size or grouping that the kernel does not take.
    """
    _, kv_heads, _, size = step.keys[number].shape
    cosines, sines = step.rotary_tables
    own = {"cosines": cosines, "sines": sines, "position": step.position, "first": step.first}
    if step.beside is None:
        stored = empty_cache(kind, (step.batch, kv_heads, step.room, size), step.dtype, step.device)
        cache = PackedKeysValues(kind, **stored, **own)
    else:
        cache = replace(rows_of(step.beside.packed[number], slice(step.batch)), **own)
    return cache, PackedAttention(qkv, cache, attended, rules, early=step.early)


def rows_of(cache: PackedKeysValues, rows: slice) -> PackedKeysValues:
    """The cache of some sequences: views of its tensors."""
    names = [f.name for f in fields(cache) if f.name not in ("kind", "cosines", "sines")]
    return replace(cache, **{name: getattr(cache, name)[rows] for name in names})


def pack_prompt(
    cache: PackedKeysValues, keys: Tensor, values: Tensor
) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What `PackedKeysValues.fill` takes of one prompt, for "keys" and "values".

    Args:
        cache: says how.
        keys: (kv_heads, tokens, D) in 16 bits.
        values: alike.
    """
    sides, kind, filled = cache.sides, cache.kind, {}
    for which, states in (("keys", keys), ("values", values)):
        packed = max(states.shape[1] - kind.newest, 0)
        codes, scales = sides[which].pack(states[None, :, :packed])
        newest, first = states[None, :, packed:], states[None, :, : kind.first]
        filled[which] = codes, scales, newest.clone(), first.clone()  # views would keep the prompt alive
    return filled


@torch.no_grad()
def fill_step(step: Any, cache: Any, length: int) -> None:
    """Take over what a model made of a prompt.

    Args:
        step: a `DecodeStep`, or one of a model's modules.
        cache: transformers' cache of the prompt, a `PackedCache` for a step with packed layers.
        length: tokens of the prompt, padding included.

    Raises:
        Unsupported: the cache is not one of every token of every layer.
    """
    from fewbits.models.generation.packed_cache import PackedLayer

    for i, layer in enumerate(cache.layers):
        if int(layer.get_seq_length()) != length or isinstance(layer, PackedLayer) != (i in step.packed):
            raise Unsupported("the model's cache does not hold the whole prompt.")
        if isinstance(layer, PackedLayer):
            for which, heads in layer.heads.items():
                most = length if heads.side.kind == PLAIN else layer.kind.newest
                if heads.newest.shape[2] != min(length, most):
                    raise Unsupported("the packed cache was cropped, and its newest tokens are too few.")
                step.packed[i].fill(which, heads.codes, heads.scales, heads.newest, heads.first)
            continue
        keys, values = stored_tokens(layer, length)
        begin = length - keys.shape[2]
        step.keys[i][:, :, begin:length] = keys
        step.values[i][:, :, begin:length] = values


def packed_keywords(
    model: nn.Module, kind: KVCache | None, mask: Tensor | None, *, whole_windows: bool = False
) -> dict[str, Any]:
    """The word of ``generate`` and of a model's forward that hands over an empty packed cache.

    Args:
        model: the model.
        kind: formats; None: no word.
        mask: (batch, tokens), the call's attention mask, which says how much padding stands in front.
        whole_windows: as `PackedCache` has it.
    """
    if kind is None:
        return {}
    from fewbits.models.generation.packed_cache import PackedCache

    padding = None
    if mask is not None and mask.dim() == 2:
        padding = (mask.cumsum(-1) == 0).sum(-1)
        padding = padding if bool(padding.any()) else None
    return {"past_key_values": PackedCache(model.config, kind, padding=padding, whole_windows=whole_windows)}
