"""Delayed scaling's state: scales and a history of amaxes, a column for each quantised tensor.

Row 0 of the history is this step's, written while the step runs. When it ends, the next amax is the largest
of the whole history ("max") or row 0 ("most_recent"), the history moves on by one row (`torch.roll` by -1),
row 0 becomes 0, and the next scale is `fewbits.te.arithmetic.scaling.updated_scale`. A column whose row 0 is
0 was not written and stays as it is, scale and history, as a weight's does after the first microbatch. With a
function of the user's in place of either rule all columns move, as in Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Iterable
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

    def advance(self) -> None:
        """End the step; see the top of this file."""
        advance_together([self])


@torch.no_grad()
def advance_together(states: Iterable[DelayedState]) -> None:
    """End the step of several states.

    Those under one recipe in one go, whose few operations a GPU begins much sooner; a user's function sees
    one state at a time.
    """
    alike: dict[tuple[Any, ...], list[DelayedState]] = {}
    for state in states:
        recipe = state.recipe
        is_own = callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None
        key: tuple[Any, ...] = (
            id(recipe),
            state.dtype,
            id(state.group),
            len(state.amax_history),
            state.scale.device,
        )
        key = (id(state),) if is_own else key
        alike.setdefault(key, []).append(state)
    for some in alike.values():
        _advance(some)


def _advance(states: list[DelayedState]) -> None:
    first, widths = states[0], [len(state.scale) for state in states]
    recipe, largest = first.recipe, LARGEST[first.dtype]
    history, old = (
        torch.cat([getattr(state, name) for state in states], -1) for name in ("amax_history", "scale")
    )
    if recipe.reduce_amax:
        history[0].copy_(largest_of_group(history[0], first.group))
    chooses, rule = recipe.amax_compute_algo, recipe.scaling_factor_compute_algo
    if callable(chooses):
        amax: Tensor = chooses(history)
    else:
        amax = history.amax(0) if chooses == "max" else history[0].clone()
    if rule is None:
        scale = updated_scale(amax, old, largest, recipe.margin)
    else:
        scale = rule(amax, old, largest, recipe)
    if rule is None and not callable(chooses):
        written = history[0] != 0
        scale = torch.where(written, scale, old)
        history = torch.where(written, torch.roll(history, -1, 0), history)
    else:
        history = torch.roll(history, -1, 0)
    history[0].zero_()
    torch._foreach_copy_([state.scale for state in states], list(scale.split(widths)))
    torch._foreach_copy_([state.amax_history for state in states], list(history.split(widths, 1)))
