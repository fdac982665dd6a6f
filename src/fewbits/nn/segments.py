"""`Segments`: where the rows of a packed batch begin and end, made once per batch and seen by every layer.

A batch of B sequences of T tokens is looked at as one run of B * T tokens; padding is a segment of its own.
The boundaries are a tensor on the device, the longest length is a plain number of the host, and both come in
few different sizes: nothing that sees them waits for the device or is compiled again for every batch.

Through a Hugging Face model they travel under the names that transformers has for them (``cu_seq_lens_q`` and
three more), which its models hand down to each decoder layer and to the attention function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput

KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_FEWEST_BOUNDARIES, _SHORTEST = 8, 64


@dataclass(frozen=True, eq=False)
class Segments:
    """Rows that lie behind one another and do not see each other.

    Attributes:
        cu_seqlens: (N + 1,) int32, ascending from 0 to ``total_tokens``; the last value repeats (empty
            segments) up to one of few lengths.
        max_seqlen: at least the length of the longest segment.
        total_tokens: of all segments, padding included.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    total_tokens: int

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        *,
        num_segments: int | None = None,
        max_seqlen: int | None = None,
        device: torch.device | str | None = None,
    ) -> Segments:
        """The boundaries of segments of these lengths.

        Args:
            lengths: tokens of each segment, in order.
            num_segments: with empty ones at the end there are this many; by default the next power of two.
            max_seqlen: what the longest length is given as; by default the next of 64, 96, 128, 192, 256
                and so on, at most all tokens. (FlashAttention starts blocks for it that find nothing to do:
                rows of up to 1430 tokens take 2 % longer on an H200 with 2048, and 29 % with 8192.)
            device: where ``cu_seqlens`` goes; None: the host, so that the batch's own copy moves it.

        Raises:
            BadInput: there are more or longer segments than was said.
        """
        lengths = [int(n) for n in lengths if n]
        total, longest = sum(lengths), max(lengths, default=0)
        count = _power_of_two(max(len(lengths), _FEWEST_BOUNDARIES)) if num_segments is None else num_segments
        most = min(_bucket(max(longest, _SHORTEST)), total) if max_seqlen is None else max_seqlen
        if len(lengths) > count or longest > most:
            raise BadInput(
                f"{len(lengths)} segments of up to {longest} tokens do not go into {count} of up to {most}; "
                "give larger num_segments and max_seqlen, or none."
            )
        ends = [0, *accumulate(lengths)]
        ends += [total] * (count + 1 - len(ends))
        return cls(torch.tensor(ends, dtype=torch.int32, device=device), most, total)

    @classmethod
    def from_position_ids(cls, position_ids: Tensor, *, device: torch.device | str | None = None) -> Segments:
        """The segments of (B, T) positions: one ends wherever the next position is not one higher.

        Positions on a GPU are copied to the host first, which waits for it.
        """
        positions = position_ids.detach().to("cpu")
        first = torch.ones(positions.shape, dtype=torch.bool)
        first[:, 1:] = positions.diff(dim=-1) != 1
        starts = first.flatten().nonzero().flatten().tolist()
        ends = [*starts[1:], positions.numel()]
        return cls.from_lengths(
            [end - start for start, end in zip(starts, ends, strict=True)],
            device=position_ids.device if device is None else device,
        )

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any], total_tokens: int) -> Segments | None:
        """What `keywords` gave, as it arrives in a layer; None if there is nothing of it."""
        cu_seqlens, longest = keywords.get(KEYWORDS[0]), keywords.get(KEYWORDS[2])
        if cu_seqlens is None:
            return None
        if longest is None:
            raise BadInput(f"{KEYWORDS[0]} came without {KEYWORDS[2]}; give both, or Segments.keywords().")
        return cls(cu_seqlens, int(longest), total_tokens)

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments with which a transformers model takes them."""
        return dict(zip(KEYWORDS, (self.cu_seqlens, self.cu_seqlens, *[self.max_seqlen] * 2), strict=True))

    def to(self, device: torch.device | str) -> Segments:
        """The same on a device."""
        return Segments(self.cu_seqlens.to(device, non_blocking=True), self.max_seqlen, self.total_tokens)

    def bounds(self) -> list[tuple[int, int]]:
        """(begin, end) of each segment that is not empty, on the host; boundaries on a GPU are waited for."""
        ends = self.cu_seqlens.tolist()
        return [(a, b) for a, b in pairwise(ends) if b > a]

    def starts(self) -> Tensor:
        """(total_tokens,) int32: where the segment of each token begins. Nothing waits for the device."""
        tokens = torch.arange(self.total_tokens, device=self.cu_seqlens.device, dtype=torch.int32)
        segment = torch.searchsorted(self.cu_seqlens, tokens, right=True, out_int32=True) - 1
        return self.cu_seqlens[segment]


def uniform_segments(rows: int, length: int, device: torch.device) -> Segments:
    """``rows`` segments of one length: an unpacked batch, for a function that only takes segments."""
    ends = torch.arange(0, rows * length + 1, length, device=device, dtype=torch.int32)
    return Segments(ends, length, rows * length)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _bucket(n: int) -> int:
    """The next of 2, 3, 4, 6, 8, 12, ..."""
    above = _power_of_two(n)
    return above // 4 * 3 if n <= above // 4 * 3 else above
