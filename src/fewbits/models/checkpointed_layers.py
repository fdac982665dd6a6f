"""Whether transformers recomputes decoder layers in the backward pass, switched on one model."""

from __future__ import annotations

from typing import Any

import torch

# Functions, local to methods of transformers and PEFT, that let gradients begin at the embeddings.
_LOCAL_HOOK = "<locals>.make_inputs_require_grad"


def checkpoint_layers(model: Any, on: bool) -> None:
    """Have transformers recompute every decoder layer as a whole, or not."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if on:
        # transformers 5.2x renames these methods
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        base.enable_input_require_grads()
    elif any(getattr(module, "gradient_checkpointing", False) for module in base.modules()):
        disable = (
            getattr(base, "activation_checkpointing_disable", None) or base.gradient_checkpointing_disable
        )
        disable()
    _name_hooks(base)


def _name_hooks(base: Any) -> None:
    """Put a function that pickle finds by its name in the place of local ones that do the same."""
    hooks = base.get_input_embeddings()._forward_hooks
    for number, hook in hooks.items():
        if _LOCAL_HOOK in getattr(hook, "__qualname__", ""):
            hooks[number] = _let_gradients_begin


def _let_gradients_begin(module: Any, inputs: Any, output: torch.Tensor) -> None:
    output.requires_grad_(True)
