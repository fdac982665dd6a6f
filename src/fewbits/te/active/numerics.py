"""Which recipe holds now: a value, set by `autocast` for a block of code and read once by each module.

The value lives in a context variable: another thread or task does not see it, and blocks nest. Delayed
scaling needs one thing more, the `Region`: which histories were written since the outermost block began, so
that they advance together when it ends, and those of gradients when the backward pass has come back to the
block's first module.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fewbits.te.active.delayed import DelayedState, advance_together
from fewbits.te.recipe import Recipe
from fewbits.te.support import check_recipe_support, get_default_recipe


class Region:
    """The histories that one outermost `autocast` block touched.

    Attributes:
        forward: states of inputs and weights, in the order of their first use.
        backward: states of gradients.
    """

    def __init__(self) -> None:
        self.forward: dict[int, DelayedState] = {}
        self.backward: dict[int, DelayedState] = {}
        self._has_first = False

    def claim_first(self) -> bool:
        """True for the first module that asks: its backward pass comes last."""
        first, self._has_first = not self._has_first, True
        return first

    def add(self, forward: DelayedState | None, backward: DelayedState | None) -> None:
        """Note the states that a module writes to."""
        for states, state in ((self.forward, forward), (self.backward, backward)):
            if state is not None:
                states[id(state)] = state

    def advance(self, states: dict[int, DelayedState]) -> None:
        """New scales from the amaxes of this step; the histories move on by one."""
        advance_together(states.values())


class Tape:
    """The scales that modules used in a forward pass, for the pass that computes it again.

    Attributes:
        replaying: whether modules read it instead of writing to it.
        started: whether the first pass has begun.
    """

    def __init__(self) -> None:
        self.replaying = self.started = False
        self._scales: deque[Tensor] = deque()
        self._firsts: deque[bool] = deque()

    def scale(self, state: DelayedState) -> Tensor | None:
        """While replaying the scales (any shape) in use at this place; else None, and they are noted."""
        if self.replaying:
            return self._scales.popleft()
        self._scales.append(state.scale.clone())
        return None

    def first(self, region: Region, has_gradients: bool) -> bool:
        """Whether the module at this place came first in its region of those whose gradients are wanted."""
        if self.replaying:
            return self._firsts.popleft()
        self._firsts.append(has_gradients and region.claim_first())
        return self._firsts[-1]


@dataclass(frozen=True)
class Numerics:
    """What holds in a block.

    Attributes:
        enabled: whether operands are quantised.
        calibrating: whether amaxes are recorded although they are not.
        recipe: which scaling.
        group: the process group over which amaxes are taken.
        region: see `Region`; None outside of every block.
        tape: see `Tape`; None where nothing will be computed again.
        outer: what held before the block.
    """

    enabled: bool = False
    calibrating: bool = False
    recipe: Recipe | None = None
    group: Any = None
    region: Region | None = None
    tape: Tape | None = None
    outer: Numerics | None = None


@dataclass(frozen=True)
class WeightInit:
    """Whether modules that are built hold only quantised weights, and by which recipe."""

    enabled: bool = False
    recipe: Recipe | None = None
    preserve_high_precision_init_val: bool = False


_NOTHING, _PLAIN_WEIGHTS = Numerics(), WeightInit()  # frozen
_CURRENT: ContextVar[Numerics] = ContextVar("fewbits_te_numerics", default=_NOTHING)
_INIT: ContextVar[WeightInit] = ContextVar("fewbits_te_weight_init", default=_PLAIN_WEIGHTS)


def current() -> Numerics:
    """What holds here and now."""
    return _CURRENT.get()


def current_init() -> WeightInit:
    """How modules that are built now hold their weights."""
    return _INIT.get()


@contextmanager
def using(numerics: Numerics) -> Iterator[None]:
    """Let a value hold for a block: what a recomputation in the backward pass goes back to."""
    token = _CURRENT.set(numerics)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def enter_region(value: Numerics | None = None) -> None:
    """Begin a block where ``value`` holds, or what held before; the outermost one has a new `Region`."""
    outer = _CURRENT.get()
    value = outer if value is None else value
    _CURRENT.set(replace(value, region=outer.region or Region(), tape=outer.tape, outer=outer))


def leave_region() -> None:
    """End the block; at the end of the outermost one the forward histories advance, if gradients are on."""
    inner = _CURRENT.get()
    outer = inner.outer or Numerics()
    _CURRENT.set(outer)
    if outer.region is None and inner.region is not None and torch.is_grad_enabled():
        inner.region.advance(inner.region.forward)


class autocast:  # noqa: N801 - Transformer Engine's name
    """Within this block the modules of `fewbits.te` quantise the operands of their products.

    Args:
        enabled: False computes in the tensors' own type.
        calibrating: record amaxes for delayed scaling even where nothing is quantised.
        recipe: see `fewbits.te.recipe`; None is `get_default_recipe`.
        amax_reduction_group: process group over which amaxes of delayed scaling are taken.
        _graph: accepted and without meaning here.

    An object may be entered again, also within itself.

    Raises:
        Unsupported: on entry, for a recipe that this GPU lacks.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        self._value = Numerics(enabled, calibrating, recipe, amax_reduction_group)

    def __enter__(self) -> autocast:
        value = self._value
        recipe = value.recipe or get_default_recipe()
        if value.enabled:
            check_recipe_support(recipe)
        enter_region(replace(value, recipe=recipe))
        return self

    def __exit__(self, *_: object) -> None:
        leave_region()


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """`autocast` under its older name and arguments."""
    warnings.warn("fp8_autocast is the older name of autocast.", DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Modules built within this block hold only the quantised form of their weights.

    Args:
        enabled: False builds plain weights.
        recipe: by which the weights are quantised; None is `get_default_recipe`.
        preserve_high_precision_init_val: keep each weight's first value, before it was rounded, on the CPU;
            ``weight.get_high_precision_init_val()`` returns it, ``clear_high_precision_init_val()`` frees it.
    """
    recipe = recipe or get_default_recipe()
    token = _INIT.set(WeightInit(enabled, recipe, preserve_high_precision_init_val))
    try:
        yield
    finally:
        _INIT.reset(token)


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """`quantized_model_init` under its older name."""
    warnings.warn(
        "fp8_model_init is the older name of quantized_model_init.", DeprecationWarning, stacklevel=3
    )
    with quantized_model_init(enabled, recipe, preserve_high_precision_init_val):
        yield
