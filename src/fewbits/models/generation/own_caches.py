"""A cache that the caller brings to ``generate``: read on from its end, and given back longer.

    cache = DynamicCache(config=model.config)      # or StaticCache, or PackedCache
    model(system_ids, past_key_values=cache)                       # or an earlier call of generate filled it
    model.generate(torch.cat([system_ids, more], dim=1), past_key_values=cache)

A step of decoding has a cache of its own. The caller's holds the prompt once the model has read the rest of
it; the new tokens' keys and values are added to it when the text has ended. A layer of a sliding window has
lost what no later token sees, and the step has no need of it.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.families.registry import written_spec
from fewbits.families.shapes import head_dim
from fewbits.kernels.generation.packed_attention import format_codes
from fewbits.models.generation.model_state import is_spread


def continues(cache: Any) -> bool:
    """Whether a step of decoding goes on from this cache: a plain, static or packed one."""
    from transformers.cache_utils import DynamicCache, StaticCache

    from fewbits.models.generation.packed_cache import PackedCache

    if type(cache) not in (DynamicCache, StaticCache, PackedCache) or getattr(cache, "offloading", False):
        return False
    return all(_is_known(layer) for layer in cache.layers)


def check_own_cache(model: Any, cache: Any, ids: Tensor, mask: Any, copies: int) -> None:
    """Raise `BadInput` for a cache that no call with these prompts can go on from.

    Args:
        model: a causal language model.
        cache: the caller's; of kinds that `continues` does not know nothing is said.
        ids: (batch, length): the prompts, what the cache holds included; or what came after it alone, where
            the mask says how long both are.
        mask: (batch, tokens), or None.
        copies: answers, or beams, of each prompt.
    """
    if not continues(cache) or not cache.get_seq_length():
        return
    held, length = int(cache.get_seq_length()), ids.shape[1]
    if isinstance(mask, Tensor) and mask.dim() == 2:
        length = max(length, mask.shape[1])
    if held >= length:
        raise BadInput(
            f"the cache holds {held:,} tokens and the prompt has {length:,}; pass the whole text, what the "
            "cache holds and what came after it, as generate() returns it (cache.crop drops tokens)."
        )
    keys = next((k for layer in cache.layers if (k := _keys_of(layer)) is not None), None)
    texts = len(ids) * copies
    if keys is not None and keys.shape[0] != texts:
        raise BadInput(
            f"the cache is of {keys.shape[0]} texts and the call of {texts}; pass one for each answer "
            "(cache.batch_repeat_interleave makes it of one for each prompt)."
        )
    spec, config = written_spec(model), model.config.get_text_config()
    if keys is None or spec is None or spec.attention is None or is_spread(model):
        return
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    need = config.num_hidden_layers, heads, head_dim(config.to_dict())
    sizes = len(cache.layers), keys.shape[1], keys.shape[3]
    if sizes != need:
        raise BadInput(
            f"the cache has {sizes[0]} layers of {sizes[1]} heads of {sizes[2]} values and the model "
            f"{need[0]} of {need[1]} of {need[2]}: it was filled by another one."
        )


def _keys_of(layer: Any) -> Tensor | None:
    """Keys (batch, heads, tokens, D) that a layer holds in 16 bits; None while there are none."""
    from fewbits.models.generation.packed_cache import PackedLayer

    if isinstance(layer, PackedLayer):
        return layer.heads["keys"].newest if layer.heads else None
    return layer.keys if layer.is_initialized and layer.keys.numel() else None


def cache_to_return(generation_config: Any, keywords: dict[str, Any]) -> Any:
    """The static cache that a call has asked for by name and wants to have back; None in all other calls.

    Args:
        generation_config: what the call asks for.
        keywords: what transformers hands to a loop: among them the cache, empty, that it has made for it.
    """
    from transformers.cache_utils import StaticCache

    cache = keywords.get("past_key_values")
    return cache if generation_config.return_dict_in_generate and type(cache) is StaticCache else None


def _is_known(layer: Any) -> bool:
    from transformers.cache_utils import (
        DynamicLayer,
        DynamicSlidingWindowLayer,
        StaticLayer,
        StaticSlidingWindowLayer,
    )

    from fewbits.models.generation.packed_cache import PackedLayer

    classes = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer, PackedLayer)
    if type(layer) not in classes or getattr(layer, "record_past", False):
        return False
    # Earlier versions of transformers count a static layer's tokens by looking at them.
    return not isinstance(layer, StaticLayer) or isinstance(getattr(layer, "cumulative_length", None), Tensor)


def length_of(cache: Any, ids: Tensor, padding: Tensor, end: int) -> int:
    """Tokens that a cache holds of the prompts ``ids`` (batch, length).

    Args:
        cache: the caller's.
        ids: (batch, length): the prompts, what the cache holds included.
        padding: (batch,) how much of it stands in front of each.
        end: tokens of the longest text that can come of it.

    Raises:
        Unsupported: it holds all of them, or other texts' number, or has no room for the text.
    """
    from transformers.cache_utils import StaticLayer

    from fewbits.models.generation.packed_cache import PackedLayer

    length = int(cache.get_seq_length())
    if length >= ids.shape[1]:
        raise Unsupported("the call's cache holds every token of its prompt already.")
    for layer in cache.layers:
        keys = _keys_of(layer)
        if isinstance(layer, PackedLayer) and not torch.equal(_padding_of(layer, padding), padding):
            raise Unsupported("the call's packed cache was not made for the padding of its prompts.")
        if keys is not None and len(keys) != len(ids):
            raise Unsupported(f"the call's cache is not one of {len(ids)} texts.")
        needed = max(end - 1, ids.shape[1] + 2)  # two more are tried before a step is trusted
        if isinstance(layer, StaticLayer) and not layer.is_sliding and layer.max_cache_len < needed:
            raise Unsupported(
                f"the call's cache has room for {layer.max_cache_len:,} tokens, fewer than the text."
            )
    return length


def _padding_of(layer: Any, like: Tensor) -> Tensor:
    """How much padding (batch,) a packed layer knows of."""
    if layer.padding is None:
        return torch.zeros_like(like)
    padding: Tensor = layer.padding.to(like)
    return padding.repeat_interleave(len(like) // len(padding), dim=0)


def remember(cache: Any) -> Callable[[], None]:
    """What makes the cache again what it is now, whatever a forward of the model adds to it meanwhile."""
    from transformers.cache_utils import StaticLayer

    layers = []
    for layer in cache.layers:
        before = copy(vars(layer))
        if isinstance(layer, StaticLayer):  # written in place
            before["cumulative_length"] = before["cumulative_length"].clone()
            if layer.is_sliding and layer.is_initialized:
                before["keys"], before["values"] = layer.keys.clone(), layer.values.clone()
        if "heads" in before:
            before["heads"] = {which: copy(heads) for which, heads in layer.heads.items()}
        layers.append((layer, before))
    count = len(cache.layers)

    def restore() -> None:
        del cache.layers[count:]
        for layer, before in layers:
            vars(layer).clear()
            vars(layer).update(before)

    return restore


def stored_tokens(layer: Any, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values (batch, heads, n, D) of a layer's last n tokens, which later tokens can see.

    Args:
        layer: of a cache, not a packed one.
        length: tokens that the cache has seen.

    Raises:
        Unsupported: it does not hold them.
    """
    keys, values = layer.keys, layer.values
    if not getattr(layer, "is_sliding", False):
        if int(layer.get_seq_length()) != length or keys.shape[-2] < length:
            raise Unsupported("the model's cache does not hold the whole prompt.")
        return keys[:, :, :length], values[:, :, :length]
    count = min(keys.shape[-2], length)
    return keys[:, :, :count], values[:, :, :count]


def give_back(step: Any, cache: Any, begin: int, end: int) -> None:
    """Add to a cache what a step has made of the tokens from ``begin`` to ``end``."""
    if end <= begin:
        return
    for i, (keys, values) in enumerate(zip(step.keys, step.values, strict=True)):
        if i in step.packed:
            _give_back_packed(step.packed[i], cache.layers[i], end)
        else:
            cache.update(keys[:, :, begin:end], values[:, :, begin:end], i)


def _give_back_packed(packed: Any, layer: Any, end: int) -> None:
    """A packed layer of a cache, with all that a step knows of its ``end`` tokens."""
    kind = packed.kind
    for which, heads in layer.heads.items():
        codes, scales, newest, first = packed.stored(which)
        begin = max(end - kind.newest, 0)
        new = slice(heads.codes.shape[2], begin)
        places = torch.arange(begin, end, device=newest.device) % newest.shape[2]
        new_codes = format_codes(codes[:, :, new], packed.sides[which], which)
        heads.codes = torch.cat([heads.codes, new_codes], dim=2)
        heads.scales = torch.cat([heads.scales, scales[:, :, new]], dim=2)
        heads.newest = newest[:, :, places]
        count = kind.first if layer.padding is not None else min(kind.first, end)
        heads.first = first[:, :, :count].clone()
    layer.cumulative_length = end
