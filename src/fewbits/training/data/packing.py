"""Several rows in one sequence: which rows stand side by side, and the set of sequences they make.

`fewbits.training.data.collator` makes tensors of them, in which no row sees another.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fewbits.training.data.examples import Example


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
