"""A receipt of what ran: every product that a model makes stochastic, counted while it computes.

A model whose attention was exchanged, or whose linears are read by a fused kernel, gives figures that look
like stochastic ones and are not. So within `products_counted` each call of a stochastic linear and each
stochastic attention is counted, and at the end each must have come once for every pass of its decoder layer;
a linear of an expert once for every pass in which a row was sent to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.host.spec import layer_names, spec_for
from fewbits.models.stochastic.attention import stochastic_attention_of
from fewbits.nn.split_experts import SplitExperts, hit_experts
from fewbits.nn.stochastic.attention import AttentionProducts
from fewbits.nn.stochastic.linear import StochasticLinear

if TYPE_CHECKING:
    from torch import nn


@dataclass
class Counted:
    """What ran so far.

    Attributes:
        passes: by decoder layer, how often it ran.
        linears: by full name, how often a stochastic or INT8 linear did.
        attentions: by full name, how often a stochastic attention did.
        experts: by full name of each single expert with stochastic linears, how often rows were sent to it.
        groups: by name of a product whose rows are grouped by thresholds, whether a row was in each group
            (bool, on the product's device: the host asks for it at the end, and waits for no pass).
    """

    passes: dict[str, int] = field(default_factory=dict)
    linears: dict[str, int] = field(default_factory=dict)
    attentions: dict[str, int] = field(default_factory=dict)
    experts: dict[str, int] = field(default_factory=dict)
    groups: dict[str, Tensor] = field(default_factory=dict)

    def empty_groups(self) -> list[str]:
        """Groups of rows that no row was in, such as "group 2 of model.layers.0.mlp.down_proj"."""
        return [
            f"group {group + 1} of {name}"
            for name, had_rows in self.groups.items()
            for group, had in enumerate(had_rows.tolist())
            if not had
        ]

    def sentence(self) -> str:
        """For a receipt.

        Raises:
            Unsupported: a product did not come in every pass of its layer.
        """
        for kind, counts in (("product", self.linears), ("attention", self.attentions)):
            for name, count in counts.items():
                layer = next((one for one in self.passes if name.startswith(f"{one}.")), None)
                expected = count if layer is None else self.passes[layer]
                expected = self.experts.get(name.rpartition(".")[0], expected)
                if count != expected:
                    raise Unsupported(
                        f"the stochastic {kind} of {name} ran {count} times in {expected} passes of its "
                        "layer, so it was computed elsewhere; undo what replaced its forward (fused layers, "
                        "for one)."
                    )
        passes = max(self.passes.values(), default=0)
        text = (
            f"{len(self.linears)} linears and {len(self.attentions)} attentions ran in streams or INT8 "
            f"codes, in each of {passes} passes"
        )
        if not self.experts:
            return text
        idle = sum(count == 0 for count in self.experts.values())
        return f"{text} (the linears of {len(self.experts)} experts where rows came; to {idle} none did)"


@contextmanager
def products_counted(model: nn.Module) -> Iterator[Counted]:
    """Within it, stochastic products are counted; at its end each has come in every pass.

    Args:
        model: a Hugging Face model of a known family, under a stochastic configuration or not.

    Raises:
        Unsupported: at the end, a product was computed elsewhere.
    """
    counted = Counted()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, StochasticLinear)}
    state = stochastic_attention_of(model)
    if not linears and state is None:
        yield counted
        return
    handles = [*_watched_linears(counted, linears), *_watched_experts(counted, model)]
    for name in layer_names(model, spec_for(model)):
        counted.passes[name] = 0
        handles.append(model.get_submodule(name).register_forward_hook(_adding(counted.passes, name)))
    on_attention = _attending(counted)
    if state is not None:
        counted.attentions.update(dict.fromkeys(sorted(state.wanted), 0))
        state.listeners.append(on_attention)
    try:
        yield counted
    finally:
        for handle in handles:
            handle.remove()
        if state is not None:
            state.listeners.remove(on_attention)
    counted.sentence()


def _watched_linears(counted: Counted, linears: dict[str, StochasticLinear]) -> Iterator[Any]:
    """Hooks that count calls, and the groups of rows that thresholds make."""
    for name, linear in linears.items():
        counted.linears[name] = 0
        yield linear.register_forward_hook(_adding(counted.linears, name))
        limits = linear.length_thresholds
        if limits is not None and not linear.int8:
            had_rows = torch.zeros(len(limits) + 1, dtype=torch.bool, device=limits.device)
            counted.groups[name] = had_rows
            if linear.level_index is None:  # all groups have one length, so the layer does not look at them
                yield linear.register_forward_pre_hook(_grouping(had_rows))
            else:
                yield _Listening(linear, partial(_note_groups, had_rows))


def _watched_experts(counted: Counted, model: nn.Module) -> Iterator[Any]:
    """Hooks that count to which experts rows are sent; of those whose linears `_watched_linears` watches."""
    stochastic = {name.rpartition(".")[0] for name in counted.linears}
    for name, module in model.named_modules():
        if isinstance(module, SplitExperts):
            own = [f"{name}.{i}" for i in range(module.count) if f"{name}.{i}" in stochastic]
            counted.experts.update(dict.fromkeys(own, 0))
            hook = _sending(counted.experts, name, module.count)
            yield module.register_forward_pre_hook(hook, with_kwargs=True)


def _attending(counted: Counted) -> Callable[[str, Tensor, Tensor, AttentionProducts], None]:
    full: set[str] = set()

    def on_attention(name: str, q: Tensor, weights: Tensor, products: AttentionProducts) -> None:
        counted.attentions[name] += 1
        count = counted.attentions[name]
        plans = (("scores", products.scores_plan, q), ("values", products.values_plan, weights))
        for op, plan, rows in plans:
            own = f"{name}, {op}"
            if not plan.thresholds or own in full:
                continue
            if own not in counted.groups:
                counted.groups[own] = torch.zeros(len(plan.lengths), dtype=torch.bool, device=rows.device)
            groups = plan.groups(rows)
            assert groups is not None  # as there are thresholds
            _note_groups(counted.groups[own], groups)
            if count & (count - 1) == 0 and bool(counted.groups[own].all()):  # asked in few passes
                full.add(own)

    return on_attention


def _sending(
    counts: dict[str, int], name: str, count: int
) -> Callable[[Any, tuple[Tensor, ...], dict[str, Tensor]], None]:
    def hook(_: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        for expert in hit_experts(args[1] if len(args) > 1 else kwargs["top_k_index"], count):
            if f"{name}.{expert}" in counts:
                counts[f"{name}.{expert}"] += 1

    return hook


def _grouping(had_rows: Tensor) -> Callable[[StochasticLinear, tuple[Tensor, ...]], None]:
    def hook(layer: StochasticLinear, args: tuple[Tensor, ...]) -> None:
        _note_groups(had_rows, layer.groups_of(args[0]))

    return hook


def _note_groups(had_rows: Tensor, groups: Tensor) -> None:
    """Mark the groups (G,) that rows or chunks of any shape are in."""
    had_rows.index_fill_(0, groups.flatten(), True)


class _Listening:
    """A layer tells the groups of its rows, until `remove`."""

    def __init__(self, layer: StochasticLinear, listener: Callable[[Tensor], None]) -> None:
        self.layer = layer
        layer.on_groups = listener

    def remove(self) -> None:
        """End it."""
        self.layer.on_groups = None


def _adding(counts: dict[str, int], name: str) -> Callable[[Any, Any, Any], None]:
    def hook(*_: Any) -> None:
        counts[name] += 1

    return hook
