"""Several rows in one sequence, without one seeing another; and padded batches for rows that stay alone.

Packed rows are told apart by their boundaries, `fewbits.nn.segments.Segments`, made here once per batch under
the names that FlashAttention has for them in transformers; fewbits' attention takes them too
(`fewbits.host.attention`). Position ids restart at 0, with no attention mask and no cache: without fewbits'
attention, transformers builds the block-diagonal (for sliding windows: banded) mask for eager and SDPA
attention from these. The first token of each row is never a label, so no row predicts the next one.

A padded batch needs no attention mask either: padding stands on the right, where a causal model's tokens do
not look, and has no labels. (A mask would cost the fast causal kernels, and with eager sliding windows the
rows of padding that see no key at all become NaN.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from fewbits.nn.segments import Segments
from fewbits.training.data.examples import Example

IGNORED = -100
Batch = dict[str, Any]


def pack(lengths: Sequence[int], capacity: int, *, seed: int = 0) -> list[list[int]]:
    """Best-fit decreasing: each row goes into the fullest sequence that still has room.

    Args:
        lengths: tokens of each row, none above ``capacity``.
        capacity: tokens of a sequence.
        seed: decides which of several rows of one length comes first.

    Returns:
        The rows of each sequence; the same for the same arguments, on any machine.
    """
    order = np.random.default_rng([seed, 2]).permutation(len(lengths))
    order = order[np.argsort(-np.asarray(lengths)[order], kind="stable")]
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, sequence), ascending
    for index in order.tolist():
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"a row of {length} tokens does not fit into {capacity}")
        at = bisect_left(room, (length, -1))
        if at == len(room):
            bins.append([index])
            free, number = capacity - length, len(bins) - 1
        else:
            free, number = room.pop(at)
            bins[number].append(index)
            free -= length
        if free > 0:
            insort(room, (free, number))
    return bins


class SequenceDataset(Dataset[list[Example]]):
    """One item is one sequence of the batch: a single row, or the rows packed together."""

    def __init__(self, examples: Sequence[Example], bins: Sequence[Sequence[int]] | None = None) -> None:
        self.examples = examples
        self.bins = bins if bins is not None else [[i] for i in range(len(examples))]

    def __len__(self) -> int:
        return len(self.bins)

    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(sum(len(self.examples[i]) for i in rows) for rows in self.bins)

    def most_rows(self) -> int:
        """Rows of the sequence that has the most."""
        return max(map(len, self.bins))

    def num_tokens(self, indices: Sequence[int]) -> int:
        """Tokens of these sequences, without padding."""
        return int(self._sizes[0, indices].sum())

    def num_trained(self, indices: Sequence[int]) -> int:
        """Their tokens that the loss counts."""
        return int(self._sizes[1, indices].sum())

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        """Tokens and trained tokens of each sequence: (2, sequences)."""
        rows = [(len(e), int(e.trained[1:].sum())) for e in self.examples]
        return np.array([np.sum([rows[i] for i in rows_of], 0) for rows_of in self.bins], np.int64).T

    def __getitem__(self, index: int) -> list[Example]:
        """The rows of a sequence; of ``~index`` the same without a trained token."""
        rows = [self.examples[i] for i in self.bins[index if index >= 0 else ~index]]
        return rows if index >= 0 else [replace(e, trained=np.zeros_like(e.trained)) for e in rows]


class Collator:
    """Sequences to a batch of tensors.

    ``valid_rows`` is there where many labels do not count: a bound on those that do, which spares
    `fewbits.nn.loss.LogitFreeLoss` the others; other losses take no notice. Besides the model's inputs a
    batch holds ``rows`` (where its rows stand in the file) and ``num_tokens`` (tokens without padding), which
    the Trainer takes out again.
    """

    def __init__(
        self,
        pad_id: int,
        *,
        packed: bool = False,
        flatten: bool = False,
        multiple_of: int = 1,
        width: int = 0,
        segments: int | None = None,
    ) -> None:
        """What a batch looks like.

        Args:
            pad_id: the token that pads.
            packed: several rows in a sequence.
            flatten: a packed batch becomes one long sequence, as FlashAttention needs it.
            multiple_of: the tokens of a sequence are.
            width: a packed sequence has at least so many tokens, so that one batch is as long as the next and
                nothing is compiled again.
            segments: boundaries are given for so many rows in all, whatever their number, so that batches
                differ in values alone; padding of a sequence counts as one. None: for as few as fit.
        """
        self.pad_id = pad_id
        self.packed = packed
        self.flatten = flatten
        self.multiple_of = multiple_of
        self.width = width if packed else 0
        self.segments = segments

    def __call__(self, sequences: list[list[Example]]) -> Batch:
        """The batch: input_ids, labels (B, T); where packed position_ids (B, T) and the rows' boundaries."""
        least = self.width
        if self.packed and self.flatten:
            least *= len(sequences)
            sequences = [[example for sequence in sequences for example in sequence]]
        widest = max(least, *(sum(len(e) for e in sequence) for sequence in sequences))
        width = -(-widest // self.multiple_of) * self.multiple_of
        shape = (len(sequences), width)
        input_ids = torch.full(shape, self.pad_id)
        labels = torch.full(shape, IGNORED)
        positions = torch.zeros(shape, dtype=torch.long)
        num_tokens = 0
        for i, sequence in enumerate(sequences):
            start = 0
            for example in sequence:
                here = slice(start, start + len(example))
                ids = torch.from_numpy(example.input_ids.astype(np.int64))
                input_ids[i, here] = ids
                labels[i, here] = torch.where(torch.from_numpy(example.trained), ids, IGNORED)
                labels[i, start] = IGNORED
                positions[i, here] = torch.arange(len(example))
                start += len(example)
            num_tokens += start
            positions[i, start:] = torch.arange(width - start)  # padding is a row of its own
        batch: Batch = {"input_ids": input_ids, "labels": labels}
        if self.packed:
            batch |= {"position_ids": positions, "use_cache": False}  # with a cache, no packed mask is built
            batch |= _boundaries(sequences, width, self.segments).keywords()
        if self.segments is None:  # else batches differ in values of tensors alone
            batch |= _bound(labels)
        batch["rows"] = [[e.row for e in sequence] for sequence in sequences]
        batch["num_tokens"] = num_tokens
        return batch


def _bound(labels: Tensor) -> Batch:
    """A bound on the labels that count, where many do not: the loss need not look at the other rows.

    In eighths of the batch, so that shapes stay few.
    """
    counted, total = int((labels[:, 1:] != IGNORED).sum()), labels.numel()
    eighth = -(-total // 8)
    bound = -(-counted // eighth) * eighth
    return {"valid_rows": bound} if counted and bound <= total - eighth else {}


def _boundaries(sequences: list[list[Example]], width: int, num_segments: int | None) -> Segments:
    lengths = [[len(example) for example in sequence] for sequence in sequences]
    return Segments.from_lengths(
        [n for row in lengths for n in (*row, width - sum(row))],
        num_segments=num_segments,
        max_seqlen=None if num_segments is None else width,
    )


class EpochSampler(Sampler[int]):
    """A new order in each epoch, which depends on the seed and the epoch only: a resumed run repeats it."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        yield from self.order(self.epoch)

    def order(self, epoch: int) -> list[int]:
        """The order of one epoch."""
        order: list[int] = np.random.default_rng([self.seed, 3, epoch]).permutation(self.size).tolist()
        return order

    def set_epoch(self, epoch: int) -> None:
        """Chosen by the Trainer before each epoch."""
        self.epoch = epoch


def count_trained(batch: Batch) -> Tensor:
    """Labels that the shifted loss counts: () int64."""
    count: Tensor = (batch["labels"][:, 1:] != IGNORED).sum()
    return count
