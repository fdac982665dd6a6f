"""The product of prepared operands as one call: counts by counts.py, then their values.

``y = 0; for chunks in ascending order: y = y + (acc * c) * (sa * sb)``, ``c = Q**2 / L``, each step one
float32 rounding. It is what the op `fewbits::stochastic_codes` computes on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fewbits.formats.stochastic import Stochastic
from fewbits.kernels.stochastic.counts import Lengths, stream_sums


def codes_product(
    qa_BND: Tensor,
    sa_BNC: Tensor,
    qb_BMD: Tensor,
    sb_BMC: Tensor,
    options: Stochastic,
    levels: Sequence[int],
    level_index: Tensor | None = None,
) -> Tensor:
    """(B, N, M) float32.

    Args:
        qa_BND: codes of a, int8.
        sa_BNC: its scales, float32, of each row and chunk; NaN makes the row NaN.
        qb_BMD: codes of b, (B, M, D) or (1, M, D).
        sb_BMC: its scales.
        options: of the product; ``levels`` stand in place of its stream length.
        levels: the stream lengths that occur; with 0 a row's chunk counts nothing.
        level_index: which of them each of a's rows has in each chunk, whole numbers (B or 1, N or 1, C or 1);
            None: all have the first.
    """
    B, N, D = qa_BND.shape
    y = torch.zeros(B, N, qb_BMD.shape[1], device=qa_BND.device, dtype=torch.float32)
    if not y.numel():
        return y
    factors = torch.tensor(
        [factor(options, level) for level in levels], device=qa_BND.device, dtype=torch.float32
    )
    for i, chunk in enumerate(options.chunks(D)):
        index = None
        if level_index is not None:
            index = level_index[..., i if level_index.shape[-1] > 1 else 0].long()
        acc = counts_of_lengths(
            qa_BND[..., chunk], qb_BMD[..., chunk], options, Lengths(tuple(levels), index)
        )
        c = factors[0] if index is None else factors[index][..., None]
        part = acc.float().mul_(c)
        y += part.mul_(sa_BNC[..., i, None] * sb_BMC[:, None, :, i])
    return y


def factor(options: Stochastic, length: int) -> float:
    """c = Q**2 / L, what a count is multiplied by; 0 for streams of no steps."""
    return options.max_code**2 / length if length else 0.0


def counts_of_lengths(qa_BND: Tensor, qb_BMD: Tensor, options: Stochastic, lengths: Lengths) -> Tensor:
    """`stream_sums` of operands, or of a chunk of them, for any lengths that the options allow."""
    D = qa_BND.shape[-1]
    acc: Tensor | None = None
    for masks, levels in _by_masks(options, lengths.lengths, D).items():
        longest = max(1, *levels)
        part = stream_sums(
            qa_BND, qb_BMD, options.with_length(longest).streams, masks, Lengths(levels, lengths.of_rows)
        )
        acc = part if acc is None else acc + part
    assert acc is not None
    return acc


def _by_masks(options: Stochastic, lengths: Sequence[int], D: int) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Lengths by the masks of their dimensions: one entry, or on a full grid one more for full streams.

    Each entry has all lengths, those of other masks as 0.
    """
    by_masks: dict[tuple[int, ...], set[int]] = {}
    for length in set(lengths) - {0} or {1}:
        by_masks.setdefault(options.with_length(length).masks(D), set()).add(length)
    return {masks: tuple(n if n in own else 0 for n in lengths) for masks, own in by_masks.items()}
