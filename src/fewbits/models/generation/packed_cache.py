"""transformers' cache with keys and values in few bits: the definition, in plain torch.

    cache = PackedCache(model.config, "int4")
    model.generate(**inputs, past_key_values=cache)

A layer of full attention keeps the newest tokens and the first ones of each sequence in 16 bits and all
others as `fewbits.formats.kv_cache` writes them; when it is read, it decodes everything. A query sees what
was packed before its own forward: the prompt's queries see the prompt as it is, and a step of one token sees
the ``newest`` tokens before its own in 16 bits. Layers of a sliding window, of linear attention and of other
kinds are transformers' own and stay as they are.

It does what transformers' own caches do: beam search reorders it, speculation crops it, one prompt is
repeated for a batch. What lies on a cropped-away position is gone; tokens that had been packed do not come
back to 16 bits, so the newest ones are fewer for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.kv_cache import PLAIN, KVCache, Side, get_kv_cache
from fewbits.models.packing.cache_choice import check_cache

_GROWING = ("codes", "scales")


class PackedHeads:
    """Keys, or values, of one layer: packed ones, then the newest and the first in 16 bits.

    Attributes:
        side: how they are packed.
        codes: (batch, heads, packed tokens, row bytes) uint8.
        scales: (batch, heads, packed tokens, groups) float16.
        newest: (batch, heads, up to ``newest`` tokens, size): those behind the packed ones.
        first: (batch, heads, up to ``first`` tokens, size): copies of the first ones.
    """

    def __init__(self, side: Side, like: Tensor) -> None:
        batch, heads, _, size = like.shape
        empty = like.new_empty(batch, heads, 0, size)
        self.side, self.newest, self.first = side, empty, empty
        codes, scales = side.pack(empty) if side.kind != PLAIN else (empty, empty)
        self.codes, self.scales = codes, scales

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name, each (B, heads, ...)."""
        return {name: getattr(self, name) for name in ("codes", "scales", "newest", "first")}

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by what ``change`` makes of it."""
        for name, tensor in self.tensors().items():
            setattr(self, name, change(tensor))

    def read(self, places: Tensor | None) -> Tensor:
        """All tokens (batch, heads, tokens, size), those that are packed decoded.

        Args:
            places: (batch, first tokens) int64: where the first ones stand; None: at the beginning.
        """
        if self.side.kind == PLAIN:
            return self.newest
        whole = self.side.unpack(self.codes, self.scales, self.newest.dtype)
        count = min(self.first.shape[2], whole.shape[2])
        if count and places is None:
            whole[:, :, :count] = self.first[:, :, :count]
        elif count and places is not None:
            rows, which = (places < whole.shape[2]).nonzero(as_tuple=True)
            whole[rows, :, places[rows, which]] = self.first[rows, :, which]
        return torch.cat([whole, self.newest], dim=2)

    def append(self, new: Tensor, most_newest: int) -> None:
        """Add tokens (B, heads, n, D); those no longer among the ``most_newest`` newest are packed."""
        newest = torch.cat([self.newest, new], dim=2)
        surplus = newest.shape[2] - most_newest
        if self.side.kind == PLAIN or surplus <= 0:
            self.newest = newest
            return
        codes, scales = self.side.pack(newest[:, :, :surplus])
        self.codes = torch.cat([self.codes, codes], dim=2)
        self.scales = torch.cat([self.scales, scales], dim=2)
        self.newest = newest[:, :, surplus:].clone()  # a view would keep the prompt's tensor alive

    def crop(self, count: int) -> None:
        """Drop the last ``count`` tokens."""
        num_newest = max(self.newest.shape[2] - count, 0)
        packed = count - (self.newest.shape[2] - num_newest)
        self.newest = self.newest[:, :, :num_newest]
        if packed:
            self.codes, self.scales = self.codes[:, :, :-packed], self.scales[:, :, :-packed]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


class PackedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of full attention.

    Attributes:
        kind: which formats.
        heads: of keys and of values, by "keys" and "values"; empty before the first update.
        padding: (batch,) int64: tokens in front of each sequence that nobody sees; None: none.
    """

    def __init__(self, kind: KVCache, padding: Tensor | None = None) -> None:
        super().__init__()
        self.kind, self.padding = kind, padding
        self.heads: dict[str, PackedHeads] = {}
        self.cumulative_length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty tensors of the shapes that these (batch, heads, tokens, size) have."""
        super().lazy_initialization(key_states, value_states)
        self.keys = self.values = None  # `heads` holds them
        for which, states in (("keys", key_states), ("values", value_states)):
            self.heads[which] = PackedHeads(self.kind.side(which, states.shape[-1]), states)
        if self.padding is not None:
            repeats = len(key_states) // len(self.padding)
            self.padding = self.padding.to(key_states.device).repeat_interleave(repeats, dim=0)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in new states (B, heads, n, D); all states (B, heads, S, D), those packed before decoded."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before, places = self.cumulative_length, self._places()
        self.cumulative_length += key_states.shape[2]
        whole = []
        for which, new in (("keys", key_states), ("values", value_states)):
            heads = self.heads[which]
            whole.append(torch.cat([heads.read(places), new], dim=2) if before else new)
            self._keep_first(heads, new, before, places)
            heads.append(new, self.kind.newest)
        return whole[0], whole[1]

    def _places(self) -> Tensor | None:
        """Where each sequence's first tokens stand (batch, first); None: at the beginning."""
        if self.padding is None:
            return None
        return self.padding[:, None] + torch.arange(self.kind.first, device=self.padding.device)

    def _keep_first(self, heads: PackedHeads, new: Tensor, before: int, places: Tensor | None) -> None:
        """Copies of those of the new tokens that belong to a sequence's first ones."""
        most, count = self.kind.first, new.shape[2]
        if not most or heads.side.kind == PLAIN:
            return
        if places is None:
            if before < most:
                heads.first = torch.cat([heads.first, new[:, :, : most - before]], dim=2)
            return
        if not heads.first.shape[2]:
            heads.first = new.new_zeros(*new.shape[:2], most, new.shape[3])
        at = places - before
        rows, which = ((at >= 0) & (at < count)).nonzero(as_tuple=True)
        heads.first[rows, :, which] = new[rows, :, at[rows, which]]

    def get_seq_length(self) -> int:
        """Tokens of each sequence."""
        return self.cumulative_length

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.heads, self.cumulative_length = {}, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens, as transformers' layers do.

        A positive number is how many tokens stay, as the first versions of transformers 5 say it.
        """
        length = self.cumulative_length
        count = min(-tokens_to_remove, length) if tokens_to_remove <= 0 else max(length - tokens_to_remove, 0)
        if not count or not self.is_initialized:
            return
        self.cumulative_length -= count
        for heads in self.heads.values():
            heads.crop(count)
            if self.padding is None:
                heads.first = heads.first[:, :, : self.cumulative_length]

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        for heads in self.heads.values():
            heads.each(change)

    def _rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self._each(change)
        if self.padding is not None and self.is_initialized:
            self.padding = change(self.padding)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences ``beam_idx`` (batch,), as beam search does."""
        self._rows(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times."""
        self._rows(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices`` (n,), whole numbers."""
        self._rows(lambda t: t[indices.to(t.device)])

    def offload(self) -> None:
        """Everything to host memory."""
        self._each(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Everything back to the layer's device."""
        if self.is_initialized:
            self._each(lambda t: t.to(self.device, non_blocking=True))

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(heads.nbytes for heads in self.heads.values())


class PackedCache(Cache):  # type: ignore[misc]
    """A cache for a model's ``generate`` and forward whose full-attention layers are packed.

    Attributes:
        kind: which formats.
    """

    def __init__(
        self,
        config: Any,
        kind: KVCache | str | Mapping[str, Any] = "int4",
        *,
        padding: Tensor | None = None,
        whole_windows: bool = False,
    ) -> None:
        """An empty cache.

        Args:
            config: the model's.
            kind: formats, by name ("int4", "int8/int4"), as plain data, or a value.
            padding: (batch,) how many tokens of padding stand before each sequence, so that its own first
                tokens are the ones kept in 16 bits.
            whole_windows: layers of a sliding window keep all tokens too, in 16 bits.

        Raises:
            BadInput: an unknown format.
            Unsupported: the model's heads cannot be packed so, or it has no layer of full attention.
        """
        self.kind = get_kv_cache(kind)
        check_cache(self.kind, config)
        layers = DynamicCache(config=config).layers
        for i, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                layers[i] = PackedLayer(self.kind, padding)
            elif whole_windows and isinstance(layer, DynamicLayer):
                layers[i] = DynamicLayer()
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values that it holds."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, PackedLayer):
                total += layer.nbytes
            else:
                total += sum(t.nbytes for t in (layer.keys, layer.values) if t is not None)
        return total

    def for_batch(self, sequences: int) -> PackedCache:
        """This cache for ``sequences`` continuations of its one sequence; itself unchanged.

        Raises:
            BadInput: it holds several sequences already.
        """
        from copy import deepcopy

        shared = deepcopy(self)
        for layer in shared.layers:
            if isinstance(layer, PackedLayer) and any(
                len(heads.newest) != 1 for heads in layer.heads.values()
            ):
                raise BadInput("a prefix for a batch is one sequence; this cache holds several.")
        shared.batch_repeat_interleave(sequences)
        return shared


__all__ = ["PackedCache", "PackedHeads", "PackedLayer", "Unsupported"]
