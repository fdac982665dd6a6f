"""``generate`` of a model that may be training, with the right cache, and with what a template gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fewbits.models.generation.loop import with_loop


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate`` in evaluation mode if the model is training with checkpointed layers; the mode comes back.

    transformers drops the key-value cache of such layers and still feeds one token at a time, which gives
    fluent nonsense.
    """
    of_class = type(model).generate
    if isinstance(kwargs.get("input_ids"), Mapping):  # of apply_chat_template, which once gave the ids alone
        kwargs = {**kwargs.pop("input_ids"), **kwargs}
    if not any(m.training and getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        return of_class(model, *args, **with_loop(model, args, kwargs))
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        return of_class(model, *args, **with_loop(model, args, {"use_cache": True, **kwargs}))
    finally:
        for module in training:
            module.training = True
