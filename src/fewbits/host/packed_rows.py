"""Packed rows do not see each other, whatever is said of a key-value cache.

transformers reads from ``position_ids`` that begin anew where one row of a sequence ends, and masks the
rows from each other; but not in a call that fills a cache, which its models do wherever
``config.use_cache`` says so. There the rows see each other without a word. A cache of several rows is of no
use to anyone, so such a call of a model of ours fills none, in fused layers as in the host's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.nn.segments import KEYWORDS


@dataclass(frozen=True)
class RowsApart:
    """What loading leaves on a model that is not packed: the handle of `keep_rows_apart`."""

    handle: Any


def holds_packed_rows(decoder: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call of a stack of decoder layers has packed rows and would fill a new cache with them.

    Args:
        decoder: the module that holds the layers.
        kwargs: of its call; ``position_ids`` (B, T) on a GPU are waited for where a cache would be filled.
            Under ``torch.compile``, which cannot, any count as packed unless the call says ``use_cache``.
    """
    fills_cache = kwargs.get("use_cache")
    if fills_cache is None:
        fills_cache = getattr(getattr(decoder, "config", None), "use_cache", False)
    if (
        not fills_cache
        or kwargs.get("past_key_values") is not None
        or kwargs.get("attention_mask") is not None
    ):
        return False
    if kwargs.get(KEYWORDS[0]) is not None:
        return True
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.is_meta:
        return False
    if torch.compiler.is_compiling():  # no value is known: only a cache that was asked for by name is filled
        return kwargs.get("use_cache") is None
    return bool((positions.diff(dim=-1) != 1).any())


def keep_rows_apart(decoder: nn.Module) -> Any:
    """Let calls with packed rows fill no cache; the handle takes that out again."""
    return decoder.register_forward_pre_hook(_without_cache, with_kwargs=True)


def _without_cache(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return (args, {**kwargs, "use_cache": False}) if holds_packed_rows(decoder, kwargs) else None
