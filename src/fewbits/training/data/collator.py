"""Sequences of rows become the tensors of a batch: tokens, labels, positions, and where one row ends.

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

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.nn.segments import Segments
from fewbits.training.data.examples import Example
from fewbits.training.data.pictures import Sight

IGNORED = -100
Batch = dict[str, Any]


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
        sight: Sight | None = None,
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
            sight: turns the rows' images into tensors; None for rows of text alone.
        """
        self.pad_id = pad_id
        self.packed = packed
        self.flatten = flatten
        self.multiple_of = multiple_of
        self.width = width if packed else 0
        self.segments = segments
        self.sight = sight

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
        if self.sight is not None:
            batch |= self.sight.inputs([[p for e in row for p in e.pictures] for row in sequences], input_ids)
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


def count_trained(batch: Batch) -> Tensor:
    """Labels that the shifted loss counts: a scalar, int64."""
    count: Tensor = (batch["labels"][:, 1:] != IGNORED).sum()
    return count
