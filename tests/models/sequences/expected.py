"""Which layers must run fused, said from what a sequence did; and each call of a layer held against that.

The rules are those of the documentation, written here once more: a lost fast path fails as a difference does,
and so does a fast path over something that it passes by. They read what the sequence itself put into the
model (`Placed`), what PEFT says of its adapters, and the arguments of the call; nothing of fewbits.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from fewbits.decoder.fuse import FusedForward
from fewbits.decoder.parts import LayerParts
from fewbits.host.attention import is_plain_mask

FUSED, OWN_FOR_CACHE, EITHER = "fused", "own forward, over a cache, without gradients", "either"


class Differs(AssertionError):
    """Fused and plain do not agree, or a layer ran otherwise than it must."""


@dataclass
class Placed:
    """What a sequence has put into its models, beside adapters.

    Attributes:
        inside: (number of the layer, path) of what has a hook, or a forward of its own, or was replaced.
        everywhere: there is a hook on every module.
        cache_asked: the call that runs asked for a cache.
    """

    inside: set[tuple[int, str]] = field(default_factory=set)
    everywhere: bool = False
    cache_asked: bool = False


def expected(layer: Any, number: int, placed: Placed, has_cache: bool, kwargs: dict[str, Any]) -> set[str]:
    """Patterns of the reasons why this call of a layer must take its own forward.

    Args:
        layer: a decoder layer of transformers.
        number: its place.
        placed: what the sequence put in.
        has_cache: the call fills a cache.
        kwargs: further arguments of the call.
    """
    reasons = set()
    if has_cache:
        reasons.add("KV cache" if torch.is_grad_enabled() else OWN_FOR_CACHE)
    if placed.everywhere:
        reasons.add("hooks on every module")
    reasons |= {
        rf"{re.escape(path.split('.lora_')[0])} (has hooks|has a forward|was (replaced|changed))"
        for n, path in placed.inside
        if n == number
    }
    if kwargs.get("output_attentions") or layer.self_attn.config.output_attentions:
        reasons.add("attention weights")
    if layer.training and layer.self_attn.config.attention_dropout:
        reasons.add("configuration asks for dropout")
    for _, module in layer.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
            reasons |= _of_adapter(module)
    return reasons


def _of_adapter(module: Any) -> set[str]:
    if type(module).__module__.startswith("peft."):  # once DoRA was there, for good
        return {"adapter of the kind"}
    variants = getattr(module, "lora_variant", {})
    if module.disable_adapters or module.merged_adapters:
        return {EITHER} if variants else set()
    active = [name for name in module.active_adapters if name in module.lora_A]
    reasons = set()
    if any(name in variants for name in active):
        reasons.add("variant of LoRA|adapter of the kind|several adapters")
    elif variants:
        reasons.add(EITHER)
    if len(active) > 1:
        reasons.add("several adapters")
    for name in active:
        drop = module.lora_dropout[name]
        if isinstance(drop, nn.Dropout) and drop.training and drop.p:
            reasons.add("the adapter has dropout|several adapters")
        if module.lora_bias[name]:
            reasons.add("adapter has a bias|several adapters")
    return reasons


class _Outcome(threading.local):
    """How the layer call that runs in this thread ended."""

    said: str | None = None


class Watch:
    """Holds each call of a fused layer against what is expected.

    Attributes:
        placed: what the sequence put in.
        counted: layer calls by how they ran.
        problem: the first one that ran otherwise.
    """

    def __init__(self, placed: Placed) -> None:
        self.placed, self.counted, self.problem = placed, Counter[str](), ""
        self._outcome = _Outcome()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """While this lasts every fused layer's call is watched."""
        outcome, own_call, run, note = (
            self._outcome,
            FusedForward.__call__,
            LayerParts.run,
            FusedForward._note,
        )

        def called(forward: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            has_cache = kwargs.get("past_key_values") is not None
            others = {k: v for k, v in kwargs.items() if k == "output_attentions"}
            mask = kwargs.get("attention_mask", args[0] if args else None)
            is_prompt = has_cache and begins(_number(forward), x, mask, kwargs["past_key_values"])
            reasons = expected(
                forward.layer, _number(forward), self.placed, has_cache and not is_prompt, others
            )
            if is_prompt and reasons - {EITHER}:  # a prompt takes its own forward without a word
                reasons = {OWN_FOR_CACHE}
            unasked = has_cache and not self.placed.cache_asked
            if unasked and (torch.is_grad_enabled() or forward.layer.training):
                self._complain(f"layer {_number(forward)} fills a cache that nobody asked for")
            outcome.said = None
            result = own_call(forward, x, *args, **kwargs)
            self._judge(_number(forward), reasons, outcome.said or OWN_FOR_CACHE)
            return result

        def ran(parts: Any, *args: Any, **kwargs: Any) -> Any:
            result = run(parts, *args, **kwargs)
            outcome.said = FUSED
            return result

        def noted(forward: Any, reason: str) -> None:
            before = forward.fusion.fallbacks[reason]
            note(forward, reason)
            if forward.fusion.fallbacks[reason] <= before:
                self._complain(f"the counter did not count {reason!r}")
            outcome.said = reason

        with (
            patch.object(FusedForward, "__call__", called),
            patch.object(FusedForward, "_note", noted),
            patch.object(LayerParts, "run", ran),
        ):
            yield

    def _judge(self, number: int, reasons: set[str], said: str) -> None:
        self.counted[said] += 1
        either, reasons = EITHER in reasons, reasons - {EITHER}
        right = any(re.search(r, said) for r in reasons) if reasons else said == FUSED
        if not right and not either:
            must = f"take its own forward ({', '.join(sorted(reasons))})" if reasons else "run fused"
            self._complain(f"layer {number} must {must}, and: {said}")

    def _complain(self, text: str) -> None:
        self.problem = self.problem or text

    def check(self) -> None:
        """Raise `Differs` for the first call that ran otherwise than expected."""
        if self.problem:
            problem, self.problem = self.problem, ""
            raise Differs(problem)


def begins(number: int, x: Any, mask: Any, cache: Any) -> bool:
    """Whether this call of a layer reads a prompt x (B, S, H) into an empty cache, without gradients."""
    whole = not isinstance(mask, torch.Tensor) or mask.shape[-1] == x.shape[1] or is_plain_mask(mask)
    empty = whole and x.shape[1] > 1 and cache.get_seq_length(number) == 0
    return bool(empty) and not torch.is_grad_enabled()


def _number(forward: Any) -> int:
    return int(forward.layer.self_attn.layer_idx)
