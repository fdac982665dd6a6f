"""Attention of whole sequences by some of the heads: ranks exchange rows for heads before it, and back after.

Each rank has its rows of all heads (b, h, m, d); after the exchange it has all rows, in order, of h / ranks
heads, to which any attention may be applied; another exchange gives each rank its rows of all heads again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.launch.derivatives import once_differentiable


class ExchangeSettings(NamedTuple):
    """Who exchanges what.

    Attributes:
        group: the ranks.
        ranks: how many.
        order: `rows_in_order` of the sequences, (ranks * m,) int64.
    """

    group: Any
    ranks: int
    order: Tensor


def rows_to_heads(x: Tensor, settings: ExchangeSettings) -> Tensor:
    """All rows of some heads: x (b, h, m, d) to (b, h / ranks, ranks * m, d), rows in order.

    Raises:
        BadInput: heads that cannot be shared evenly.
    """
    if x.shape[1] % settings.ranks:
        raise BadInput(
            f"{x.shape[1]} heads cannot be shared by {settings.ranks} ranks: choose cp_comm_type 'p2p'."
        )
    moved: Tensor = _Exchange.apply(x, settings, True)
    return moved


def heads_to_rows(x: Tensor, settings: ExchangeSettings) -> Tensor:
    """The inverse of `rows_to_heads`: x (b, h / ranks, ranks * m, d) to (b, h, m, d)."""
    moved: Tensor = _Exchange.apply(x, settings, False)
    return moved


def _sent(x: Tensor, s: ExchangeSettings) -> Tensor:
    """x (ranks, ...), of which each rank gets its entry: all ranks' entries for this one, in their order."""
    x = x.contiguous()
    received = torch.empty_like(x)
    torch.distributed.all_to_all_single(received, x, group=s.group)
    return received


def _to_heads(x: Tensor, s: ExchangeSettings) -> Tensor:
    received = _sent(torch.stack(x.chunk(s.ranks, 1)), s)  # (ranks, b, h / ranks, m, d)
    rows = received.movedim(0, 2).flatten(2, 3)
    return rows.index_select(2, s.order.to(x.device))


def _to_rows(x: Tensor, s: ExchangeSettings) -> Tensor:
    back = torch.empty_like(s.order)
    back[s.order] = torch.arange(len(back))
    pieces = x.index_select(2, back.to(x.device)).chunk(s.ranks, 2)
    return torch.cat(list(_sent(torch.stack(pieces), s)), 1)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, s: ExchangeSettings, is_to_heads: bool) -> Tensor:
        ctx.settings, ctx.is_to_heads = s, is_to_heads
        return (_to_heads if is_to_heads else _to_rows)(x, s)

    @staticmethod
    @once_differentiable("attention over ranks")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        back = _to_rows if ctx.is_to_heads else _to_heads
        return back(dy, ctx.settings), None, None
