"""Attention of some queries over some keys, with the logarithm of each sum, so that blocks can be added up.

Of scores ``s = scale * q k^T`` (for causal blocks those of later keys are -inf) the block's logarithm is
``l = log(sum of exp(s))`` and its output ``exp(s - l) v``. Blocks of other keys are added by `add_block`.
With the logarithm ``L`` and the output ``o`` over all keys the gradients of one block are

    p = exp(s - L),  dv = p^T do,  ds = p * (do v^T - sum(do * o)) * scale,  dq = ds k,  dk = ds^T q

In plain torch, in float32; on a GPU torch's own flash attention where it takes the shapes: 16 bits, one size
of heads, a multiple of 8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten


class Block(NamedTuple):
    """One block.

    Attributes:
        q: (b, h, m, d).
        k: (b, g, n, d); each of g heads serves h / g of the queries'.
        v: (b, g, n, d_v).
        scale: multiplies scores.
        causal: query i sees keys up to i; m is n.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool


def block_attention_ref(block: Block) -> tuple[Tensor, Tensor]:
    """The output (b, h, m, d_v) and the logarithms (b, h, m), both in float32."""
    scores = _scores(block)
    log = scores.logsumexp(-1)
    v = _grown(block.v, block.q).float()
    return (scores - log.unsqueeze(-1)).exp() @ v, log


def block_gradients_ref(block: Block, dy: Tensor, y: Tensor, log: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in float32, for y (b, h, m, d_v), log (b, h, m) and dy of y's shape."""
    q, k, v = block.q.float(), _grown(block.k, block.q).float(), _grown(block.v, block.q).float()
    p, dy = (_scores(block) - log.unsqueeze(-1)).exp(), dy.float()
    delta = (dy * y.float()).sum(-1, keepdim=True)
    ds = p * (dy @ v.transpose(-1, -2) - delta) * block.scale
    dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dy
    return ds @ k, _summed(dk, block.k), _summed(dv, block.v)


def block_attention(block: Block) -> tuple[Tensor, Tensor]:
    """As `block_attention_ref`; see there for shapes."""
    if not _is_flash(block):
        return block_attention_ref(block)
    y, log, *_ = _flash(block)
    return y.float(), log


def block_gradients(block: Block, dy: Tensor, y: Tensor, log: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `block_gradients_ref`; see there for shapes."""
    if not _is_flash(block):
        return block_gradients_ref(block, dy, y, log)
    k, v = _grown(block.k, block.q), _grown(block.v, block.q)
    seed = torch.zeros(2, dtype=torch.uint64, device=k.device)  # of a dropout that there is not
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        dy.to(k.dtype), block.q, k, v, y.to(k.dtype), log.contiguous(), None, None,
        block.q.shape[2], k.shape[2], 0.0, block.causal, seed, seed[0], scale=block.scale,
    )  # fmt: skip
    return dq.float(), _summed(dk.float(), block.k), _summed(dv.float(), block.v)


def add_block(y: Tensor, log: Tensor, new_y: Tensor, new_log: Tensor) -> None:
    """Add a block of further keys to y (b, h, m, d_v) and log (b, h, m), in place; -inf is of no keys."""
    total = torch.logaddexp(log, new_log)
    shift = total.masked_fill(torch.isneginf(total), 0.0)
    y.mul_((log - shift).exp().unsqueeze(-1)).add_(new_y * (new_log - shift).exp().unsqueeze(-1))
    log.copy_(total)


def _scores(block: Block) -> Tensor:
    scores = (block.q.float() @ _grown(block.k, block.q).float().transpose(-1, -2)) * block.scale
    if block.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _grown(kv: Tensor, q: Tensor) -> Tensor:
    times = q.shape[1] // kv.shape[1]
    return kv if times == 1 else kv.repeat_interleave(times, 1)


def _summed(gradient: Tensor, kv: Tensor) -> Tensor:
    return gradient if gradient.shape == kv.shape else gradient.unflatten(1, (kv.shape[1], -1)).sum(2)


def _is_flash(block: Block) -> bool:
    d = block.q.shape[-1]
    return (
        block.q.device.type == "cuda"
        and block.q.dtype in (torch.float16, torch.bfloat16)
        and d == block.v.shape[-1]
        and d % 8 == 0
        and d <= 256
    )


def _flash(block: Block) -> tuple[Any, ...]:
    k, v = _grown(block.k, block.q), _grown(block.v, block.q)
    results: tuple[Any, ...] = _aten._scaled_dot_product_flash_attention(
        block.q, k, v, 0.0, block.causal, scale=block.scale
    )
    return results
