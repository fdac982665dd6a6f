"""Which tokens of a sequence each rank has: two of 2 * ranks equal pieces, so that causal work is balanced.

Rank r of n has the pieces r and 2n - 1 - r, in this order: under a causal mask the one has as many keys to
see as the other lacks. A sequence that is no multiple of 2n is padded at its end first, and of packed
sequences each is cut by itself. This is Transformer Engine's order, by which Megatron cuts its batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput


class SequenceShare(NamedTuple):
    """Where a sequence lies among the rows of a rank, and how much of it counts.

    Attributes:
        start: its first row on every rank.
        piece: rows of one of its pieces; a rank has two.
        length: tokens that count, of all ranks'; padding follows them.
    """

    start: int
    piece: int
    length: int

    def valid(self, rank: int, ranks: int) -> int:
        """How many of a rank's rows count: always its first ones, as its second piece is a later one."""
        firsts = (rank * self.piece, (2 * ranks - 1 - rank) * self.piece)
        return sum(min(max(self.length - first, 0), self.piece) for first in firsts)


def share_of_whole(rows: int) -> SequenceShare:
    """The share of a sequence of which each rank has ``rows``, all of which count.

    Raises:
        BadInput: an odd number.
    """
    if rows % 2:
        raise BadInput(
            f"context parallelism gives each rank two pieces of a sequence, and {rows} rows are no two: pad "
            "sequences to a multiple of twice the ranks."
        )
    return SequenceShare(0, rows // 2, 10**18)


def shares_of_packed(cu_seqlens: Sequence[int], padded: Sequence[int], ranks: int) -> list[SequenceShare]:
    """The shares of packed sequences.

    Args:
        cu_seqlens: cumulative lengths of what counts, (b + 1,), of all ranks' tokens.
        padded: where each begins, (b + 1,), each length a multiple of twice the ranks.
        ranks: among which they are cut.
    """
    shares = []
    for i in range(len(cu_seqlens) - 1):
        room, length = padded[i + 1] - padded[i], cu_seqlens[i + 1] - cu_seqlens[i]
        if room % (2 * ranks) or length > room:
            raise BadInput(
                f"packed sequence {i} has {length} tokens in {room} places: under context parallelism places "
                f"are a multiple of {2 * ranks}, twice the ranks; see pad_thd_sequences_for_cp."
            )
        shares.append(SequenceShare(padded[i] // ranks, room // (2 * ranks), length))
    return shares


def rows_in_order(shares: Sequence[SequenceShare], ranks: int, rows: int) -> Tensor:
    """Where each token of whole sequences is found when the rows of all ranks stand one after the other.

    Args:
        shares: of all sequences.
        ranks: how many.
        rows: that each rank has, those between sequences too.

    Returns:
        (ranks * rows,) int64, on the CPU: sequences where they lie in whole tensors.
    """
    places = torch.arange(ranks * rows)
    for start, piece, _ in shares:
        for number in range(2 * ranks):
            rank = min(number, 2 * ranks - 1 - number)
            first = rank * rows + start + (0 if number < ranks else piece)
            at = start * ranks + number * piece
            places[at : at + piece] = torch.arange(first, first + piece)
    return places


def rows_of_rank(cu_seqlens: Sequence[int], rank: int, ranks: int) -> Tensor:
    """The tokens of padded sequences that a rank has: int64, in its order; ``cu_seqlens`` (b + 1,)."""
    rows = []
    for begin, end in pairwise(cu_seqlens):
        piece = (end - begin) // (2 * ranks)
        for number in (rank, 2 * ranks - 1 - rank):
            rows.append(torch.arange(begin + number * piece, begin + (number + 1) * piece))
    return torch.cat(rows)


def pad_thd_sequences_for_cp(
    input_ids: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed sequences, each filled up to a multiple of a number: twice the ranks.

    Args:
        input_ids: (t,) or (1, t).
        labels: likewise.
        cu_seqlens: (b + 1,) cumulative lengths.
        divisibility_factor: the number.
        padding_token_id: what fills tokens.
        padding_label_id: what fills labels.

    Returns:
        Tokens and labels (t2,), and cumulative lengths (b + 1,) with the padding.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    fills = [-length % divisibility_factor for length in lengths]
    filled = []
    for row, fill in ((input_ids.reshape(-1), padding_token_id), (labels.reshape(-1), padding_label_id)):
        pieces = row[: sum(lengths)].split(lengths)  # type: ignore[no-untyped-call]
        ends = [row.new_full((count,), fill) for count in fills]
        filled.append(torch.cat([part for pair in zip(pieces, ends, strict=True) for part in pair]))
    rooms = cu_seqlens.new_tensor([0, *map(sum, zip(lengths, fills, strict=True))])
    return filled[0], filled[1], rooms.cumsum(0).to(cu_seqlens.dtype)


def generate_positional_ids_for_cp(
    cu_seqlens: Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> Tensor:
    """Positions (t2,) of sequences that `pad_thd_sequences_for_cp` fills: each counts from 0, padding too.

    Args:
        cu_seqlens: (b + 1,) cumulative lengths without padding.
        divisibility_factor: what padded lengths are multiples of.
        dtype: of the result.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    return torch.cat([torch.arange(n + -n % divisibility_factor, dtype=dtype) for n in lengths])


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: Tensor,
    input_ids_padded: Tensor | None,
    labels_padded: Tensor | None,
    position_ids_padded: Tensor | None,
    cp_group: Any = None,
    qvk_format: str = "thd",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """This rank's tokens, labels and positions of a packed batch that all ranks have whole.

    Args:
        cu_seqlens_padded: (b + 1,) cumulative lengths, each a multiple of twice the ranks.
        input_ids_padded: (t,), (1, t) or (t, 1), as the next two; None stays None.
        labels_padded: see there.
        position_ids_padded: see there.
        cp_group: the ranks.
        qvk_format: "thd".
    """
    if qvk_format != "thd":
        raise BadInput(f"qvk_format is 'thd' here, not {qvk_format!r}: cut other batches with rows_of_rank.")
    ranks = torch.distributed.get_world_size(cp_group)
    bounds = [int(bound) for bound in cu_seqlens_padded]
    rank = torch.distributed.get_rank(cp_group) if ranks > 1 else 0

    def cut(whole: Tensor | None) -> Tensor | None:
        if whole is None or ranks == 1:
            return whole
        axes = [axis for axis in (1, 0) if whole.dim() > axis and whole.shape[axis] == bounds[-1]]
        if not axes:
            raise BadInput(
                f"a tensor of shape {tuple(whole.shape)} has no axis of {bounds[-1]} tokens: make sure that "
                "the inputs are in THD format and padded correctly."
            )
        return whole.index_select(axes[0], rows_of_rank(bounds, rank, ranks).to(whole.device))

    return cut(input_ids_padded), cut(labels_padded), cut(position_ids_padded)
