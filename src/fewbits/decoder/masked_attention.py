"""Attention as the fused node calls it where the model made the mask.

q is (B, heads, S, D), k and v are (B, kv_heads, S, D), the result (B, S, heads, D).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, scale: float, soft_cap: float | None, eager: bool
) -> Tensor:
    """Attention (B, S, heads, D) under a mask that the model made, (B or 1, 1, S, S).

    It holds the causal order and the window already.
    A mask that is added holds the lowest number of its dtype where a token may not look, and a token of the
    padding may look nowhere. In "eager" its scores vanish beside that number and it sees all tokens alike,
    which this computes as it stands. Kernels of `scaled_dot_product_attention` keep a logarithm for the
    backward pass that vanishes beside it as well, and gradients explode: they get such a row from zero on.
    """
    added = mask.dtype != torch.bool
    if not soft_cap and not (eager and added):
        mask = _from_zero(mask, q.dtype) if added else mask
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        return o.transpose(1, 2)
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = (q @ k.transpose(2, 3)).float() * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores + mask.float() if added else scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1).to(q.dtype) @ v).transpose(1, 2)


def _from_zero(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An added mask in ``dtype``, finite where it was; rows without a place to look begin at zero."""
    lowest = torch.finfo(dtype).min
    top = mask.amax(-1, keepdim=True)
    mask = torch.where((top < 0) & top.isfinite(), mask - top, mask)
    return torch.where(mask.isfinite(), mask.clamp(min=lowest), mask).to(dtype)
