"""What flows through a decoder while its layers are rounded: their inputs, outputs and second moments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class _Stop(Exception):
    """Not an error: the first layer has its input."""


@dataclass(frozen=True, kw_only=True)
class LayerMoments:
    """Of the inputs x of a layer's linears, by the linear's name in the layer; float32.

    Attributes:
        second: ``X^T X / rows`` (K, K).
        cross: ``Y^T X / rows`` (K, K), where Y are the inputs that the plain model has at the same tokens;
            empty if nobody asked for them.
        magnitude: mean |x| (K,).
        largest: largest |x| (K,).
    """

    second: dict[str, Tensor]
    cross: dict[str, Tensor]
    magnitude: dict[str, Tensor]
    largest: dict[str, Tensor]

    def divided(self, names: Sequence[str], scale: Tensor) -> LayerMoments:
        """The moments when the inputs of some linears are divided by ``scale`` (K,)."""
        second, cross = dict(self.second), dict(self.cross)
        magnitude, largest = dict(self.magnitude), dict(self.largest)
        for name in names:
            for squares in (second, cross):
                if name in squares:
                    squares[name] = squares[name] / scale[:, None] / scale[None, :]
            for values in (magnitude, largest):
                if name in values:
                    values[name] = values[name] / scale
        return LayerMoments(second=second, cross=cross, magnitude=magnitude, largest=largest)


def first_inputs(
    model: nn.Module, layers: list[str], windows: Tensor, device: torch.device
) -> tuple[list[Tensor], dict[str, dict[str, Any]]]:
    """The first layer's input (1, T, D) for every window, and the words with which each layer is called.

    ``windows`` is (windows, T) of tokens; what is returned lies on ``device``.
    """
    words: dict[str, dict[str, Any]] = {}
    hidden: list[Tensor] = []
    hooks = []
    for name in layers:

        def remember(module: nn.Module, args: Any, kwargs: dict[str, Any], name: str = name) -> None:
            kwargs = {k: v for k, v in kwargs.items() if k not in ("past_key_values", "hidden_states")}
            words[name] = {k: _moved(v, device) for k, v in kwargs.items()}
            words[name]["use_cache"] = False

        hooks.append(model.get_submodule(name).register_forward_pre_hook(remember, with_kwargs=True))
    model(input_ids=windows[:1], use_cache=False)
    for hook in hooks:
        hook.remove()

    def catch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        hidden.append((args[0] if args else kwargs["hidden_states"]).to(device))
        raise _Stop

    hook = model.get_submodule(layers[0]).register_forward_pre_hook(catch, with_kwargs=True)
    for window in windows:
        try:
            model(input_ids=window[None], use_cache=False)
        except _Stop:
            continue
    hook.remove()
    return hidden, words


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return type(value)(_moved(v, device) for v in value) if type(value) in (tuple, list) else value


def output_of(layer: nn.Module, x: Tensor, words: Mapping[str, Any]) -> Tensor:
    """What a decoder layer makes of x (B, T, D), called with these further words."""
    output = layer(x, **words)
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


def moments_of(
    layer: nn.Module,
    linears: Sequence[str],
    hidden: Sequence[Tensor],
    words: Mapping[str, Any],
    plain: Sequence[Tensor] | None = None,
) -> LayerMoments:
    """The moments of the inputs of a layer's linears.

    Args:
        layer: a decoder layer with plain linears.
        linears: their names in the layer.
        hidden: the layer's inputs (1, T, D).
        words: with which it is called.
        plain: its inputs in the plain model at the same tokens, for `LayerMoments.cross`.
    """
    inputs: dict[str, Tensor] = {}
    readers: dict[str, Tensor] = {}  # what each linear was given: q, k and v one tensor, gate and up another
    hooks = []
    for leaf in linears:

        def remember(module: nn.Module, args: tuple[Tensor, ...], leaf: str = leaf) -> None:
            first = next((n for n, x in readers.items() if x is args[0] and n != leaf), None)
            readers[leaf] = args[0]
            of_first = None if first is None else inputs.get(first)
            x = args[0].detach().reshape(-1, args[0].shape[-1]).float() if of_first is None else of_first
            inputs[leaf] = x

        hooks.append(layer.get_submodule(leaf).register_forward_pre_hook(remember))
    moments = LayerMoments(second={}, cross={}, magnitude={}, largest={})
    rows = sum(x.shape[0] * x.shape[1] for x in hidden)
    for number, h in enumerate(hidden):
        inputs_of_plain = {}
        if plain is not None:
            output_of(layer, plain[number], words)
            inputs_of_plain = dict(inputs)
        output_of(layer, h, words)
        sums: dict[int, tuple[Tensor, Tensor, Tensor, Tensor | None]] = {}  # of each input once
        for leaf, x in inputs.items():
            if id(x) not in sums:
                y = inputs_of_plain.get(leaf)
                cross = None if y is None else y.t() @ x / rows
                sums[id(x)] = x.t() @ x / rows, x.abs().sum(0) / rows, x.abs().amax(0), cross
            second, magnitude, largest, cross = sums[id(x)]
            _add(moments.second, leaf, second)
            _add(moments.magnitude, leaf, magnitude)
            moments.largest[leaf] = torch.maximum(moments.largest.get(leaf, largest), largest)
            if cross is not None:
                _add(moments.cross, leaf, cross)
    for hook in hooks:
        hook.remove()
    return moments


def _add(sums: dict[str, Tensor], name: str, term: Tensor) -> None:
    sums[name] = sums[name] + term if name in sums else term


def distance(outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
    """||outputs - targets|| / ||targets|| over several tensors (1, T, D)."""
    difference = sum(
        float((a.float() - b.float()).square().sum()) for a, b in zip(outputs, targets, strict=True)
    )
    whole = sum(float(b.float().square().sum()) for b in targets)
    return math.sqrt(difference / max(whole, 1e-30))
