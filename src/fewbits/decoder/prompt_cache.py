"""A prompt through the fused nodes: its keys and values go into a cache on the way.

A pass without gradients that begins a cache reads several tokens that attend to each other alone, as in
training, so that the nodes compute it as they do there, FP8 products included. The tokens that follow, one by
one or behind others, take the layer's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fewbits.host.attention import is_plain_mask

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def begins_a_cache(cache: Any, layer_idx: int | None, x: Tensor, mask: Any) -> bool:
    """Whether the tokens x (B, S, H) are the first of a layer's cache, and all that their mask is about."""
    length = getattr(cache, "get_seq_length", None)
    if length is None or layer_idx is None or x.shape[1] == 1:
        return False
    if isinstance(mask, Tensor) and mask.shape[-1] != x.shape[1] and not is_plain_mask(mask):
        return False  # of a cache whose buffers are longer than what they hold
    return bool(length(layer_idx) == 0)


def filling(attend: Attend, cache: Any, module: Any) -> Attend:
    """The attention of a module, which first leaves k and v (B, kv_heads, S, D) in a cache, if any."""
    if cache is None:
        return attend

    def fill_and_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.update(k.detach(), v.detach(), module.layer_idx)
        return attend(q, k, v)

    return fill_and_attend
