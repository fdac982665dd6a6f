"""How many texts at a time: from what each takes in the cache and from the memory that is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from fewbits.errors import BadInput
from fewbits.host.memory import free_bytes

MOST_SLOTS = 256
_ALWAYS_WHOLE = 8192  # tokens of a forward, for which nobody asks how much memory is free
# What is left for activations, graphs and other programs, of the free memory.
_SHARE = {"cuda": 0.85, "cpu": 0.5}


@dataclass(frozen=True)
class SlotSize:
    """Bytes of one text: of each token that it can have, and whatever its length."""

    per_token: int
    fixed: int = 0

    def of(self, room: int) -> int:
        """Bytes of a text of up to ``room`` tokens."""
        return room * self.per_token + self.fixed


@dataclass(frozen=True)
class SlotPlan:
    """How many slots, and how long.

    Attributes:
        slots: texts at a time.
        room: tokens of each, prompt included.
        bytes: of keys and values of all slots.
    """

    slots: int
    room: int
    bytes: int


def free_share(device: torch.device) -> int:
    """What keys and values may take on a device, with a share left for everything else."""
    return int(free_bytes(device) * _SHARE.get(device.type, 0.5))


def fitting_piece(model: Any, batch: int, length: int) -> int:
    """How many tokens of each of ``batch`` prompts of ``length`` one forward reads: all, or what fits.

    Attention over a piece behind others is slower than over a whole prompt (its mask is no longer plainly
    causal), so that prompts are cut only where a layer's activations would take half of the free memory.
    """
    if batch * length <= _ALWAYS_WHOLE:
        return length
    config = model.config.get_text_config()
    hidden = config.hidden_size
    width = getattr(config, "intermediate_size", None) or 4 * hidden
    each = (4 * width + 8 * hidden) * model.dtype.itemsize * batch
    return min(length, max(free_share(model.device) // 2 // int(each), 256))


def check_slots(at_a_time: Any) -> None:
    """Raise `BadInput` for what is no number of texts at a time; None is as good as a number."""
    whole = isinstance(at_a_time, Integral) and not isinstance(at_a_time, bool)
    if at_a_time is not None and not (whole and 1 <= at_a_time <= MOST_SLOTS):
        raise BadInput(
            f"{at_a_time!r} texts at a time were asked for; give 1 to {MOST_SLOTS}, a whole number."
        )


def plan_slots(lengths: Sequence[int], size: SlotSize, free: int, at_a_time: int | None) -> SlotPlan:
    """Slots for texts of these lengths.

    Args:
        lengths: tokens of each text at most, its prompt included.
        size: keys and values of all layers.
        free: bytes that they may take.
        at_a_time: slots that the caller asks for, as `check_slots` has them; None: as many as fit, up to 256.

    Raises:
        BadInput: the memory does not hold as many as were asked for, or not even one.
    """
    room = max(lengths)
    each, free = size.of(room), max(free, 0)
    fitting = free // max(each, 1)
    needs = (
        f"a text of {room:,} tokens needs {size_in_words(each)} for keys and values, and "
        f"{size_in_words(free)} are there"
    )
    if fitting < 1:
        raise BadInput(f"{needs}; shorten the longest prompt or ask for fewer new tokens.")
    slots = min(at_a_time or MOST_SLOTS, len(lengths))
    if at_a_time is not None and fitting < slots:
        raise BadInput(f"{slots} texts at a time do not fit: {needs}; {fitting} at a time would fit.")
    slots = int(min(slots, fitting))
    return SlotPlan(slots, room, slots * each)


def size_in_words(count: int) -> str:
    """Bytes in words."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
