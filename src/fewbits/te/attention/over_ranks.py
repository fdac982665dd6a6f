"""`DotProductAttention` with context parallelism: which calls a ring or an exchange of heads computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.te.attention.masks import Visibility
from fewbits.te.context.exchange import ExchangeSettings, heads_to_rows, rows_to_heads
from fewbits.te.context.ring import RingSettings, ring_attention
from fewbits.te.context.shares import SequenceShare, rows_in_order, share_of_whole, shares_of_packed
from fewbits.te.layers.module import refuse
from fewbits.te.ranks.distributed import group_size


class ContextGroup(NamedTuple):
    """The ranks that share each sequence.

    Attributes:
        group: torch's process group.
        kind: "p2p", a ring, or "a2a", an exchange of heads.
    """

    group: Any
    kind: str


class RowShares(NamedTuple):
    """The sequences among the rows of queries, and among those of keys."""

    queries: list[SequenceShare]
    keys: list[SequenceShare]


def context_group(cp_group: Any, cp_comm_type: str) -> ContextGroup | None:
    """The ranks by Transformer Engine's words; None where there is one at most.

    Raises:
        Unsupported: two levels of ranks, or gathered keys.
    """
    groups = cp_group if isinstance(cp_group, (list, tuple)) else [cp_group]
    refuse(len(groups) > 1, "context parallelism on two levels (a2a+p2p)", "give one group, 'p2p' or 'a2a'")
    if groups[0] is None or group_size(groups[0]) == 1:
        return None
    refuse(cp_comm_type not in ("p2p", "a2a"), f"cp_comm_type {cp_comm_type!r}", "choose 'p2p' or 'a2a'")
    return ContextGroup(groups[0], cp_comm_type)


def check_call(
    context: ContextGroup, see: Visibility, extras: dict[str, bool], of_ring: dict[str, bool]
) -> None:
    """Refuse what context parallelism does not compute.

    Args:
        context: the ranks.
        see: which keys a query sees.
        extras: names of what neither way computes, and whether a call asks for it.
        of_ring: the same of what the ring alone does not.

    Raises:
        Unsupported: with the way out.
    """
    for name, is_asked_for in extras.items():
        refuse(
            is_asked_for, f"{name} under context parallelism", "leave it out, or give ranks whole sequences"
        )
    has_window = see.window[0] >= 0 or (see.window[1] >= 0 and not see.is_causal)
    for name, is_asked_for in {**of_ring, "a sliding window": has_window}.items():
        refuse(is_asked_for and context.kind == "p2p", f"{name} in a ring", "choose cp_comm_type 'a2a'")
    refuse("bottom_right" in see.kind, "a bottom-right mask under context parallelism", "take 'causal'")
    if see.kind == "arbitrary":
        raise BadInput("context parallelism takes causal masks or none: a mask of one's own is not cut.")


def shares_of_call(
    rows: tuple[int, int], lengths: tuple[Any, ...] | None, ranks: int, causal: bool
) -> RowShares:
    """Where sequences lie among this rank's rows.

    Args:
        rows: of queries and of keys, where sequences are not packed.
        lengths: cumulative lengths (b + 1,) of queries and keys, and where each begins; None: not packed.
        ranks: how many.
        causal: then queries and keys are the same sequences.
    """
    if lengths is None:
        shares = RowShares([share_of_whole(rows[0])], [share_of_whole(rows[1])])
    else:
        cu_q, cu_kv, padded_q, padded_kv = (None if c is None else c.tolist() for c in lengths)
        if cu_q is None:
            raise BadInput("qkv_format 'thd' needs cu_seqlens_q, of all ranks' tokens.")
        cu_kv, padded_q = cu_kv or cu_q, padded_q or cu_q
        keys = shares_of_packed(cu_kv, padded_kv or (padded_q if cu_kv == cu_q else cu_kv), ranks)
        shares = RowShares(shares_of_packed(cu_q, padded_q, ranks), keys)
    if causal and shares.queries != shares.keys:
        raise BadInput("under a causal mask context parallelism takes queries and keys of the same lengths.")
    return shares


def by_ring(
    qkv: tuple[Tensor, Tensor, Tensor], shares: RowShares, context: ContextGroup, causal: bool, scale: float
) -> Tensor:
    """Attention (b, h, m, d_v) of q (b, h, m, d) over k (b, g, n, d) and v (b, g, n, d_v) of all ranks."""
    rank, ranks = torch.distributed.get_rank(context.group), group_size(context.group)
    settings = RingSettings(context.group, rank, ranks, shares.queries, shares.keys, causal, scale)
    return ring_attention(*qkv, settings)


def exchanges(shares: RowShares, rows: tuple[int, int], context: ContextGroup) -> tuple[Any, Any]:
    """What to do to queries and keys (b, h, rows, d) before attention, and to its result after it."""
    ranks = group_size(context.group)
    of_q, of_k = (
        ExchangeSettings(context.group, ranks, rows_in_order(part, ranks, n))
        for part, n in zip(shares, rows, strict=True)
    )

    def before(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rows_to_heads(q, of_q), rows_to_heads(k, of_k), rows_to_heads(v, of_k)

    return before, lambda y: heads_to_rows(y, of_q)
