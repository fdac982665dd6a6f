"""Attention of one new token in a step of a model's own modules: keys and values are read once for all heads.

Where several heads of queries share keys and values, transformers up to 5.17 writes keys and values out for
each of them before it calls torch's attention with a mask, for every token anew. With one token the heads of
a group stand where rows of queries would:

    q (B, H, 1, D) as (B, G, H / G, D),  k, v (B, G, T, D),  mask (B, 1, 1, T)

and each row sees the same. The numbers are torch's own, of the same sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fewbits.host.attention import NAMES
from fewbits.host.walks import all_modules
from fewbits.models.generation.step_names import named

_NAME = "fewbits_step"
_THEIRS = ("sdpa", NAMES["sdpa"])  # what it stands in for; eager, and kernels from elsewhere, stay


@contextmanager
def heads_in_groups(model: nn.Module) -> Iterator[None]:
    """While a step runs, attention through torch's of ``model`` goes the way of this file."""
    configs: dict[int, Any] = {id(m.config): m.config for m in all_modules(model) if hasattr(m, "config")}
    chosen = [c for c in configs.values() if getattr(c, "_attn_implementation", None) in _THEIRS]
    if chosen:
        _register()
    with named(chosen, "_attn_implementation", _NAME):
        yield


def _register() -> None:
    """Make the way known to transformers, which has one table of them; no entry of it is changed."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    if _NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(_NAME, _attention)
        AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def _attention(
    module: nn.Module, *operands: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """As transformers calls it: q (B, H, T', D), k and v (B, G, T, D) and a mask; (B, T', H, D)."""
    query, key, value, attention_mask = operands
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    same_for_heads = attention_mask is not None and attention_mask.shape[1:3] == (1, 1)
    if length != 1 or groups == heads or not same_for_heads or _says_more(kwargs):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        out: tuple[Tensor, Tensor | None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, *operands, scaling=scaling, **kwargs
        )
        return out
    rows = query.reshape(batch, groups, heads // groups, query.shape[3])
    y = F.scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return y.reshape(batch, 1, heads, y.shape[3]), None


def _says_more(kwargs: dict[str, Any]) -> bool:
    """Whether something is asked for that only transformers' own function knows."""
    return bool(kwargs.get("dropout")) or any(
        kwargs.get(name) is not None for name in ("softcap", "position_bias", "cache")
    )


__all__ = ["heads_in_groups"]
