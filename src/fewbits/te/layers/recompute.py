"""`checkpoint`: keep a function's inputs and compute it again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fewbits.te.active.numerics import Tape, current, using


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, whose intermediate results are computed again when they are needed.

    The second time everything holds that held the first time: the recipe, delayed scaling's scales, which
    may have moved on since, torch.autocast, and random numbers. Amaxes are recorded once.

    Args:
        function: a module or any callable.
        args: its arguments.
        kwargs: its keyword arguments, and these words, which are not passed on: ``use_reentrant`` (torch's;
            False), ``distribute_saved_activations`` (True is refused), ``get_rng_state_tracker`` and
            ``tp_group`` (not needed), and those of `torch.utils.checkpoint.checkpoint`.
    """
    from fewbits.te.layers.module import refuse

    refuse(
        bool(kwargs.pop("distribute_saved_activations", False)),
        "distribute_saved_activations",
        "what is kept stays whole on each rank",
    )
    for word in ("get_rng_state_tracker", "tp_group"):
        kwargs.pop(word, None)
    reentrant = kwargs.pop("use_reentrant", False)
    numerics, tape = current(), Tape()
    if (
        not torch.is_grad_enabled() or numerics.tape is not None
    ):  # what stands inside one is computed again anyway
        for word in ("determinism_check", "preserve_rng_state", "debug", "context_fn"):
            kwargs.pop(word, None)
        return function(*args, **kwargs)

    @contextmanager
    def again() -> Iterator[None]:
        tape.replaying = True
        with using(replace(numerics, tape=tape)):
            yield

    @contextmanager
    def once() -> Iterator[None]:
        with using(replace(current(), tape=tape)):
            yield

    if not reentrant:
        return torch_checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (once(), again()), **kwargs
        )

    def run(*inner: Any) -> Any:
        if tape.started:
            with again():
                return function(*inner, **kwargs)
        tape.started = True
        with once():
            return function(*inner, **kwargs)

    return torch_checkpoint(run, *args, use_reentrant=True)
