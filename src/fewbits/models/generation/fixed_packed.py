"""Keys and values in few bits that stay where they are, for steps of a model's own modules.

A `PackedLayer` (packed_cache.py) grows and asks the host how long it is. This layer computes the same numbers
over places that stay: codes and scales for ``room`` tokens, and a ring of those in 16 bits. The token at
position p sees the R = ``newest`` tokens before it as they are; then the one at p - R is packed:

    seen(q) = first[q - begin]  if q < begin + first        ring[q]  if p - R <= q < p
              the new one       if q = p                    decoded  else

The ring has two slots more than R: a step that is run again at its position, or at the one before (as a proof
of two tokens does), finds what it needs. What has no place yet goes to one place behind the others, which
nobody sees. All of a layer is decoded in each step, in memory that every layer uses again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.kv_cache import PLAIN, Side

if TYPE_CHECKING:
    from fewbits.models.generation.packed_cache import PackedLayer

_AGAIN = 2  # positions at which a step may be run once more


class _Half:
    """Keys, or values."""

    def __init__(self, side: Side, like: Tensor, sizes: tuple[int, int, int, int]) -> None:
        """Zeros; ``sizes``: rows, room, tokens that are kept as they come, and first ones."""
        (rows, room, newest, first), heads, size = sizes, like.shape[1], like.shape[3]
        plain, self.side, self.room, self.count = side.kind == PLAIN, side, room, newest
        self.whole = like.new_zeros(rows, heads, room + 1, size) if plain else None
        tokens = 0 if plain else room + 1
        self.codes = torch.zeros(rows, heads, tokens, side.row_bytes, dtype=torch.uint8, device=like.device)
        groups = 1 if plain else size // side.group
        self.scales = torch.zeros(rows, heads, tokens, groups, dtype=torch.float16, device=like.device)
        self.ring = like.new_zeros(rows, heads, newest + _AGAIN, size)
        self.first = like.new_zeros(rows, heads, first, size)
        self.slots = torch.arange(newest + _AGAIN, device=like.device)

    def clear(self) -> None:
        """Zeros everywhere."""
        for tensor in (self.whole, self.codes, self.scales, self.ring, self.first):
            if tensor is not None:
                tensor.zero_()

    def fill(self, codes: Tensor, scales: Tensor, newest: Tensor, first: Tensor) -> None:
        """Take over a prompt (batch, heads, tokens, ...): what is packed, what is behind it, the first."""
        rows, packed, count = len(newest), codes.shape[2], newest.shape[2]
        if self.whole is not None:
            self.whole[:rows, :, :count] = newest
            return
        self.codes[:rows, :, :packed], self.scales[:rows, :, :packed] = codes, scales
        slots = (packed + torch.arange(count, device=newest.device)) % len(self.slots)
        self.ring[:rows, :, slots] = newest
        self.first[:rows, :, : first.shape[2]] = first

    def update(self, new: Tensor, place: Tensor, begin: Tensor) -> Tensor:
        """All tokens (used, heads, room, D) with the new ones (used, heads, 1, D), each at its ``place``.

        ``place`` and ``begin``, the first that is seen, are (used, 1, 1, 1) int64.
        """
        used = len(new)
        if self.whole is not None:
            whole = self.whole[:used]
            return _put(whole, place, new)[:, :, : self.room]
        whole = self.side.unpack(self.codes[:used], self.scales[:used], new.dtype)
        first, ring = self.first[:used], self.ring[:used]
        if first.shape[2]:
            at = begin + torch.arange(first.shape[2], device=new.device)
            whole = _put(whole, self._seen(at, place), first)
        before = place - 1 - (place - 1 - self.slots) % len(self.slots)  # what each slot holds
        held = torch.where(before >= place - self.count, self._seen(before, place), self.room)
        whole = _put(whole, held, ring)
        whole = _put(whole, place, new)
        self._append(new, place, begin)
        return whole[:, :, : self.room]

    def _seen(self, at: Tensor, place: Tensor) -> Tensor:
        """Places (used, 1, 1, n) that stand before ``place``; of others the one that nobody sees."""
        return torch.where((at >= 0) & (at < place), at, self.room)

    def _append(self, new: Tensor, place: Tensor, begin: Tensor) -> None:
        used, slots = len(new), len(self.slots)
        ring, first = self.ring[:used], self.first[:used]
        leaves = place - self.count
        slot = (leaves % slots).expand(*new.shape)
        codes, scales = self.side.pack(ring.gather(2, slot))
        to = torch.where(leaves >= 0, leaves, self.room)
        _put(self.codes[:used], to, codes)
        _put(self.scales[:used], to, scales)
        _put(ring, place % slots, new)
        if first.shape[2]:
            at = (place - begin).clamp(0, first.shape[2] - 1)
            before = first.gather(2, at.expand(*new.shape))
            _put(first, at, torch.where(place - begin < first.shape[2], new, before))


def _put(into: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Write values (used, heads, n, D) to their places (used, 1, 1, n) of (used, heads, tokens, D)."""
    index = places.transpose(2, 3).expand(*values.shape)
    return into.scatter_(2, index, values.to(into.dtype))


class FixedPackedLayer:
    """One layer, by the methods that models call; see `FixedLayer`, in whose place it stands.

    Attributes:
        places: (used, 1, 1, 1) int64: where the step at hand writes.
        begin: (used, 1, 1, 1) int64: the first place of each text that is seen.
        keys, values: (rows, heads, 0, size), as a step names what it holds in 16 bits.
    """

    is_sliding = False
    is_compileable = False
    is_initialized = True

    def __init__(self, layer: PackedLayer, rows: int, room: int) -> None:
        """Zeros, of the sizes, formats and dtypes of a prompt's layer."""
        kind, self._room = layer.kind, room
        self._halves = {
            which: _Half(heads.side, heads.newest, (rows, room, kind.newest, kind.first))
            for which, heads in layer.heads.items()
        }
        of_keys, of_values = layer.heads["keys"].newest, layer.heads["values"].newest
        self.keys, self.values = of_keys.new_zeros(rows, 1, 0, 1), of_values.new_zeros(rows, 1, 0, 1)
        self.places = torch.zeros(rows, 1, 1, 1, dtype=torch.long, device=self.keys.device)
        self.begin = torch.zeros_like(self.places)

    def clear(self) -> None:
        """Zeros everywhere."""
        for half in self._halves.values():
            half.clear()

    def fill(self, which: str, codes: Tensor, scales: Tensor, newest: Tensor, first: Tensor) -> None:
        """Take over "keys" or "values" (batch, heads, tokens, ...) of a prompt as a packed layer has them."""
        self._halves[which].fill(codes, scales, newest, first)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values (used, heads, 1, size) to their places; those of all places.

        Raises:
            Unsupported: several tokens at once.
        """
        used, tokens = len(key_states), key_states.shape[2]
        if tokens != 1:
            raise Unsupported("a step of decoding takes one token of each text.")
        at = self.places[:used], self.begin[:used]
        keys, values = self._halves["keys"], self._halves["values"]
        return keys.update(key_states, *at), values.update(value_states, *at)

    def get_seq_length(self) -> int:
        """How many places there are."""
        return self._room

    def get_max_cache_shape(self) -> int:
        """What a row holds."""
        return self._room

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask."""
        return self._room, 0
