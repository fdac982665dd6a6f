"""What one model recomputes in its backward pass: by its fused layers, or by transformers, layer by layer.

What the user chose (``use_gradient_checkpointing``) wins over a trainer's default: transformers' Trainer and
TRL switch recomputation on through methods of the model, and `recompute_as` gives one instance its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fewbits.decoder.fuse import fused_layers
from fewbits.decoder.keep import keep_for
from fewbits.host.record import part_of, put_part
from fewbits.host.unwrap import unwrap

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("fewbits")
# transformers 5.2x renames these methods
_ENABLE, _ENABLE_BEFORE = "activation_checkpointing_enable", "gradient_checkpointing_enable"
# Functions, local to methods of transformers and PEFT, that let gradients begin at the embeddings.
_LOCAL_HOOK = "<locals>.make_inputs_require_grad"


@dataclass(frozen=True)
class Checkpointing:
    """What `recompute_as` leaves on a model: what the user chose."""

    choice: bool | float | str


def recompute_as(model: nn.Module, choice: bool | float | str) -> None:
    """Recompute as ``use_gradient_checkpointing`` says, now and when a trainer asks for something else.

    Fused layers recompute by themselves (`fewbits.decoder.keep.keep_for` says what); others through
    transformers, as a whole, for True and "unsloth". "auto" and a number of GiB say nothing of these: a
    trainer may.
    """
    keep, layers, base = keep_for(choice), fused_layers(model), unwrap(model)
    for layer in layers:
        layer.keep = keep
    checkpoint_layers(model, not layers and not keep.mlp)
    put_part(model, Checkpointing(choice))
    for name in (_ENABLE, _ENABLE_BEFORE):
        if hasattr(type(base), name):
            setattr(base, name, _AsChosen(base))


def chosen(model: nn.Module) -> bool | float | str | None:
    """What `recompute_as` was told last; None if nothing."""
    part = part_of(model, Checkpointing)
    return None if part is None else part.choice


class _AsChosen:
    """A model's ``gradient_checkpointing_enable`` under which the user's choice holds; a line says so."""

    def __init__(self, base: nn.Module) -> None:
        self.base, self.said = base, False

    def __call__(self, gradient_checkpointing_kwargs: Any = None, **options: Any) -> None:
        """With arguments of torch's checkpoint and of which layers, as transformers' methods take them."""
        keywords = options.pop("activation_checkpointing_kwargs", gradient_checkpointing_kwargs)
        choice, is_fused = chosen(self.base), bool(fused_layers(self.base))
        if not is_fused and choice is not False:  # it recomputes whole layers, as the trainer asks it to
            with _own_methods(self.base):
                _enabling(self.base)(keywords, **options)
            _name_hooks(self.base)
        elif not self.said:
            self.said = True
            how = "fused layers recompute by themselves" if choice else "nothing is recomputed"
            logger.warning(
                f"use_gradient_checkpointing={choice!r}, as fewbits was told, wins over the trainer's "
                f"gradient_checkpointing=True: {how}; FastLanguageModel.for_training(model, "
                "use_gradient_checkpointing=...) chooses anew."
            )


@contextlib.contextmanager
def _own_methods(base: nn.Module) -> Iterator[None]:
    """The class's methods in the place of `_AsChosen`."""
    methods = {
        n: vars(base).pop(n) for n in (_ENABLE, _ENABLE_BEFORE) if isinstance(vars(base).get(n), _AsChosen)
    }
    try:
        yield
    finally:
        vars(base).update(methods)


def _enabling(base: nn.Module) -> Any:
    return getattr(base, _ENABLE, None) or getattr(base, _ENABLE_BEFORE)


def checkpoint_layers(model: nn.Module, on: bool) -> None:
    """Have transformers recompute every decoder layer as a whole, or not."""
    base = unwrap(model)
    if on:
        with _own_methods(base):
            _enabling(base)({"use_reentrant": False})
        base.enable_input_require_grads()
    elif any(getattr(module, "gradient_checkpointing", False) for module in base.modules()):
        disable = (
            getattr(base, "activation_checkpointing_disable", None) or base.gradient_checkpointing_disable
        )
        disable()
    _name_hooks(base)


def _name_hooks(base: Any) -> None:
    """Put one function that pickle finds by its name in the place of local ones that do the same.

    transformers adds one at each call, also where one is there, and knows how to take the last one away.
    """
    hooks = base.get_input_embeddings()._forward_hooks
    for number, hook in hooks.items():
        if _LOCAL_HOOK in getattr(hook, "__qualname__", ""):
            hooks[number] = let_gradients_begin
    for number in [number for number, hook in hooks.items() if hook is let_gradients_begin][:-1]:
        del hooks[number]


def let_gradients_begin(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    """A hook: what an embedding gives, (..., hidden), has a gradient; its numbers stay."""
    output.requires_grad_(True)
