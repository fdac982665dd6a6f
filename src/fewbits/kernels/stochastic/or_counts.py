"""Counts of groups of dimensions whose products are OR-ed into one counter (`Streams.or_group`), exact.

    acc[n, m] = sum over groups g and steps t of  OR_{d in g: +} P_d[t] - OR_{d in g: -} P_d[t]

P_d[t] is the product's bit of `fewbits.formats.streams.product_bits` for the codes qa[n, d] and qb[m, d], +
and - the sign of their product. The sum is not one of pairs, so no table of counts holds it:
`or_sums_by_steps` is the definition, and `or_sums` does the same with 64 steps in a word. Both run on any
device in plain torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.streams import Streams, counted, operand_bits, product_bits
from fewbits.formats.table_cache import keep_tables

_WORD = 64
_VALUES_AT_ONCE = 2**20  # words of products


def check_groups(D: int, group: int) -> None:
    """Refuse dimensions of a chunk that do not make whole groups.

    Raises:
        BadInput: the numbers.
    """
    if D % group:
        raise BadInput(
            f"or_group={group} does not divide the {D} inner dimensions of a chunk; choose a divisor of it, "
            "or a chunk_d that leaves no rest."
        )


def or_sums_by_steps(qa_BND: Tensor, qb_BMD: Tensor, streams: Streams, masks: tuple[int, ...]) -> Tensor:
    """acc (B, N, M) int64 of codes (B, N, D) and (B or 1, M, D): the definition, step by step."""
    check_groups(qa_BND.shape[2], streams.or_group)
    acc = torch.zeros(*qa_BND.shape[:2], qb_BMD.shape[1], dtype=torch.int64, device=qa_BND.device)
    for start in range(0, qa_BND.shape[2], streams.or_group):
        up = torch.zeros(*acc.shape, streams.length, dtype=torch.bool, device=acc.device)
        down = up.clone()
        for d in range(start, start + streams.or_group):
            a, b = qa_BND[:, :, None, d].long(), qb_BMD[:, None, :, d].long()
            bits = product_bits(streams, masks[d]).to(a.device)[a.abs(), b.abs()]
            up |= bits & (a.sign() == b.sign())[..., None]
            down |= bits & (a.sign() != b.sign())[..., None]
        acc += counted(up.sum(-1), streams) - counted(down.sum(-1), streams)
    return acc


def or_sums(qa_BND: Tensor, qb_BMD: Tensor, streams: Streams, masks: tuple[int, ...]) -> Tensor:
    """What `or_sums_by_steps` counts, (B, N, M) int64, quicker."""
    (B, N, D), M = qa_BND.shape, qb_BMD.shape[1]
    check_groups(D, streams.or_group)
    acc = torch.zeros(B, N, M, dtype=torch.int64, device=qa_BND.device)
    words = -(-streams.length // _WORD)
    step = max(1, _VALUES_AT_ONCE // max(1, M * words))
    tables = [_words(streams, mask, qa_BND.device) for mask in masks]
    for i in range(B):
        qb = qb_BMD[i % qb_BMD.shape[0]].long()
        for start in range(0, N, step):
            rows = slice(start, start + step)
            acc[i, rows] = _sums(qa_BND[i, rows].long(), qb, streams, tables)
    return acc


def _sums(qa: Tensor, qb: Tensor, streams: Streams, tables: list[_Words]) -> Tensor:
    """acc (N, M) of codes (N, D) and (M, D), int64."""
    ones = torch.zeros(len(qa), len(qb), dtype=torch.int64, device=qa.device)
    for start in range(0, qa.shape[1], streams.or_group):
        up = down = None
        for d in range(start, start + streams.or_group):
            bits = tables[d].of(qa[:, d].abs(), qb[:, d].abs())
            other = ((qa[:, d, None] < 0) != (qb[:, d] < 0)).long().neg()[..., None]  # all ones, or none
            minus = bits & other
            plus = bits ^ minus
            up = plus if up is None else up.bitwise_or_(plus)
            down = minus if down is None else down.bitwise_or_(minus)
        assert up is not None and down is not None
        ones += _ones_of(up) - _ones_of(down)
    return counted(ones, streams)


class _Words(NamedTuple):
    """The bits of one dimension's codes, 64 in a word, the first the lowest."""

    a: Tensor  # (codes, words) int64; of pairs (codes of a, codes of b, words)
    b: Tensor | None  # (codes, words); None where a has the pairs

    def of(self, a: Tensor, b: Tensor) -> Tensor:
        """The products of codes a (N,) and b (M,): (N, M, words)."""
        return self.a[a[:, None], b] if self.b is None else self.a[a][:, None] & self.b[b]


@keep_tables(maxsize=256)
def _words(streams: Streams, mask: int, device: torch.device) -> _Words:
    if streams.gate == "and":
        a, b = (_packed(operand_bits(streams, operand, mask, streams.length)) for operand in "ab")
        return _Words(a.to(device), b.to(device))
    return _Words(_packed(product_bits(streams, mask)).to(device), None)


def _packed(bits: Tensor) -> Tensor:
    """(..., steps) bool to (..., words) int64."""
    missing = -bits.shape[-1] % _WORD
    padded = torch.nn.functional.pad(bits, (0, missing)).unflatten(-1, (-1, _WORD))
    powers = torch.tensor([1 << i for i in range(_WORD - 1)] + [-(1 << (_WORD - 1))])
    return (padded * powers).sum(-1)


def _ones_of(words: Tensor) -> Tensor:
    """How many bits of (..., words) int64 are 1, over all words: (...) int64."""
    # Neighbouring bits, pairs and nibbles added within the word; the product adds its eight bytes in the top.
    x = words - (words >> 1 & 0x5555555555555555)
    x = (x & 0x3333333333333333) + (x >> 2 & 0x3333333333333333)
    x = x + (x >> 4) & 0x0F0F0F0F0F0F0F0F
    return (x * 0x0101010101010101 >> 56 & 0xFF).sum(-1)
