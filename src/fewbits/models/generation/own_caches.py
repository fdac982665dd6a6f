"""A cache that the caller brings to ``generate``: read on from its end, and given back longer.

    cache = DynamicCache(config=model.config)
    model(system_ids, past_key_values=cache)                       # or an earlier call of generate filled it
    model.generate(torch.cat([system_ids, more], dim=1), past_key_values=cache)

A step of decoding has a cache of its own. The caller's holds the prompt once the model has read the rest of
it; the new tokens' keys and values are added to it when the text has ended.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fewbits.errors import Unsupported


def continues(cache: Any) -> bool:
    """Whether a step of decoding goes on from this cache: transformers' plain one, with all tokens."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    plain = type(cache) is DynamicCache and not getattr(cache, "offloading", False)
    return plain and all(type(layer) is DynamicLayer for layer in cache.layers)


def length_of(cache: Any, ids: Tensor) -> int:
    """Tokens that a cache holds of the prompts ``ids`` (batch, length).

    Raises:
        Unsupported: it holds all of them, or other texts' number.
    """
    length = int(cache.get_seq_length())
    if length >= ids.shape[1]:
        raise Unsupported("the call's cache holds every token of its prompt already.")
    if length and any(len(layer.keys) != len(ids) for layer in cache.layers):
        raise Unsupported(f"the call's cache is not one of {len(ids)} texts.")
    return length


def give_back(step: Any, cache: Any, begin: int, end: int) -> None:
    """Add to a cache what a step has made of the tokens from ``begin`` to ``end``."""
    if end > begin:
        for i, (keys, values) in enumerate(zip(step.keys, step.values, strict=True)):
            cache.update(keys[:, :, begin:end], values[:, :, begin:end], i)
