"""Dropout where ranks share a layer: every rank draws for all of them, and keeps what is for its own part.

The ranks of a layer have the same random numbers, for they see the same data. What is whole on each of them
is so dropped alike. Of what they have cut, the columns of a row-wise linear's input and the heads of
attention, each would drop the same places of its own part: half of a model without a mask of its own. So the
mask is drawn as one process would draw it, for the whole, and cut. The memory for that is that of the whole
input in one linear, or of all heads' weights in one attention, for as long as it takes to cut it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fewbits.nn.tensor_group import TensorGroup


def drop_own_part(x: Tensor, p: float, group: TensorGroup, axis: int) -> Tensor:
    """``dropout(whole, p)`` cut along ``axis``, for this rank's equal part ``x`` of it.

    Args:
        x: this rank's part.
        p: probability of dropping a value.
        group: the ranks that share the whole, which lies in the order of ranks.
        axis: along which.

    Returns:
        As x: its values times 0 or 1 / (1 - p).
    """
    shape = list(x.shape)
    length = shape[axis]
    shape[axis] = length * group.size
    whole = torch.nn.functional.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p)
    mine = whole.narrow(axis, group.rank * length, length)
    if x.dtype == torch.float32:
        return x * mine
    # 1 / (1 - p) is not rounded to few bits, which would be the same error in every value
    return torch.where(mine != 0, x, 0) * (0.0 if p == 1 else 1 / (1 - p))


class CutDropout(nn.Dropout):
    """The dropout of an input (..., K) whose columns ranks share."""

    def __init__(self, p: float, group: TensorGroup) -> None:
        """Args: the probability; the ranks that share the columns."""
        super().__init__(p)
        self.tensor_group = group

    def forward(self, x: Tensor) -> Tensor:
        """(..., K / ranks) to the same shape."""
        if not self.training or self.p == 0:
            return x
        return drop_own_part(x, self.p, self.tensor_group, x.dim() - 1)


def attend_dropping(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    group: TensorGroup,
    *,
    scale: float | None,
    dropout: float,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of this rank's heads, with dropped weights, by its definition.

    Args:
        query: (B, H, T, D).
        key: (B, G, S, D); H is a multiple of G.
        value: as ``key``.
        mask: (B or 1, 1, T, S), true where a key is seen, or what is added to the scores; None: causal.
        group: the ranks that share the heads.
        scale: of the scores; None: 1 / sqrt(D).
        dropout: probability of dropping a weight.
        soft_cap: of the scores.

    Returns:
        (B, T, H, D).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    elif mask.shape[-1] > scores.shape[-1]:
        mask = mask[..., : scores.shape[-1]]
    if mask.dtype == torch.bool:
        visible, scores = mask, scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        visible, scores = mask > torch.finfo(mask.dtype).min, scores + mask
    weights = torch.softmax(scores, -1, dtype=torch.float32)
    sees_something = visible.any(-1, keepdim=True)
    weights = torch.where(sees_something, weights, 0).to(query.dtype)
    return (drop_own_part(weights, dropout, group, 1) @ value).transpose(1, 2).contiguous()


__all__ = ["CutDropout", "attend_dropping", "drop_own_part"]
