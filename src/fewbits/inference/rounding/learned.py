"""Codes and scales of one layer trained on what the layer computes, as AutoRound does by signs of gradients.

A weight that was rounded to ``Q = round(T / s)`` gets an offset for every value and a factor for every scale:
``Q = round((T + step * V) / (s * exp(f)))``. The gradient passes through the rounding as if it were not
there. V and f move by the signs of their gradients, in steps that shrink to nothing (Cheng et al. 2024), so
that no value moves by more than about half a step of its format. The loss is the squared distance of the
layer's output from the plain model's at the same tokens, over all its linears at once; on the calibration
text the result is never worse than what it began with.

Factors are learned where a format stores its scales in float32 (`ScaleSearch.continuous`), elsewhere only
codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fewbits.host.transposed import transposed_like
from fewbits.inference.rounding.grids import Choice, Grid, Grids

_BATCH = 8  # windows of a step
_SCALE_RATE = 0.1  # the factors' part of the offsets' step
_ZERO_RATE = 2.0  # likewise, of the zero points


class SoftWeight:
    """One weight (N, K) whose codes and scales can be trained, beginning as a choice that was made.

    Args:
        grids: of the weight under its format.
        choice: what a method chose.
    """

    def __init__(self, grids: Grids, choice: Choice) -> None:
        self.grids, self.values = grids, choice.grids[0].values
        self.scale = torch.cat([grid.scale for grid in choice.grids], 1)  # (N, blocks)
        self.zero = torch.cat([grid.zero for grid in choice.grids], 1)
        self.choice, self.wanted = choice, choice.wanted
        self.offset = torch.zeros_like(choice.wanted, requires_grad=True)
        self.factor = torch.zeros_like(self.scale, requires_grad=grids.search.continuous)
        self.shift = torch.zeros_like(self.zero, requires_grad=grids.search.has_zeros)
        self.spacing = float(self.values.diff().mean())
        steps = self.values.diff()
        self.ends = (float(self.values[0] - steps[0] / 2), float(self.values[-1] + steps[-1] / 2))

    def parameters(self) -> list[tuple[Tensor, float]]:
        """What is trained, (N, K) and (N, blocks), each with its part of the step."""
        every = ((self.offset, 1.0), (self.factor, _SCALE_RATE), (self.shift, _ZERO_RATE))
        return [pair for pair in every if pair[0].requires_grad]

    def _whole(self, of_blocks: Tensor) -> Tensor:
        return of_blocks.repeat_interleave(self.grids.size, 1)

    def _zeros(self) -> Tensor:
        """The zero points (N, blocks), whole numbers where they are trained."""
        if not self.shift.requires_grad:
            return self.zero
        exact = self.zero + self.shift
        whole = exact.detach().round().clamp(float(self.values[0]), float(self.values[-1]))
        return exact + (whole - exact.detach())

    def decoded(self) -> Tensor:
        """The rounded weight (N, K) float32, through which gradients reach offsets, factors and zeros.

        What lies less than half a step beyond the first and the last value can still come back to another.
        """
        scale, zero = self._whole(self.scale * self.factor.exp()), self._whole(self._zeros())
        step = self._whole(self.scale) * self.spacing
        exact = (self.wanted + self.offset * step) / scale + zero
        middle = (self.values[1:] + self.values[:-1]) / 2
        rounded = self.values[torch.bucketize(exact.detach().contiguous(), middle)]
        inside = (exact > self.ends[0]) & (exact < self.ends[1])
        through = torch.where(inside, exact + (rounded - exact).detach(), rounded)
        return (through - zero) * scale

    @torch.no_grad()
    def finished(self) -> Choice:
        """The codes and scales as they are now."""
        scale, zeros = self.scale * self.factor.exp(), self._zeros()
        step = self._whole(self.scale) * self.spacing
        moved = self.wanted + self.offset * step
        codes, chosen = torch.empty_like(self.choice.codes), []
        for number, grid in enumerate(self.choice.grids):
            at = slice(number * self.grids.size, (number + 1) * self.grids.size)
            of_block = scale[:, number : number + 1]
            stored = of_block if self.grids.search.continuous else grid.stored
            grid = Grid(grid.values, grid.codes, of_block, zeros[:, number : number + 1], stored)
            codes[:, at] = grid.round(moved[:, at])[0]
            chosen.append(grid)
        return Choice(codes=codes, grids=chosen, wanted=moved)


@torch.enable_grad()
def learn(
    layer: nn.Module,
    weights: Mapping[str, SoftWeight],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    words: Mapping[str, Any],
    *,
    steps: int,
) -> dict[str, Choice]:
    """Train the codes of a layer's linears.

    Args:
        layer: a decoder layer with plain linears; it is left as it is.
        weights: by the linear's name in the layer.
        inputs: what the layer gets in the rounded model, (1, T, D) each.
        targets: what it gives in the plain model at the same tokens.
        words: with which it is called.
        steps: of training; each sees 8 of the inputs.

    Returns:
        The choices after training, or before where that was better.
    """
    before = _loss(layer, weights, inputs, targets, words)
    order = torch.Generator().manual_seed(0)
    for step in range(steps):
        picked = torch.randperm(len(inputs), generator=order)[:_BATCH].tolist()
        x, target = (torch.cat([of[n] for n in picked]) for of in (inputs, targets))
        loss = (_output(layer, weights, x, words) - target).float().square().mean()
        trained = [pair for weight in weights.values() for pair in weight.parameters()]
        # an expert that no token of the batch reaches has no gradient
        gradients = torch.autograd.grad(loss, [tensor for tensor, _ in trained], allow_unused=True)
        rate = (1 - step / steps) / steps
        with torch.no_grad():
            for (tensor, part), gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    tensor -= rate * part * gradient.sign()
    better = _loss(layer, weights, inputs, targets, words) < before
    return {name: weight.finished() if better else weight.choice for name, weight in weights.items()}


def _output(layer: Any, weights: Mapping[str, SoftWeight], x: Tensor, words: Mapping[str, Any]) -> Tensor:
    tensors = {}
    for name, weight in weights.items():
        linear = layer.get_submodule(name)
        tensors[f"{name}.weight"] = transposed_like(weight.decoded(), linear).to(linear.weight.dtype)
    output = functional_call(layer, tensors, (x,), dict(words))
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


@torch.no_grad()
def _loss(
    layer: nn.Module,
    weights: Mapping[str, SoftWeight],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    words: Mapping[str, Any],
) -> float:
    total = 0.0
    for x, target in zip(inputs, targets, strict=True):
        total += float((_output(layer, weights, x, words) - target).float().square().sum())
    return total
