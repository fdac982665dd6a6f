"""Keys and values of one layer for the slots of a batch, as a model's own forward calls a cache's layer.

`SlotLayer` keeps them as the model computes them. `PackedSlotLayer` keeps them in few bits: the definition of
what decoding's kernels do there. Of each slot's text it holds the newest tokens (a ring) and the first ones
in 16 bits and all others packed, and decodes what a step reads, so that each text sees what it sees alone
(`fewbits.models.generation.packed_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewbits.formats.kv_cache import PLAIN, KVCache
from fewbits.models.generation.live.plan import SlotSize
from fewbits.models.generation.live.prompts import Read


@dataclass(frozen=True)
class Now:
    """Where a step writes.

    Attributes:
        rows: (used, 1) int64: the slots in use.
        places: (used, 1) int64: where each one's new token goes.
        end: behind the last place that is read.
        lengths: the numbers of ``places``, on the host.
    """

    rows: Tensor
    places: Tensor
    end: int
    lengths: Sequence[int]


_NOTHING = Now(torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1, dtype=torch.int64), 0, ())


class SlotLayer:
    """A layer of the cache, as transformers' models call it."""

    is_sliding = False
    is_compileable = False
    is_initialized = True

    def __init__(self, count: int, room: int, keys: Tensor, values: Tensor) -> None:
        """Room for ``count`` texts; of keys and values (heads, tokens, D) only sizes and dtypes count."""
        self.keys, self.values = (x.new_zeros(count, len(x), room, x.shape[2]) for x in (keys, values))
        self.room, self.dtype, self.now = room, keys.dtype, _NOTHING

    def put(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """A text's keys and values (heads, tokens, D) into a slot."""
        for whole, new in ((self.keys, keys), (self.values, values)):
            whole[slot, :, : new.shape[1]] = new

    def move(self, source: int, target: int, end: int) -> None:
        """One slot's text of ``end`` tokens into another one."""
        for whole in (self.keys, self.values):
            whole[target, :, :end] = whole[source, :, :end]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take in the new states (used, heads, 1, D); those of the slots in use, up to the last place."""
        return self._taken(self.keys, key_states), self._taken(self.values, value_states)

    def _taken(self, whole: Tensor, new: Tensor) -> Tensor:
        whole[self.now.rows, :, self.now.places] = new.transpose(1, 2).to(whole.dtype)
        return whole[: len(new), :, : self.now.end]

    def get_seq_length(self) -> int:
        """The longest text; transformers derives nothing from it where positions and masks are given."""
        return self.now.end

    def get_max_length(self) -> int:
        """What a slot holds."""
        return self.room

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask."""
        return self.now.end, 0


class PackedSlotLayer(SlotLayer):
    """A layer whose keys and values are kept in few bits.

    Attributes:
        kind: which formats.
        stored: of "keys" and "values" codes (count, heads, room, row bytes) uint8, scales (count, heads,
            room, groups) float16, newest (count, heads, newest + 1, D), where token n stands at
            n % (newest + 1), and first (count, heads, first, D); of a side that is not packed ``newest``
            alone, with room for all tokens.
    """

    def __init__(self, count: int, room: int, keys: Tensor, values: Tensor, kind: KVCache) -> None:
        """Room for ``count`` texts, as `SlotLayer` has it."""
        super().__init__(0, room, keys, values)
        self.kind = kind
        self.sides = {
            which: kind.side(which, x.shape[2]) for which, x in (("keys", keys), ("values", values))
        }
        self.stored: dict[str, dict[str, Tensor]] = {}
        for which, like in (("keys", keys), ("values", values)):
            side, heads = self.sides[which], len(like)
            if side.kind == PLAIN:
                self.stored[which] = {"newest": like.new_zeros(count, heads, room, side.size)}
                continue
            codes, scales = side.pack(like.new_zeros(1, side.size))
            self.stored[which] = {
                "codes": codes.new_zeros(count, heads, room, codes.shape[-1]),
                "scales": scales.new_zeros(count, heads, room, scales.shape[-1]),
                "newest": like.new_zeros(count, heads, kind.newest + 1, side.size),
                "first": like.new_zeros(count, heads, kind.first, side.size),
            }

    def put(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """A text's keys and values (heads, tokens, D), which are packed, into a slot."""
        for which, new in (("keys", keys), ("values", values)):
            side, stored = self.sides[which], self.stored[which]
            if side.kind == PLAIN:
                stored["newest"][slot, :, : new.shape[1]] = new
                continue
            packed = max(new.shape[1] - self.kind.newest, 0)
            codes, scales = side.pack(new[:, :packed])
            stored["codes"][slot, :, :packed], stored["scales"][slot, :, :packed] = codes, scales
            places = torch.arange(packed, new.shape[1], device=new.device) % (self.kind.newest + 1)
            stored["newest"][slot, :, places] = new[:, packed:]
            first = new[:, : self.kind.first]
            stored["first"][slot, :, : first.shape[1]] = first

    def move(self, source: int, target: int, end: int) -> None:
        """One slot's text of ``end`` tokens into another one."""
        for stored in self.stored.values():
            for name, whole in stored.items():
                most = end if name in ("codes", "scales") else whole.shape[2]
                whole[target, :, :most] = whole[source, :, :most]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take in the new states (used, heads, 1, D); those of the slots in use, the packed ones decoded."""
        return self._packed("keys", key_states), self._packed("values", value_states)

    def _packed(self, which: str, new: Tensor) -> Tensor:
        stored, side, now, used = self.stored[which], self.sides[which], self.now, len(new)
        newest = stored["newest"]
        if side.kind == PLAIN:
            return self._taken(newest, new)
        codes, scales = (stored[name][:used, :, : now.end] for name in ("codes", "scales"))
        whole = side.unpack(codes, scales, newest.dtype)
        # What is not there yet goes to the new token's place, and that is written last.
        recent = now.places - self.kind.newest + torch.arange(self.kind.newest, device=new.device)
        ring = recent.clamp(min=0) % newest.shape[2]
        whole[now.rows, :, torch.where(recent >= 0, recent, now.places)] = newest[now.rows, :, ring]
        begin = torch.arange(self.kind.first, device=new.device).expand(used, -1)
        whole[now.rows, :, torch.where(begin < now.places, begin, now.places)] = stored["first"][
            now.rows, :, begin
        ]
        whole[now.rows, :, now.places] = new.transpose(1, 2).to(whole.dtype)
        self._append(which, whole)
        return whole

    def _append(self, which: str, whole: Tensor) -> None:
        """Pack what is no longer among the newest; the new tokens of ``whole`` (used, heads, end, D) in."""
        stored, now, most = self.stored[which], self.now, self.kind.newest
        leaving = [row for row, length in enumerate(now.lengths) if length >= most]
        if leaving:
            rows = now.rows[leaving]
            places = now.places[leaving] - most
            codes, scales = self.sides[which].pack(stored["newest"][rows, :, places % (most + 1)])
            stored["codes"][rows, :, places], stored["scales"][rows, :, places] = codes, scales
        new = whole[now.rows, :, now.places]
        stored["newest"][now.rows, :, now.places % (most + 1)] = new
        begun = [row for row, length in enumerate(now.lengths) if length < self.kind.first]
        if begun:
            stored["first"][now.rows[begun], :, now.places[begun]] = new[begun]


def size_of_slot(
    read: Read, packed: Sequence[bool], kind: KVCache | None, *, decoded: bool = False
) -> SlotSize:
    """What keys and values of a text take in all layers.

    Args:
        read: any text's, for sizes and dtypes.
        packed: of each layer whether it is packed.
        kind: in which formats; None: as the model computes them.
        decoded: whether a step decodes one layer after the other.
    """
    per_token = fixed = beside = 0
    for keys, values, is_packed in zip(read.keys, read.values, packed, strict=True):
        for which, states in (("keys", keys), ("values", values)):
            heads, size, itemsize = len(states), states.shape[2], states.element_size()
            side = kind.side(which, size) if is_packed and kind is not None else None
            if kind is None or side is None or side.kind == PLAIN:
                per_token += heads * size * itemsize
                continue
            per_token += heads * (side.row_bytes + 2 * (size // side.group))
            fixed += heads * size * itemsize * (kind.newest + 1 + kind.first)
            if decoded:  # codes as numbers, times scales, turned back; then in the model's dtype
                beside = max(beside, heads * size * (12 + 2 * itemsize))
    return SlotSize(per_token + beside, fixed)
