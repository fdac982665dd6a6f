"""What a step of decoding is made from: when it changes, the step is made and compared anew."""

from __future__ import annotations

from typing import Any

import torch

from fewbits.host.walks import all_modules
from fewbits.models.adapting.checkpointed_layers import let_gradients_begin
from fewbits.models.generation.adapters_by_row import names_adapters


def state_of_model(model: Any) -> tuple[Any, ...]:
    """Which modules it is made of, which adapters take part, where weights lie, who has a forward of its own.

    A model that answers otherwise than before needs another step, and another proof.
    """
    return state_and_writes(model)[0]


def state_and_writes(model: Any) -> tuple[tuple[Any, ...], int]:
    """`state_of_model`, and how often torch has counted a write into frozen weights; in one walk."""
    kinds = ("cuda", "cpu")
    state: list[Any] = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in kinds]
    writes = 0
    of_peft: dict[type, bool] = {}
    module: Any
    for module in all_modules(model):
        kind, children = type(module), module._modules
        if kind not in of_peft:
            of_peft[kind] = isinstance(getattr(kind, "disable_adapters", None), property)
        if "lora_A" in children and hasattr(module, "merged"):
            active = () if module.disable_adapters or module.merged else tuple(module.active_adapters)
            # Of adapters that are not active too: rows of a call may name them.
            state.append((active, tuple(module.scaling.items()), bool(module.merged)))
        elif of_peft[kind]:  # its other methods, and modules that train whole
            scaling = vars(module).get("scaling")
            scales = tuple(scaling.items()) if isinstance(scaling, dict) else ()
            merged = tuple(vars(module).get("merged_adapters") or ())
            state.append((tuple(module.active_adapters), bool(module.disable_adapters), merged, scales))
        state += (id(module), kind)
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            state += _listeners(module)
        for parameter in module._parameters.values():
            if parameter is not None:
                state.append(parameter.data_ptr())
                if not parameter.requires_grad and not parameter.is_inference():
                    writes += parameter._version
        if module._buffers:
            state += [tensor.data_ptr() for tensor in module._buffers.values() if tensor is not None]
    return tuple(state), writes


def _listeners(module: Any) -> list[Any]:
    """Hooks of consequence, and a forward of its own; none where there is neither."""
    own_forward = "forward" in vars(module)
    hooks = (*module._forward_hooks.items(), *module._forward_pre_hooks.items())
    numbers = [n for n, hook in hooks if not names_adapters(hook) and not _asks_for_gradients(hook)]
    return [(*numbers, id(vars(module).get("forward")))] if numbers or own_forward else []


def is_spread(model: Any) -> bool:
    """Whether its weights are spread over several processes."""
    shared = any(vars(module).get("tensor_group") is not None for module in all_modules(model))
    return shared or is_sharded(model)


def is_sharded(model: Any) -> bool:
    """Whether no process has a whole weight of its layers' part (FSDP2)."""
    return any(hasattr(parameter, "placements") for parameter in model.parameters())


def _asks_for_gradients(hook: Any) -> bool:
    """Whether a hook is the one that we, transformers and PEFT put on embeddings: it changes no number.

    Trainers put on a new one between two rollouts, which would cost a new step, and its proof, each time.
    """
    name = getattr(hook, "__name__", "")
    local = name.startswith("make_inputs_require_grad")
    theirs = local and hook.__module__.startswith(("transformers.", "peft."))
    return hook is let_gradients_begin or theirs
