"""What flows through a decoder while its layers are rounded: their inputs, outputs and second moments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.nn.split_experts import SplitExperts


class _Stop(Exception):
    """Not an error: the first layer has its input."""


@dataclass(frozen=True, kw_only=True)
class LayerMoments:
    """Of the inputs x of a layer's linears, by the linear's name in the layer; float32.

    Attributes:
        second: ``X^T X / rows`` (K, K).
        cross: ``Y^T X / rows`` (K, K), where Y are the inputs that the plain model has at the same tokens;
            empty if nobody asked for them.
        magnitude: sum |x| / rows (K,).
        largest: largest |x| (K,).
        rows: how many rows came; an expert has those of the tokens that were sent to it.
        total: ``rows`` in the formulas above: tokens of the text, for experts too.
    """

    second: dict[str, Tensor]
    cross: dict[str, Tensor]
    magnitude: dict[str, Tensor]
    largest: dict[str, Tensor]
    rows: dict[str, int] = field(default_factory=dict)
    total: int = 0

    def divided(self, names: Sequence[str], scale: Tensor) -> LayerMoments:
        """The moments when the inputs of some linears are divided by ``scale`` (K,)."""
        both = scale[:, None] * scale[None, :]
        return replace(
            self,
            second=_each_once(self.second, names, both),
            cross=_each_once(self.cross, names, both),
            magnitude=_each_once(self.magnitude, names, scale),
            largest=_each_once(self.largest, names, scale),
        )


def _each_once(tensors: Mapping[str, Tensor], names: Sequence[str], divisor: Tensor) -> dict[str, Tensor]:
    """The tensors, those of ``names`` divided; what was one tensor stays one."""
    divided: dict[int, Tensor] = {}
    for name in names:
        if name in tensors and id(tensors[name]) not in divided:
            divided[id(tensors[name])] = tensors[name] / divisor
    return {n: divided.get(id(t), t) if n in names else t for n, t in tensors.items()}


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
        layer: a decoder layer with plain linears. Those of experts (`SplitExperts`) see the rows of the
            tokens that are sent to them; what no token reaches has no entry but its 0 in ``rows``.
        linears: their names in the layer.
        hidden: the layer's inputs (1, T, D).
        words: with which it is called.
        plain: its inputs in the plain model at the same tokens, for `LayerMoments.cross`. Tokens are sent to
            the experts that ``hidden`` sends them to, so that rows stay beside each other.
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
    routes = _Routes(layer)
    total = sum(x.shape[0] * x.shape[1] for x in hidden)
    sums = LayerMoments(
        second={}, cross={}, magnitude={}, largest={}, rows=dict.fromkeys(linears, 0), total=total
    )

    def inputs_of(x: Tensor, again: bool) -> dict[str, Tensor]:
        inputs.clear()  # an expert that this text does not reach keeps nothing of the one before
        readers.clear()
        with routes.held(again):
            output_of(layer, x, words)
        return dict(inputs)

    for number, h in enumerate(hidden):
        xs = inputs_of(h, False)
        ys = {} if plain is None else inputs_of(plain[number], True)
        _add_all(sums, xs, ys)
    for hook in hooks:
        hook.remove()
    return sums


def _add_all(sums: LayerMoments, inputs: Mapping[str, Tensor], of_plain: Mapping[str, Tensor]) -> None:
    """Add one window's rows (n, K) of each linear; linears that read one tensor share their moments."""
    first: dict[int, str] = {}
    for leaf, x in inputs.items():
        sums.rows[leaf] += len(x)
        one = first.setdefault(id(x), leaf)
        for moments in (sums.second, sums.cross, sums.magnitude, sums.largest):
            if one != leaf and one in moments:
                moments[leaf] = moments[one]
        if one != leaf:
            continue
        _add(sums.second, leaf, x.t() @ x / sums.total)
        _add(sums.magnitude, leaf, x.abs().sum(0) / sums.total)
        largest = x.abs().amax(0)
        sums.largest[leaf] = torch.maximum(sums.largest.get(leaf, largest), largest)
        if leaf in of_plain:
            _add(sums.cross, leaf, of_plain[leaf].t() @ x / sums.total)


class _Routes:
    """Which experts tokens are sent to, remembered from one call of a layer for the next."""

    def __init__(self, layer: nn.Module) -> None:
        self.experts = [module for module in layer.modules() if isinstance(module, SplitExperts)]
        self.choices: dict[int, tuple[Any, ...]] = {}

    @contextmanager
    def held(self, again: bool) -> Iterator[None]:
        """While it lasts, choices are remembered, or with ``again`` replaced by the ones remembered."""

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if again:
                return (args[0], *self.choices[id(module)])
            self.choices[id(module)] = args[1:]
            return args

        hooks = [module.register_forward_pre_hook(before) for module in self.experts]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _add(sums: dict[str, Tensor], name: str, term: Tensor) -> None:
    sums[name] = sums[name] + term if name in sums else term


def distance(outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
    """||outputs - targets|| / ||targets|| over several tensors (1, T, D)."""
    difference = sum(
        float((a.float() - b.float()).square().sum()) for a, b in zip(outputs, targets, strict=True)
    )
    whole = sum(float(b.float().square().sum()) for b in targets)
    return math.sqrt(difference / max(whole, 1e-30))
