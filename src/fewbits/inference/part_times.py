"""Where the time of a forward pass goes: by kind of linear, both attention products, lm_head and the rest.

The clock is read before and after each module, when the device has finished: the pass is slower for it, its
parts are right. "attention" is what an attention module takes beside its linears: both products, softmax,
rotary positions. "rest" is what no part took: norms, activations, embeddings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fewbits.host.attention import attention_modules


def part_times(model: Any, run: Callable[[], Any]) -> dict[str, float]:
    """Seconds of each part of one pass, the longest first.

    Args:
        model: a Hugging Face model of a known family.
        run: computes the pass.
    """
    seconds: dict[str, float] = {}
    began: list[float] = []
    inside = _Clock(model.device)

    def enter(*_: Any) -> None:
        began.append(inside.now())

    def leave(part: str, within: str | None) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            took = inside.now() - began.pop()
            seconds[part] = seconds.get(part, 0.0) + took
            if within is not None:
                seconds[within] = seconds.get(within, 0.0) - took

        return hook

    attentions = [name for name, _ in attention_modules(model)]
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            within = "attention" if any(name.startswith(f"{a}.") for a in attentions) else None
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave(name.rpartition(".")[2], within)))
        elif name in attentions:
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave("attention", None)))
    try:
        start = inside.now()
        run()
        whole = inside.now() - start
    finally:
        for handle in handles:
            handle.remove()
    seconds["rest"] = whole - sum(seconds.values())
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
