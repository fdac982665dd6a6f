"""What the inputs of a model's linears look like, and scales that make them easier to quantise.

`capture` runs a model over a few batches and keeps, of each linear: rows of its input, the largest and the
mean magnitude of each input channel, and how much the loss depends on each output.

A vector ``smooth_scales`` s (K,) moves difficulty between the operands of ``y = x W^T``: x is divided and W
multiplied by it, which changes nothing but the rounding.

* SmoothQuant (Xiao et al. 2023): ``s_k = max|x_k|^alpha / max|W_k|^(1 - alpha)``.
* AWQ (Lin et al. 2024): ``s_k = mean|x_k|^beta``, normalised, with the beta of a grid that leaves the
  smallest error of the product itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput

SMALLEST_SCALE = 1e-5


@dataclass
class Captured:
    """What passed through one linear.

    Attributes:
        rows: a sample of its input, (n, K) float32, on the CPU.
        absmax: largest magnitude of each input channel, (K,).
        mean_abs: mean magnitude of each, (K,).
        importance: of each output, (M,): the mean squared gradient of the summed loss, or one over the mean
            squared norm of the output.
        num_rows: rows that passed in all.
    """

    rows: Tensor
    absmax: Tensor
    mean_abs: Tensor
    importance: Tensor
    num_rows: int


class _Watch:
    """Hooks on one linear, and what they have added up."""

    def __init__(self, linear: Any, rows_per_batch: int, gradients: bool, generator: torch.Generator) -> None:
        self.rows_per_batch, self.gradients, self.generator = rows_per_batch, gradients, generator
        self.rows: list[Tensor] = []
        self.absmax = torch.zeros(linear.in_features, dtype=torch.float32)
        self.total = torch.zeros(linear.in_features, dtype=torch.float32)
        self.squares = torch.zeros(linear.out_features, dtype=torch.float32)
        self.seen: Tensor | None = None
        self.num_rows = 0

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        x = args[0].detach().flatten(0, -2).float()
        keep = None if self.seen is None else self.seen.flatten()
        x = x if keep is None else x[keep]
        self.num_rows += len(x)
        picked = torch.randperm(len(x), generator=self.generator)[: self.rows_per_batch]
        self.rows.append(x[picked.to(x.device)].cpu())
        self.absmax = torch.maximum(self.absmax, x.abs().amax(0).cpu())
        self.total += x.abs().sum(0).cpu()
        if not self.gradients:
            y = output.detach().flatten(0, -2).float()
            self._add(y if keep is None else y[keep])
        elif output.requires_grad:
            output.register_hook(lambda g: self._add(g.flatten(0, -2).float()))

    def _add(self, values: Tensor) -> None:
        self.squares += values.square().sum(0).cpu()

    def captured(self) -> Captured:
        """The answer."""
        count = max(self.num_rows, 1)
        importance = self.squares / count
        if not self.gradients:
            energy = float(importance.sum())
            importance = torch.full_like(importance, 1 / energy if energy else 0.0)
        rows = torch.cat(self.rows) if self.rows else torch.zeros(0, len(self.absmax), dtype=torch.float32)
        return Captured(rows, self.absmax, self.total / count, importance, self.num_rows)


def capture(
    model: Any,
    batches: Iterable[Tensor],
    names: Iterable[str],
    *,
    rows: int = 256,
    gradients: bool = True,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Captured]:
    """Run a model over token ids and keep what its linears saw.

    Args:
        model: a causal language model of transformers, as it is before any conversion.
        batches: token ids (B, T), without padding.
        names: full names of the linears.
        rows: input rows to keep of each.
        gradients: weigh outputs by the gradient of the loss; False needs no backward pass, and weighs all
            outputs of a linear alike.
        seed: of the choice of rows.
        progress: called as ``progress(batches done, batches in all)``.

    Raises:
        BadInput: no batches, or a batch that is not token ids.
    """
    batches = list(batches)
    if not batches:
        raise BadInput("calibration needs at least one batch of tokens; give a longer text.")
    generator = torch.Generator().manual_seed(seed)
    per_batch = -(-rows // len(batches))
    watches = {name: _Watch(model.get_submodule(name), per_batch, gradients, generator) for name in names}
    mode, trained = model.training, [p for p in model.parameters() if p.requires_grad]
    with ExitStack() as undo:
        for name, watch in watches.items():
            undo.callback(model.get_submodule(name).register_forward_hook(watch).remove)
        undo.callback(model.train, mode)
        undo.callback(lambda: [p.requires_grad_(True) for p in trained])
        model.eval().requires_grad_(False)
        for done, ids in enumerate(batches):
            _one_batch(model, ids.to(model.device), gradients)
            if progress is not None:
                progress(done + 1, len(batches))
    return {name: watch.captured() for name, watch in watches.items()}


def _one_batch(model: Any, ids: Tensor, gradients: bool) -> None:
    if ids.dim() != 2 or ids.is_floating_point() or ids.shape[1] < 2:
        raise BadInput(
            f"a calibration batch is {tuple(ids.shape)} {ids.dtype}; give token ids (rows, tokens)."
        )
    with torch.set_grad_enabled(gradients):
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_(gradients)
        logits = model(inputs_embeds=embedded, use_cache=False).logits
        if gradients:
            flat = logits[:, :-1].flatten(0, 1).float()
            nn.functional.cross_entropy(flat, ids[:, 1:].flatten(), reduction="sum").backward()


def smoothquant_scales(absmax: Tensor, weight: Tensor, alpha: float = 0.5) -> Tensor:
    """SmoothQuant's scales (K,) float32 for inputs of these largest magnitudes and a weight (M, K)."""
    if not 0 <= alpha <= 1:
        raise BadInput(f"alpha={alpha} is refused: give a number from 0 to 1.")
    largest = weight.detach().float().abs().amax(0).cpu().clamp(min=SMALLEST_SCALE)
    scales = absmax.clamp(min=SMALLEST_SCALE) ** alpha / largest ** (1 - alpha)
    return torch.where(absmax > 0, scales.clamp(min=SMALLEST_SCALE), torch.ones_like(scales))


def awq_scales(
    captured: Captured, error: Callable[[Tensor | None], float], *, steps: int = 10
) -> tuple[Tensor, float]:
    """AWQ's scales (K,) and their beta, by a search over ``steps + 1`` betas from 0 to 1.

    Args:
        captured: the linear's inputs.
        error: the error of the product under given scales (None: ones), to be made small.
        steps: betas beyond 0.
    """
    best: tuple[float, Tensor, float] = (error(None), torch.ones_like(captured.mean_abs), 0.0)
    for step in range(1, steps + 1):
        beta = step / steps
        scales = captured.mean_abs.clamp(min=SMALLEST_SCALE) ** beta
        scales = scales / (scales.max() * scales.min()).sqrt()
        size = error(scales)
        if size < best[0]:
            best = (size, scales, beta)
    return best[1], best[2]


def protected_channels(captured: Captured, weight: Tensor, count: int) -> tuple[int, ...]:
    """The ``count`` input channels whose products are largest: ``max|x_k| * |W_k|``, in ascending order.

    ``weight`` is (N, K).
    """
    if count < 0 or count >= weight.shape[1]:
        raise BadInput(
            f"{count} protected channels of {weight.shape[1]} is refused: leave some to the streams."
        )
    size = captured.absmax * weight.detach().float().norm(dim=0).cpu()
    return tuple(sorted(size.topk(count).indices.tolist()))
