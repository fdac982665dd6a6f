"""One decoder layer's linears rounded by a method: scales folded, codes chosen, codes and scales trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import NotFinite
from fewbits.formats.base import Format, Packed
from fewbits.host.transposed import as_linear
from fewbits.inference.rounding.activations import moments_of, output_of
from fewbits.inference.rounding.awq import Folds, fold_scales
from fewbits.inference.rounding.gptq import aimed_at_plain, choose_by_gptq, choose_nearest, loss_of
from fewbits.inference.rounding.grids import Choice, Grids
from fewbits.inference.rounding.learned import SoftWeight, learn
from fewbits.inference.rounding.methods import Method


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What flows into a layer, and how it is called.

    Attributes:
        hidden: its inputs in the rounded model, (1, T, D) for each window.
        plain: its inputs in the plain model.
        words: with which it is called.
    """

    hidden: Sequence[Tensor]
    plain: Sequence[Tensor]
    words: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RoundedLayer:
    """The packed weights of a layer's linears by their names in it.

    Attributes:
        packed: the weights.
        errors: ``||x (Q - W)^T||^2 / ||x W^T||^2`` of each.
        folded: into what scales were folded.
    """

    packed: Mapping[str, Packed]
    errors: Mapping[str, float]
    folded: tuple[str, ...]


@torch.no_grad()
def round_layer(
    layer: nn.Module,
    formats: Mapping[str, Format],
    flow: Flow,
    method: Method,
    folds: Folds,
) -> RoundedLayer:
    """Choose codes for the linears of a layer; scales are folded in place, its weights stay.

    Args:
        layer: a decoder layer with plain linears.
        formats: of its linears, by their names in it.
        flow: what flows into it.
        method: the steps.
        folds: where scales can be folded, from `folds_of`.

    Raises:
        NotFinite: a weight or an input holds a NaN or an infinity.
    """
    plain = flow.plain if method.rounding == "gptaq" else None
    targets = [output_of(layer, x, flow.words) for x in flow.plain] if method.steps else []
    moments = moments_of(layer, list(formats), flow.hidden, flow.words, plain)
    bad = next((name for name in formats if not bool(moments.second[name].isfinite().all())), None)
    if bad is not None:
        raise NotFinite(f"the inputs of {bad} hold a NaN or an infinity on this text; nothing was written.")
    folded: tuple[str, ...] = ()
    if method.awq or method.smooth:
        moments, folded = fold_scales(
            layer,
            moments,
            formats,
            lambda: output_of(layer, flow.hidden[0], flow.words),
            folds,
            smooth=method.smooth,
        )
    weights = {name: as_linear(layer.get_submodule(name)).weight.detach() for name in formats}
    grids = {name: Grids(format, weights[name].float()) for name, format in formats.items()}
    choices: dict[str, Choice] = {}
    for name, weight in weights.items():
        second = moments.second[name]
        if method.rounding == "nearest":
            choices[name] = choose_nearest(weight, grids[name], second)
            continue
        aim = aimed_at_plain(weight, second, moments.cross[name]) if name in moments.cross else weight
        choices[name] = choose_by_gptq(aim, grids[name], second)
    if method.steps:
        soft = {name: SoftWeight(grids[name], choice) for name, choice in choices.items()}
        choices = learn(layer, soft, flow.hidden, targets, flow.words, steps=method.steps)
    packed = {name: grids[name].finish(choices[name], weights[name].dtype) for name in formats}
    errors = {name: loss_of(weights[name], packed[name], moments.second[name]) for name in formats}
    return RoundedLayer(packed=packed, errors=errors, folded=folded)
