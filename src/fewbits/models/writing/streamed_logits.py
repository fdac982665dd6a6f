"""Logits of a model whose weights exist one at a time: what an export is proved with.

The model is built on the meta device by transformers' own class. A module's weights are made just before it
computes and dropped right after, so that the memory is that of one weight, whatever the model's size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.models.packing.packed import put


def skeleton(base: Any, *, head_is_tied: bool) -> Any:
    """The plain model of ``base``'s class and configuration, without weights: on the meta device.

    Args:
        base: a model of transformers, packed or not, without PEFT around it.
        head_is_tied: whether the embedding is the output head too.
    """
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.tie_word_embeddings = head_is_tied
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = type(base)(config)
    return model.float().eval()


@contextmanager
def streaming(model: nn.Module, weight: Callable[[str], Tensor]) -> Iterator[None]:
    """While it lasts, each module of a model from `skeleton` has its weights when it computes, and only then.

    Args:
        model: it has no weights before and after.
        weight: gives a tensor by its name in transformers, any dtype.
    """
    hooks = []
    for name, module in list(model.named_modules()):
        own = [leaf for leaf, p in module.named_parameters(recurse=False) if p is not None]
        if own:
            hooks.append(module.register_forward_pre_hook(partial(_fill, name, own, weight)))
            hooks.append(module.register_forward_hook(partial(_empty, own)))
        elif any(True for _ in module.buffers(recurse=False)):  # rotary frequencies: made, not loaded
            put(model, name, type(module)(model.config))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def streamed_logits(model: nn.Module, weight: Callable[[str], Tensor], ids: Tensor) -> Tensor:
    """Logits (B, T, V), float32, on the CPU.

    Args:
        model: from `skeleton`; it has no weights before and after.
        weight: gives a tensor by its name in transformers, any dtype.
        ids: (B, T) tokens.
    """
    with streaming(model, weight):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _fill(name: str, own: list[str], weight: Callable[[str], Tensor], module: nn.Module, args: Any) -> None:
    for leaf in own:
        value = weight(f"{name}.{leaf}").detach().to("cpu", torch.float32)
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def _empty(own: list[str], module: nn.Module, args: Any, output: Any) -> None:
    for leaf in own:
        value = module._parameters[leaf]
        assert value is not None
        module._parameters[leaf] = nn.Parameter(value.to("meta"), requires_grad=False)
