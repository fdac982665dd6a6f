"""`parallel_cross_entropy`: the loss over a vocabulary that may be cut over ranks, in float32."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.te.ranks.distributed import group_size, largest_of_group
from fewbits.te.ranks.parallel import sum_over_ranks


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    _input: Tensor | None = None,
) -> Tensor:
    """Cross entropy of logits.

    Args:
        inp: (..., V), or with a group this rank's part (..., V / ranks) of it.
        target: (...) numbers of words.
        label_smoothing: how much of the target is spread evenly over all words.
        reduce_loss: the mean over tokens that count, instead of each token's loss.
        dist_process_group: the ranks that share the vocabulary, in its order.
        ignore_idx: the target of tokens that do not count.
        is_cg_capturable: not needed.
        _input: an older name of ``inp``.

    Returns:
        float32, of target's shape or ().
    """
    if _input is not None:
        warnings.warn("_input is the older name of inp.", FutureWarning, stacklevel=2)
        inp = _input
    if inp.shape[:-1].numel() != target.numel():
        raise BadInput(
            f"{target.numel()} targets do not fit logits of shape {tuple(inp.shape)}: one a token."
        )
    setting = _Setting(label_smoothing, reduce_loss, dist_process_group, ignore_idx)
    loss: Tensor = _CrossEntropy.apply(inp, target, setting)
    return loss


class _Setting(NamedTuple):
    """What one call computes by, beside its tensors."""

    smoothing: float
    mean: bool
    group: Any
    ignored: int


class _CrossEntropy(torch.autograd.Function):
    """The loss, and its gradient by the logits, which is all that the backward pass keeps: in float32."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, target: Tensor, setting: _Setting) -> Tensor:
        group, smoothing = setting.group, setting.smoothing
        ranks = 1 if group is None else group_size(group)
        flat, V = target.reshape(-1), inp.shape[-1]
        first = torch.distributed.get_rank(group) * V if ranks > 1 else 0
        logits = inp.float().reshape(-1, V)
        top = logits.amax(-1, keepdim=True)
        shifted = logits - (largest_of_group(top, group) if ranks > 1 else top)
        here = (flat >= first) & (flat < first + V)
        place = (flat - first).clamp(0, V - 1)[:, None]
        picked = shifted.gather(-1, place)[:, 0].masked_fill(~here, 0.0)
        mean = shifted.sum(-1) / (V * ranks) if smoothing else torch.zeros_like(picked)
        share = shifted.exp_()
        total, picked, mean = (sum_over_ranks(part, group, ranks) for part in (share.sum(-1), picked, mean))
        loss = total.log() - picked
        if smoothing:
            loss = loss * (1 - smoothing) + smoothing * (total.log() - mean)
        counts = flat != setting.ignored
        loss = loss.masked_fill(~counts, 0.0)
        size = counts.sum().clamp(min=1)
        ctx.shape, ctx.dtype = inp.shape, inp.dtype
        wants_gradient, *_ = ctx.needs_input_grad
        if wants_gradient:
            share.div_(total[:, None])
            if smoothing:
                share.sub_(smoothing / (V * ranks))
            share.scatter_add_(-1, place, (here * (smoothing - 1.0))[:, None])
            share.masked_fill_(~counts[:, None], 0.0)
            ctx.save_for_backward(share.div_(size) if setting.mean else share)
        return loss.sum() / size if setting.mean else loss.view(target.shape)

    @staticmethod
    @once_differentiable("parallel_cross_entropy")
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        d = gradient * dloss.reshape(-1, 1)
        return d.to(ctx.dtype).view(ctx.shape), None, None
