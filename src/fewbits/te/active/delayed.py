"""Delayed scaling's state: scales and a history of amaxes, a column for each quantised tensor.

Row 0 of the history is this step's, written while the step runs. When it ends, the next amax is the largest
of the whole history ("max") or row 0 ("most_recent"), the history moves on by one row (`torch.roll` by -1),
row 0 becomes 0, and the next scale is `fewbits.te.arithmetic.scaling.updated_scale`. A column whose row 0 is
0 was not written and stays as it is, scale and history, as a weight's does after the first microbatch. With a
function of the user's in place of either rule all columns move, as in Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewbits.te.arithmetic.scaling import LARGEST, updated_scale
from fewbits.te.ranks.distributed import largest_of_group
from fewbits.te.recipe import DelayedScaling, Format
from fewbits.te.tensors.quantizers import Float8Quantizer
from fewbits.te.tensors.roles import DelayedScalingRequest


def codes_dtype(format: Format, *, forward: bool) -> torch.dtype:
    """The type of codes that a recipe's format means for the forward or the backward pass."""
    e4m3 = format is Format.E4M3 or (format is Format.HYBRID and forward)
    return torch.float8_e4m3fn if e4m3 else torch.float8_e5m2


class DelayedState:
    """Scales and histories of a module's forward or backward tensors.

    Attributes:
        scale: (n,) float32, what values are multiplied by; 1 at first.
        amax_history: (length, n) float32.
        recipe: a `DelayedScaling`, or a `DelayedScalingRequest` of a custom recipe.
        group: the process group over which amaxes are taken.
    """

    def __init__(
        self, recipe: DelayedScaling | DelayedScalingRequest, count: int, *, forward: bool, device: Any
    ) -> None:
        self.recipe, self.group = recipe, None
        self.dtype = codes_dtype(recipe.fp8_format, forward=forward)
        self.scale = torch.ones(count, device=device, dtype=torch.float32)
        self.amax_history = torch.zeros(recipe.amax_history_len, count, device=device, dtype=torch.float32)

    def quantizer(self, index: int) -> Float8Quantizer:
        """The quantiser of column ``index``; it reads and writes this state."""
        return Float8Quantizer(self.scale[index], self.amax_history[0, index : index + 1], self.dtype)

    def take_over(self, other: DelayedState) -> None:
        """Go on with another state's tensors; of a history of another length the latest rows that fit."""
        if other.scale.shape != self.scale.shape or other.scale.device != self.scale.device:
            return
        self.scale = other.scale
        if other.amax_history.shape == self.amax_history.shape:
            self.amax_history = other.amax_history
            return
        rows = min(len(self.amax_history), len(other.amax_history))
        self.amax_history[:rows].copy_(other.amax_history[:rows])

    @torch.no_grad()
    def advance(self) -> None:
        """End the step; see the top of this file."""
        recipe, history = self.recipe, self.amax_history
        if recipe.reduce_amax:
            history[0].copy_(largest_of_group(history[0], self.group))
        amax, largest, rule = self._amax(history), LARGEST[self.dtype], recipe.scaling_factor_compute_algo
        if rule is None:
            scale = updated_scale(amax, self.scale, largest, recipe.margin)
        else:
            scale = rule(amax, self.scale, largest, recipe)
        written = history[0] != 0
        if rule is not None or callable(recipe.amax_compute_algo):
            written = torch.ones_like(written)
        self.scale.copy_(torch.where(written, scale, self.scale))
        history.copy_(torch.where(written, torch.roll(history, -1, 0), history))
        history[0].zero_()

    def _amax(self, history: Tensor) -> Tensor:
        chosen = self.recipe.amax_compute_algo
        if callable(chosen):
            amax: Tensor = chosen(history)
            return amax
        return history.amax(0) if chosen == "max" else history[0].clone()
