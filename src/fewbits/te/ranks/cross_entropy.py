"""`parallel_cross_entropy`: the loss over a vocabulary that may be cut over ranks, in float32."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput
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
    group, ranks = dist_process_group, 1 if dist_process_group is None else group_size(dist_process_group)
    logits, flat = inp.float().reshape(target.numel(), inp.shape[-1]), target.reshape(-1)
    V = logits.shape[-1]
    first = torch.distributed.get_rank(group) * V if ranks > 1 else 0
    top = logits.detach().amax(-1, keepdim=True)
    top = largest_of_group(top, group) if ranks > 1 else top
    shifted = logits - top
    log_sum = sum_over_ranks(shifted.exp().sum(-1), group, ranks).log()
    here = (flat >= first) & (flat < first + V)
    picked = shifted.gather(-1, (flat - first).clamp(0, V - 1)[:, None])[:, 0]
    picked = sum_over_ranks(picked.masked_fill(~here, 0.0), group, ranks)
    loss = log_sum - picked
    if label_smoothing:
        mean = sum_over_ranks(shifted.sum(-1), group, ranks) / (V * ranks)
        loss = loss * (1 - label_smoothing) + label_smoothing * (log_sum - mean)
    counts = flat != ignore_idx
    loss = loss.masked_fill(~counts, 0.0)
    return loss.sum() / counts.sum().clamp(min=1) if reduce_loss else loss.view(target.shape)
