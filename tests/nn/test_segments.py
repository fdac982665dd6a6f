"""Boundaries of packed rows: right, of few shapes, and the same through positions, lengths and keywords."""

from __future__ import annotations

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.nn.segments import KEYWORDS, Segments, uniform_segments


def random_lengths(count, seed):
    return torch.randint(1, 40, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_positions_and_lengths_agree(seed):
    rows = [random_lengths(5, 2 * seed), random_lengths(7, 2 * seed + 1)]
    width = max(map(sum, rows)) + 3
    rows = [[*row, width - sum(row)] for row in rows]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    lengths = [n for row in rows for n in row]
    a, b = Segments.from_position_ids(positions), Segments.from_lengths(lengths)
    assert a.cu_seqlens.tolist() == b.cu_seqlens.tolist() and a.cu_seqlens.dtype == torch.int32
    assert (
        (a.max_seqlen, a.total_tokens) == (b.max_seqlen, b.total_tokens) == (a.max_seqlen, positions.numel())
    )
    assert [end - start for start, end in a.bounds()] == lengths
    ends = torch.tensor(lengths).cumsum(0)
    expected = torch.repeat_interleave(ends - torch.tensor(lengths), torch.tensor(lengths))
    assert torch.equal(a.starts().long(), expected)


def test_a_row_may_begin_anywhere_and_ends_with_its_sequence():
    positions = torch.tensor([[5, 6, 7, 0], [1, 2, 3, 4]])
    assert Segments.from_position_ids(positions).bounds() == [(0, 3), (3, 4), (4, 8)]


def test_shapes_are_few():
    """Over many batches of one size the boundaries and the longest length take a handful of values."""
    seen = set()
    for seed in range(200):
        lengths = random_lengths(1 + seed % 60, seed)
        s = Segments.from_lengths([*lengths, 4096 - sum(lengths)])
        assert s.max_seqlen >= max(lengths) and s.cu_seqlens[-1] == 4096
        seen.add((len(s.cu_seqlens), s.max_seqlen))
    assert len(seen) <= 16
    fixed = {
        len(Segments.from_lengths(random_lengths(n, n), num_segments=64, max_seqlen=64).cu_seqlens)
        for n in range(1, 60)
    }
    assert fixed == {65}


def test_what_does_not_fit_is_refused():
    with pytest.raises(BadInput, match="3 segments of up to 9 tokens"):
        Segments.from_lengths([9, 1, 1], num_segments=2)
    with pytest.raises(BadInput, match="into 8 of up to 8"):
        Segments.from_lengths([9, 1, 1], max_seqlen=8)
    with pytest.raises(BadInput, match="without max_length_q"):
        Segments.from_keywords({"cu_seq_lens_q": torch.zeros(2)}, 3)


def test_keywords_are_those_of_transformers():
    from transformers.modeling_flash_attention_utils import FlashAttentionKwargs

    segments = Segments.from_lengths([3, 4])
    keywords = segments.keywords()
    assert set(KEYWORDS) == set(keywords) == set(FlashAttentionKwargs.__annotations__)
    back = Segments.from_keywords(keywords, 7)
    assert back.cu_seqlens is segments.cu_seqlens and back.max_seqlen == segments.max_seqlen
    assert Segments.from_keywords({"other": 1}, 7) is None


def test_an_unpacked_batch_as_segments():
    assert uniform_segments(3, 5, torch.device("cpu")).bounds() == [(0, 5), (5, 10), (10, 15)]
