"""Scales for tensors that are written to float8 before their largest magnitude is known: delayed scaling.

A kernel that makes a tensor in one pass cannot know its largest magnitude beforehand. It writes float8 under
the scale that the magnitudes of earlier steps suggest, cuts what lies beyond, and records the magnitude for
the steps to come (the "delayed" recipe of Transformer Engine). E4M3 is floating point, so that headroom costs
no precision until values become subnormal: a scale for twice the largest magnitude of the last `HISTORY`
steps is taken.

Everything lives on the device, and a step can be captured as a graph. A slot without history quantises by
row, exactly, and records. The host asks whether there is a history until each slot has one: a forward pass
alone records no gradient, and one whose labels are all masked records zeros. From then on nothing waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.formats.blocks import SMALLEST_SCALE
from fewbits.kernels.decoder.gated_activation_triton import Quantized8

HISTORY = 16
HEADROOM = 2.0
_LARGEST = 448.0
_ZERO = _LARGEST * SMALLEST_SCALE  # what rows of zeros record by their scales


class Slot(NamedTuple):
    """One tensor of one layer: its scale, the inverse and the recorded magnitude, each (1,) float32.

    Attributes:
        has_scale: whether there is a scale, from a history.
        recorded: of all slots: whether one was ever used.
        number: which one this is.
    """

    scale: Tensor
    inverse: Tensor
    amax: Tensor
    has_scale: bool
    recorded: list[bool]
    number: int

    def buffer(self, shape: Sequence[int]) -> Quantized8:
        """Where a kernel writes this tensor, (M, N), and its magnitude."""
        self.recorded[self.number] = True
        q = torch.empty(tuple(shape), dtype=torch.float8_e4m3fn, device=self.scale.device)
        return Quantized8(q, self.inverse, self.amax)

    def rows(self, M: int) -> Tensor:
        """The scale of every row (M, 1), as a product takes it."""
        return self.scale.expand(M).contiguous().view(M, 1)

    def record(self, row_amax: Tensor) -> None:
        """Take part in the largest magnitude of this step: (M,) float32."""
        self.recorded[self.number] = True
        torch.maximum(self.amax, row_amax.amax().view(1), out=self.amax)


class DelayedScales:
    """The scales of all layers of a model on one device; slots are numbered."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._amax = torch.zeros(count, device=device, dtype=torch.float32)
        self._history = torch.zeros(HISTORY, count, device=device, dtype=torch.float32)
        self._scale, self._inverse = (
            torch.ones(count, device=device, dtype=torch.float32),
            torch.ones(count, device=device, dtype=torch.float32),
        )
        self._recorded = [False] * count  # a kernel was asked to record
        self._known = [False] * count  # it has recorded a magnitude, and a later pass has begun

    def slot(self, i: int) -> Slot:
        """Slot ``i``, for one pass."""
        at = slice(i, i + 1)
        tensors = self._scale[at], self._inverse[at], self._amax[at]
        return Slot(*tensors, self._known[i], self._recorded, i)

    @torch.no_grad()
    def advance(self) -> None:
        """A forward pass begins: what was recorded becomes history, and the scales follow."""
        sound = self._amax.isfinite() & (self._amax > _ZERO)  # else nothing was recorded, or nothing to go by
        longer = torch.cat([self._amax[None], self._history[:-1]])
        self._history.copy_(torch.where(sound, longer, self._history))
        self._amax.zero_()
        largest = self._history.amax(0)
        self._scale.copy_(torch.where(largest > 0, largest * (HEADROOM / _LARGEST), 1.0))
        torch.reciprocal(self._scale, out=self._inverse)
        self._look(largest)

    def _look(self, largest: Tensor) -> None:
        """Ask the device which of the slots that were used have a history by now, while any is in doubt."""
        capturing = largest.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing or self._known == self._recorded:
            return
        have_history = which_have_history(largest)
        self._known = [used and has for used, has in zip(self._recorded, have_history, strict=True)]

    def state_dict(self) -> dict[str, Tensor]:
        """What a run resumes from: history (steps, slots), amax (slots,), recorded (slots,)."""
        recorded = torch.tensor(self._recorded, dtype=torch.uint8)
        return {"history": self._history.clone(), "amax": self._amax.clone(), "recorded": recorded}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave.

        ``history`` is float32 (steps, slots), ``amax`` float32 (slots,), ``recorded`` uint8 (slots,).
        """
        self._history.copy_(state["history"])
        self._amax.copy_(state["amax"])
        self._recorded[:] = [bool(recorded) for recorded in state["recorded"].tolist()]
        self._known = [False] * len(self._recorded)


def which_have_history(largest: Tensor) -> list[bool]:
    """Of each slot, whether a magnitude stands in its history, whose largest are (slots,) float32: a wait."""
    return [bool(has) for has in (largest > 0).tolist()]
