"""Float8 values of frozen weights that stay from prompt to prompt while a model generates.

A prompt through fused layers with float8 products takes each weight decoded and rounded to E4M3. Training's
memory plan decides whether these values stay from step to step (`Keep.weights`); a model that generates has
no such plan. Here its first prompt decides: they stay, a byte each, where they take at most half of the
memory that is free on their device, for the other half is for keys and values. The numbers are the same
either way.

Values are let go of when the model trains again, and when memory for keys and values is wanted; those of a
weight that has changed are made anew, as `LayerParts` does it in training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fewbits.host.memory import free_bytes
from fewbits.host.receipt import Receipt
from fewbits.words import size

if TYPE_CHECKING:
    from fewbits.decoder.parts import LayerParts

_MOST = 0.5  # of the memory that is free


class PromptWeights:
    """Whether the float8 values of a model's weights stay; one line of its receipt says so.

    Attributes:
        stay: None until a prompt has decided.
    """

    def __init__(self) -> None:
        self.stay: bool | None = None
        self._line = ""

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, which decides by itself."""
        return {"stay": None, "_line": self._line}

    def decide(self, layers: Sequence[LayerParts], receipt: Receipt) -> None:
        """A prompt begins: keep the values from here on, if there is memory for them."""
        needed: Counter[torch.device] = Counter()
        for parts in layers:
            for device, count in parts.float8_weights():
                needed[device] += count
        if not needed:
            self.stay = False
            return
        free = {device: free_bytes(device) for device in needed}
        self.stay = all(needed[device] <= _MOST * free[device] for device in needed)
        sizes = f"{size(needed.total())}, where {size(sum(free.values()))} were free"
        if self.stay:
            said = f"stay from the first prompt on ({sizes}) until the model trains again"
        else:
            said = (
                f"are made for each prompt anew: they take {sizes}, and half of that is for keys and values"
            )
        self._say(receipt, said)
        for parts in layers:
            parts.float8_values(self.stay)

    def let_go(self, layers: Sequence[LayerParts], receipt: Receipt, why: str = "") -> bool:
        """Free the values, if any are kept; with ``why`` they do not come back before the model has trained.

        ``why`` goes on behind "are made for each prompt anew, for". Whether there were any.
        """
        had_any, self.stay = bool(self.stay), False if why else None
        if had_any:
            for parts in layers:
                parts.float8_values(False)
            self._say(receipt, f"are made for each prompt anew, for {why}" if why else "")
        return had_any

    def _say(self, receipt: Receipt, said: str) -> None:
        if self._line in receipt.notes:
            receipt.notes.remove(self._line)
        self._line = f"float8 values of weights {said}" if said else ""
        if said:
            receipt.notes.append(self._line)
