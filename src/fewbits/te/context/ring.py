"""Attention whose keys and values go round a ring of ranks, each of which keeps its queries.

In each of n steps a rank has the keys and values of one rank, adds up that block (see `blocks.py`) and
meanwhile receives the next rank's. Under a causal mask it needs of its own keys those before each query;
of a lower rank's the first piece alone, for all its queries; of a higher rank's all, for its second piece
alone: the same work for each. In the backward pass keys and values go round again, and with them, one step
behind, their gradients, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import P2POp

from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.te.context.blocks import Block, add_block, block_attention, block_gradients
from fewbits.te.context.shares import SequenceShare


class RingSettings(NamedTuple):
    """What the ranks compute by.

    Attributes:
        group: the ranks, in the order of the pieces.
        rank: this one.
        ranks: how many.
        queries: the sequences among the rows of queries.
        keys: the same sequences among the rows of keys; if ``causal`` the same shares.
        causal: see the top of this file.
        scale: multiplies scores.
    """

    group: Any
    rank: int
    ranks: int
    queries: Sequence[SequenceShare]
    keys: Sequence[SequenceShare]
    causal: bool
    scale: float


def ring_attention(q: Tensor, k: Tensor, v: Tensor, settings: RingSettings) -> Tensor:
    """Attention of this rank's queries over all ranks' keys.

    Args:
        q: (b, h, m, d), this rank's rows of the sequences; several sequences lie in one row after another.
        k: (b, g, n, d).
        v: (b, g, n, d_v).
        settings: see `RingSettings`.

    Returns:
        (b, h, m, d_v) in q's dtype; zeros where a row is padding.
    """
    y: Tensor = _Ring.apply(q, k, v, settings)
    return y


def _blocks(s: RingSettings, source: int) -> Iterator[tuple[slice, slice, bool]]:
    """Rows of queries, rows of the source's keys, and whether the block is causal: one or none a sequence."""
    for of_q, of_k in zip(s.queries, s.keys, strict=True):
        m, n = of_q.valid(s.rank, s.ranks), of_k.valid(source, s.ranks)
        first = 0
        if s.causal and source < s.rank:
            n = min(n, of_k.piece)
        elif s.causal and source > s.rank:
            first = of_q.piece
        if m > first and n:
            rows = slice(of_q.start + first, of_q.start + m), slice(of_k.start, of_k.start + n)
            yield *rows, s.causal and source == s.rank


class _Passing:
    """Tensors on their way to the next rank, and those that come from the one before."""

    def __init__(self, tensors: Sequence[Tensor], s: RingSettings) -> None:
        self.incoming = [torch.empty_like(t) for t in tensors]
        at = [torch.distributed.get_global_rank(s.group, (s.rank + i) % s.ranks) for i in (1, -1)]
        operations = [P2POp(torch.distributed.isend, t, at[0], s.group) for t in tensors]
        operations += [P2POp(torch.distributed.irecv, t, at[1], s.group) for t in self.incoming]
        self._works = torch.distributed.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        """What has come."""
        for work in self._works:
            work.wait()
        return self.incoming


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, s: RingSettings) -> Tensor:
        y = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float32)
        log = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device)
        own = held = [k.contiguous(), v.contiguous()]
        for step in range(s.ranks):
            passing = _Passing(held, s) if step + 1 < s.ranks else None
            for rows, keys, causal in _blocks(s, (s.rank - step) % s.ranks):
                block = Block(q[:, :, rows], held[0][:, :, keys], held[1][:, :, keys], s.scale, causal)
                add_block(y[:, :, rows], log[:, :, rows], *block_attention(block))
            held = passing.wait() if passing else held
        y = y.to(q.dtype)
        ctx.settings = s
        ctx.save_for_backward(q, *own, y, log)
        return y

    @staticmethod
    @once_differentiable("attention over ranks")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, y, log = ctx.saved_tensors
        s: RingSettings = ctx.settings
        dq = torch.zeros_like(q, dtype=torch.float32)
        held = [k, v]
        gradients = [torch.zeros_like(t, dtype=torch.float32) for t in held]
        for step in range(s.ranks):
            passing = _Passing(held, s) if step + 1 < s.ranks else None
            for rows, keys, causal in _blocks(s, (s.rank - step) % s.ranks):
                block = Block(q[:, :, rows], held[0][:, :, keys], held[1][:, :, keys], s.scale, causal)
                parts = block_gradients(block, dy[:, :, rows], y[:, :, rows], log[:, :, rows])
                dq[:, :, rows] += parts[0]
                for whole, part in zip(gradients, parts[1:], strict=True):
                    whole[:, :, keys] += part
            held = passing.wait() if passing else held
            gradients = _Passing(gradients, s).wait()
        return dq.to(q.dtype), gradients[0].to(k.dtype), gradients[1].to(v.dtype), None
