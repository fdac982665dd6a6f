"""Stream counts by looking them up: exact, in plain torch, quick on a CPU.

    acc[n, m] = sum over d of sign(qa[n, d]) sign(qb[m, d]) T_d(|qa[n, d]|, |qb[m, d]|)

A code of a first becomes its number of enabled steps ``k = K_d(|qa|)``, with the code's sign: there the
length of its stream has its effect, which may differ from row to row. What follows, ``T_d = C_d(k, |qb|)``,
is the same for all lengths. One operand then becomes a table with a vector of results per (dimension, value
of the other operand), and the other looks vectors up and adds them (`embedding_bag`): ``N * M * D``
additions, beside ``(L + 1) * M * D`` values of the table. Sums are whole numbers below
2**24, exact in float32 in any order.

Arithmetics whose product is not ``C_d(K_d(|qa|), |qb|)`` (`Streams.by_prefix`) are looked up by codes, in a
table of products for each length. Where signs are in the streams, codes count from -Q. Groups that are OR-ed
have no such table: or_counts.py.

One core of an AMD EPYC (AVX2) takes 0.09 ns an addition and 0.65 ns a value of the table: 0.17 ns for each
product of two codes at 2048 x 256 x 256 and 128 steps, 0.10 at 16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.streams import (
    KEPT_TABLE_BYTES,
    Streams,
    prefix_bytes,
    prefix_tables,
    product_tables,
    step_tables,
    table_bytes,
)
from fewbits.formats.table_cache import keep_tables
from fewbits.kernels.stochastic.or_counts import or_sums

# Values of the operand that becomes a table, and values that are looked up at once. On a CPU a table of 2 MB
# stays in its cache.
_TABLE_VALUES = 2**19
_TABLE_VALUES_CUDA = 2**24
_EXACT_FLOAT32 = 2**24
_COUNTER = 2**31


class Lengths(NamedTuple):
    """The stream lengths of a product: ``lengths[of_rows[b, n]]`` for row n of entry b."""

    lengths: tuple[int, ...]
    of_rows: Tensor | None = None  # (B or 1, N or 1) int64; None: all rows have lengths[0]


def stream_sums(
    qa_BND: Tensor, qb_BMD: Tensor, streams: Streams, masks: tuple[int, ...], lengths: Lengths | None = None
) -> Tensor:
    """The signed sums of stream counts, (B, N, M): float32 where that holds them exactly, else int32.

    Args:
        qa_BND: codes of a, whole numbers.
        qb_BMD: codes of b, (B, M, D) or (1, M, D).
        streams: the longest streams.
        masks: the mask of each of the D dimensions, the same for streams of each length.
        lengths: the lengths of a's rows, at most that of ``streams``; 0 counts nothing. None: all the same.

    Raises:
        Unsupported: a count could exceed 32 bits.
    """
    B, N, D = qa_BND.shape
    M = qb_BMD.shape[1]
    if D * streams.length >= _COUNTER:
        raise Unsupported(
            f"{D} dimensions of {streams.length} steps overflow a 32-bit counter; "
            "set chunk_d to a smaller part."
        )
    lengths = lengths or Lengths((streams.length,))
    if streams.or_group > 1:
        return _or_sums_of_lengths(qa_BND, qb_BMD, streams, masks, lengths)
    lookup = _Lookup(streams, masks, lengths, qa_BND.device)
    rows = (lookup.rows, streams.max_code + 1)  # of the table, if b or a becomes one
    b_is_table = streams.signed or M * rows[0] <= N * rows[1]
    table_rows, vector, others = (rows[0], M, N) if b_is_table else (rows[1], N, M)
    step = _dimensions_at_once(lookup, table_rows * vector, others, qa_BND.is_cuda)
    exact = D * streams.length < _EXACT_FLOAT32
    dtype = torch.float32 if exact else torch.int32
    acc = torch.zeros(B, others, vector, dtype=dtype, device=qa_BND.device)
    for part in (slice(start, min(start + step, D)) for start in range(0, D, step)):
        tables = lookup.tables(part, transposed=not b_is_table)
        for i in range(B):
            a, b = lookup.enabled(qa_BND[i, :, part], part, i), qb_BMD[i % qb_BMD.shape[0], :, part]
            tabled, other = (b, a) if b_is_table else (a, b)
            acc[i] += _looked_up(tabled, other, tables, signed=streams.signed).to(dtype)
    return acc if b_is_table else acc.transpose(-1, -2)


def _or_sums_of_lengths(
    qa_BND: Tensor, qb_BMD: Tensor, streams: Streams, masks: tuple[int, ...], lengths: Lengths
) -> Tensor:
    acc = torch.zeros(*qa_BND.shape[:2], qb_BMD.shape[1], dtype=torch.int64, device=qa_BND.device)
    for i, length in enumerate(lengths.lengths if lengths.of_rows is not None else lengths.lengths[:1]):
        if length:
            part = or_sums(qa_BND, qb_BMD, replace(streams, length=length), masks)
            acc += part if lengths.of_rows is None else part * (lengths.of_rows == i)[..., None]
    exact = qa_BND.shape[2] * streams.length < _EXACT_FLOAT32
    return acc.to(torch.float32 if exact else torch.int32)


def _looked_up(tabled: Tensor, other: Tensor, tables: Tensor, *, signed: bool) -> Tensor:
    """The sums (M, R) for values (R, D) and (M, D); tables (D, values of other, signed ones of tabled)."""
    D, rows, columns = tables.shape
    index = (tabled.t().long() + columns // 2)[:, None, :].expand(D, rows, len(tabled))
    vectors = torch.gather(tables, 2, index).view(D * rows, len(tabled))
    looked = other.abs().int() + torch.arange(0, D * rows, rows, dtype=torch.int32, device=other.device)
    signs = None if signed else other.sign().float()  # or those of a are in the rows of its table
    return F.embedding_bag(looked, vectors, mode="sum", per_sample_weights=signs)


def _dimensions_at_once(lookup: _Lookup, vectors: int, others: int, on_gpu: bool) -> int:
    """How many inner dimensions make sums that float32 holds exactly and operands of modest size."""
    values = _TABLE_VALUES_CUDA if on_gpu else _TABLE_VALUES
    limits = [values // vectors, values // others, (_EXACT_FLOAT32 - 1) // max(1, lookup.streams.length)]
    if not lookup.kept:
        limits.append(KEPT_TABLE_BYTES // lookup.bytes_a_table)
    return max(1, min(limits))


class _Lookup:
    """The tables of one product, for any part of its inner dimensions."""

    def __init__(self, streams: Streams, masks: tuple[int, ...], lengths: Lengths, device: torch.device):
        self.streams, self.masks, self.lengths, self.device = streams, masks, lengths, device
        one_length = lengths.of_rows is None
        # By codes where that is shorter: for a single length of more steps than there are codes.
        self.by_code = not streams.by_prefix or (one_length and lengths.lengths[0] > streams.max_code)
        # Of the tables by codes: one after the other in the rows.
        self.levels = (lengths.lengths[:1] if one_length else lengths.lengths) if self.by_code else ()
        self.rows = len(self.levels) * streams.num_codes if self.by_code else streams.length + 1
        self.bytes_a_table = (
            len(self.levels) * table_bytes(streams) if self.by_code else prefix_bytes(streams)
        )
        self.distinct = tuple(dict.fromkeys(masks))  # in the order of the dimensions: parts are often slices
        self.kept = len(self.distinct) * self.bytes_a_table <= KEPT_TABLE_BYTES
        position = {mask: i for i, mask in enumerate(self.distinct)}
        self.table_of = [position[mask] for mask in masks]

    def tables(self, part: slice, *, transposed: bool) -> Tensor:
        """Of each dimension in ``part``, float32.

        (D, rows, signed codes of b), or with ``transposed`` (D, codes of b, signed rows).
        """
        if self.kept:
            index = self.table_of[part]
            tables = _kept(self.streams, self.distinct, self.levels, transposed, self.device)
            if index == list(range(index[0], index[0] + len(index))):
                return tables[index[0] : index[0] + len(index)]
            if len(self.distinct) == 1:
                return tables.expand(len(index), -1, -1)
            return tables[torch.tensor(index, device=self.device)]
        few = tuple(dict.fromkeys(self.masks[part]))
        tables = _signed_tables(self.streams, few, self.levels, transposed, self.device)
        position = {mask: i for i, mask in enumerate(few)}
        return tables[torch.tensor([position[mask] for mask in self.masks[part]], device=self.device)]

    def enabled(self, qa: Tensor, part: slice, entry: int) -> Tensor:
        """The rows of the tables for codes (N, D) of one entry, signed unless the tables are."""
        if self.by_code:
            return self._row_by_code(qa, entry)
        few = tuple(dict.fromkeys(self.masks[part]))
        position = {mask: i for i, mask in enumerate(few)}
        steps = step_tables(self.streams, few, self.lengths.lengths, self.device)
        num_masks, codes = steps.shape[1:]
        table = torch.tensor([position[mask] for mask in self.masks[part]], device=self.device)
        if self.lengths.of_rows is not None:
            index = self.lengths.of_rows
            table = index[entry % len(index)][:, None] * num_masks + table  # (N or 1, D)
        return torch.take(steps, table * codes + qa.abs().long()) * qa.sign()

    def _row_by_code(self, qa: Tensor, entry: int) -> Tensor:
        first: int | Tensor = 0  # row of the level's table
        if self.lengths.of_rows is not None:
            of_rows = self.lengths.of_rows
            first = of_rows[entry % len(of_rows)][:, None] * self.streams.num_codes  # (N or 1, 1)
        if self.streams.signed:
            return qa.long() + self.streams.max_code + first
        return (qa.abs().long() + first) * qa.sign()  # a code 0 has row 0, which counts nothing


@keep_tables(maxsize=8)
def _kept(
    streams: Streams, masks: tuple[int, ...], levels: tuple[int, ...], transposed: bool, device: torch.device
) -> Tensor:
    return _signed_tables(streams, masks, levels, transposed, device)


def _signed_tables(
    streams: Streams, masks: tuple[int, ...], levels: tuple[int, ...], transposed: bool, device: torch.device
) -> Tensor:
    if levels:
        parts = [_products(streams, masks, length, device) for length in levels]
        tables = torch.cat(parts, 1).float()
    else:
        tables = prefix_tables(streams, masks, device).float()
    if streams.signed:
        return tables
    if transposed:
        tables = tables.mT
    return torch.cat([-tables[..., 1:].flip(-1), tables], -1).contiguous()


def _products(streams: Streams, masks: tuple[int, ...], length: int, device: torch.device) -> Tensor:
    if length:
        return product_tables(replace(streams, length=length), masks, device)
    codes = streams.num_codes
    return torch.zeros(len(masks), codes, codes, dtype=torch.int16, device=device)
