"""Keys and values that stay where they are, as transformers' models write and read them one token at a time.

Every row has ``room`` places; a step writes each row's new key and value at that row's own position, which is
a tensor, and attends to all places under a mask that is made from the positions as well. So a step depends on
no number of the host, and one recording of it serves every position. Windows are a matter of the mask alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.models.generation.fixed_packed import FixedPackedLayer


class FixedLayer:
    """One layer, by the methods that models call.

    Attributes:
        keys, values: (rows, heads, room, size); the two may differ in their size.
        places: (used, 1, 1, 1) int64: where the step at hand writes.
    """

    is_sliding = False
    is_compileable = False
    is_initialized = True

    def __init__(self, keys: Tensor, values: Tensor, rows: int, room: int) -> None:
        """Zeros, of the sizes and dtypes of the keys and values (rows, heads, tokens, size) of a prompt."""
        self.keys, self.values = (
            torch.zeros(rows, x.shape[1], room, x.shape[3], dtype=x.dtype, device=x.device)
            for x in (keys, values)
        )
        self.places = torch.zeros(rows, 1, 1, 1, dtype=torch.long, device=keys.device)

    def clear(self) -> None:
        """Zeros everywhere."""
        self.keys.zero_()
        self.values.zero_()

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values (used, heads, 1, size) to their places; those of all places, in use or not.

        Raises:
            Unsupported: several tokens at once.
        """
        used, heads, tokens = key_states.shape[:3]
        if tokens != 1:
            raise Unsupported("a step of decoding takes one token of each text.")
        stretches = self.keys[:used], self.values[:used]
        for whole, new in zip(stretches, (key_states, value_states), strict=True):
            places = self.places[:used].expand(used, heads, 1, new.shape[-1])
            whole.scatter_(2, places, new.to(whole.dtype))
        return stretches

    def get_seq_length(self) -> int:
        """How many places there are; models derive nothing from it where positions and masks are given."""
        return int(self.keys.shape[2])

    def get_max_cache_shape(self) -> int:
        """What a row holds."""
        return int(self.keys.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask."""
        return int(self.keys.shape[2]), 0


def fixed_layers(cache: Any, rows: int, room: int) -> list[FixedLayer | FixedPackedLayer]:
    """A layer for each one of a prompt's cache, in as many bits.

    Raises:
        Unsupported: something in it is not keys and values by position.
    """
    from fewbits.models.generation.packed_cache import PackedLayer

    layers: list[FixedLayer | FixedPackedLayer] = []
    for layer in cache.layers:
        if isinstance(layer, PackedLayer):
            layers.append(FixedPackedLayer(layer, rows, room))
            continue
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
            raise Unsupported("the model keeps something else than keys and values by position.")
        if keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
            raise Unsupported("the model keeps something else than keys and values by position.")
        layers.append(FixedLayer(keys, values, rows, room))
    return layers


def fixed_cache(layers: Sequence[FixedLayer | FixedPackedLayer]) -> Any:
    """These layers as transformers' ``Cache``, which knows its own kinds of layers alone."""
    from transformers.cache_utils import Cache

    class FixedCache(Cache):
        def get_seq_length(self, layer_idx: int = 0) -> int:
            """How many places there are."""
            return int(self.layers[layer_idx].get_seq_length())

    return FixedCache(layers=list(layers))  # type: ignore[arg-type]  # by their methods, not their ancestors


def masks(
    kinds: Sequence[str], places: Tensor, position: Tensor, first: Tensor, window: int, dtype: torch.dtype
) -> Any:
    """What a model takes for its attention: one mask, or one for each kind of layer that it has.

    Each is (rows, 1, 1, room): 0 where a row may look, the lowest number of ``dtype`` elsewhere.

    Args:
        kinds: "full_attention", "sliding_attention" or both.
        places: (room,) int64, counted from 0.
        position: (rows,) int64: the token at hand, which sees itself.
        first: (rows,) int64: the first that is seen.
        window: tokens that a sliding layer sees.
        dtype: of the mask.
    """
    visible = (places <= position[:, None]) & (places >= first[:, None])
    by_kind = {}
    for kind in kinds:
        looks_at = visible & (places > position[:, None] - window) if kind == "sliding_attention" else visible
        mask = torch.full(looks_at.shape, torch.finfo(dtype).min, dtype=dtype, device=looks_at.device)
        by_kind[kind] = mask.masked_fill_(looks_at, 0)[:, None, None]
    return by_kind if len(by_kind) > 1 else next(iter(by_kind.values()))
