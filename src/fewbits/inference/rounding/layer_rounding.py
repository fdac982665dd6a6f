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
from fewbits.inference.rounding.experts import ExpertLinears, filled, grids_of, unreached
from fewbits.inference.rounding.gptq import aimed_at_plain, choose_by_gptq, choose_nearest, squares_of
from fewbits.inference.rounding.grids import Choice
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
        squares: ``||x (Q - W)^T||^2`` and ``||x W^T||^2`` of each, divided by one number.
        folded: into what scales were folded.
        unreached: numbers of the experts that no token was sent to.
    """

    packed: Mapping[str, Packed]
    squares: Mapping[str, tuple[float, float]]
    folded: tuple[str, ...]
    unreached: Sequence[int] = ()

    def error(self, names: Sequence[str]) -> float:
        """The relative squared error of these linears' outputs, taken together."""
        whole = sum(self.squares[name][1] for name in names)
        return sum(self.squares[name][0] for name in names) / max(whole, 1e-30)


@torch.no_grad()
def round_layer(
    layer: nn.Module,
    formats: Mapping[str, Format],
    flow: Flow,
    method: Method,
    folds: Folds,
    experts: ExpertLinears | None = None,
) -> RoundedLayer:
    """Choose codes for the linears of a layer; scales are folded in place, its weights stay.

    Args:
        layer: a decoder layer with plain linears.
        formats: of its linears, by their names in it.
        flow: what flows into it.
        method: the steps.
        folds: where scales can be folded, from `folds_of`.
        experts: those of its linears that are experts', from `split_layer`.

    Raises:
        BadInput: no token reaches any expert.
        NotFinite: a weight or an input holds a NaN or an infinity.
    """
    plain = flow.plain if method.rounding == "gptaq" else None
    targets = [output_of(layer, x, flow.words) for x in flow.plain] if method.steps else []
    moments = moments_of(layer, list(formats), flow.hidden, flow.words, plain)
    of_text = moments.second  # without what experts that few tokens reach are given besides
    moments = moments if experts is None else filled(moments, experts)
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
    grids = grids_of(formats, weights, experts)
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
    squares = dict.fromkeys(formats, (0.0, 0.0))
    for name in of_text:
        squares[name] = squares_of(weights[name], packed[name], moments.second[name])
    missed = [] if experts is None else unreached(moments, experts)
    return RoundedLayer(packed=packed, squares=squares, folded=folded, unreached=missed)
