"""A model of a stochastic product on matrix units: close to what the hardware counts, and NOT its counts.

A count is a product and an error, ``T_d(u, w) = c u w + E_d(u, w)`` with c = L / Q**2. The error's table
under each mask is replaced by its best approximation of rank R (singular values, codes weighted as those of
normal values occur), so that

    y = (qa sa) (qb sb)^T + sum over d, r of f_dr(qa) sa / c * g_dr(qb) sb

is one product in 16 bits and one of R times the inner dimension, its features in 8-bit floating point (E4M3)
under a scale for each row. Chunks are added in no particular order, and nothing is exact; for what is, take
`stochastic_codes`. Its use is the error of a stream length at the speed of matrix units.

Measured on a CPU, normal values, 64 x 256 x 2048 in chunks of 128, ``|y - counted| / |counted|``:

    rank                        0       2       4       8      16      32
    halve (128 steps)      0.0349  0.0204  0.0158  0.0099  0.0054  0.0029
    full  (256 steps)      0.0195  0.0111  0.0090  0.0060  0.0033  0.0018
    halve, 32 steps        0.1285  0.0624  0.0416  0.0217  0.0105  0.0049

Operations: ``2 N M D`` in bfloat16 and R times that in float8, at twice the rate, beside writing features,
R bytes for each code; those of a weight can be kept (`prepare_emulated`).
Times: docs/notebook/stochastic-kernels.md. There is no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.stochastic import Stochastic
from fewbits.formats.streams import product_tables
from fewbits.formats.table_cache import keep_tables
from fewbits.kernels.stochastic import add_triton
from fewbits.kernels.stochastic import features as features_cuda

_FEATURE_BYTES = 2**30  # of b's features at once
_LARGEST = 224.0  # of a feature: half of what E4M3 holds
_DEVIATION = 47.0  # of the codes of normal values, 128 under a scale


class Features(NamedTuple):
    """The factors of each mask's error, for codes of a and of b."""

    a: Tensor  # (masks, 128, R) float32, divided by c and scaled up
    b: Tensor  # (masks, 128, R) float32, scaled up
    a16: Tensor  # the same in float16, of a rank that the kernel takes
    b16: Tensor
    factor: float  # brings the product of both back
    masks: Tensor  # (chunk,) int64: which mask


@keep_tables(maxsize=16)
def features_of(options: Stochastic, rank: int, chunk: int, device: torch.device) -> Features:
    """The best factors of rank R of each mask's error."""
    masks = options.masks(chunk)
    distinct = tuple(dict.fromkeys(masks))
    counts = product_tables(options.streams, distinct, torch.device("cpu")).double()
    codes = torch.arange(options.max_code + 1, dtype=torch.float64)
    errors = counts * (options.max_code**2 / options.streams.length) - codes[:, None] * codes
    deviation = _DEVIATION * options.max_code / 127
    weight = (torch.exp(-0.5 * (codes / deviation) ** 2) + 1e-3).sqrt()
    U, S, Vh = torch.linalg.svd(errors * weight[:, None] * weight)
    root = S[:, None, :rank].sqrt()
    a, b = U[..., :rank] * root / weight[:, None], Vh[:, :rank].mT * root / weight[:, None]
    a[:, 0] = b[:, 0] = 0.0
    up_a, up_b = (_LARGEST / max(float(x.abs().amax()), 1e-30) if rank else 1.0 for x in (a, b))
    position = {mask: i for i, mask in enumerate(distinct)}
    index = torch.tensor([position[mask] for mask in masks], device=device)
    a, b = ((x * up).float().contiguous().to(device) for x, up in ((a, up_a), (b, up_b)))
    more = features_cuda.padded(rank) - rank
    a16, b16 = (F.pad(x, (0, more)).half() for x in (a, b))
    return Features(a, b, a16, b16, 1.0 / (up_a * up_b), index)


# 1. The definition: the approximated table itself, one dimension after the other, in float64.


def stochastic_emulated_ref(
    qa: Tensor, sa: Tensor, qb: Tensor, sb: Tensor, options: Stochastic, rank: int
) -> Tensor:
    """y (N, M) float64 with features that are not rounded; arguments as of `stochastic_emulated`."""
    D = qa.shape[1]
    y = torch.zeros(len(qa), len(qb), dtype=torch.float64, device=qa.device)
    for i, chunk in enumerate(options.chunks(D)):
        features = features_of(options, rank, options.chunk_size(D), qa.device)
        a, b = qa[:, chunk].long(), qb[:, chunk].long()
        product = a.double() @ b.double().t()
        for d in range(a.shape[1]):
            table = (
                features.a[features.masks[d]].double()
                @ features.b[features.masks[d]].double().t()
                * features.factor
            )
            signs = a[:, d, None].sign() * b[:, d].sign()
            product += table[a[:, d].abs()][:, b[:, d].abs()] * signs
        y += product * sa[:, i, None].double() * sb[:, i].double()
    return y


# 2. The product: no kernel of its own, torch's matrix products.


class EmulatedWeight(NamedTuple):
    """b, as `emulated_product` takes it; made by `prepare_emulated`.

    On a GPU it takes 2 + rank bytes for each code.
    """

    options: Stochastic
    rank: int
    values: Tensor  # (M, D) what the codes stand for
    top: Tensor  # (M, 1) each row's largest scale
    features: Iterable[Tensor]  # of each of `parts`, (M, codes * rank) E4M3
    parts: list[range]  # chunks


@torch.no_grad()
def stochastic_emulated(
    qa: Tensor, sa: Tensor, qb: Tensor, sb: Tensor, options: Stochastic, rank: int = 16
) -> Tensor:
    """About what `stochastic_codes` counts, by a low-rank model of its error. Not exact.

    Args:
        qa: (N, D) int8 codes of a.
        sa: (N, C) float32 scales of a.
        qb: (M, D) int8 codes of b.
        sb: (M, C) float32 scales of b.
        options: of the streams, which made the codes too.
        rank: of the error's model, from 0 (none of the error) to 128 (all of it, before rounding to 8 bits).

    Returns:
        (N, M) float32.
    """
    if qa.dim() != 2 or qb.dim() != 2 or qa.shape[1] != qb.shape[1]:
        raise BadInput(f"codes {tuple(qa.shape)} and {tuple(qb.shape)} are no (N, D) and (M, D).")
    return emulated_product(qa, sa, emulated_weight(qb, sb, options, rank, _FEATURE_BYTES))


@torch.no_grad()
def prepare_emulated(qb: Tensor, sb: Tensor, options: Stochastic, rank: int = 16) -> EmulatedWeight:
    """b's half of `stochastic_emulated`, computed once; the arguments are those."""
    if qb.dim() != 2:
        raise BadInput(f"codes {tuple(qb.shape)} are no (M, D).")
    weight = emulated_weight(qb, sb, options, rank, None)
    return weight._replace(features=tuple(weight.features))


@torch.no_grad()
def emulated_product(qa: Tensor, sa: Tensor, b: EmulatedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """`stochastic_emulated` with a prepared b, in ``dtype``. On a GPU both products are rounded to bfloat16.

    Args:
        qa: (N, D) int8 codes of a, made with b's options.
        sa: (N, C) float32 scales of a.
        b: from `prepare_emulated`.
        dtype: of the result.

    Returns:
        (N, M).
    """
    if qa.dim() != 2 or qa.shape[1] != b.values.shape[1]:
        raise BadInput(f"a has codes {tuple(qa.shape)}, and b is prepared for (N, {b.values.shape[1]}).")
    qa, sa, options = qa.contiguous(), sa.contiguous(), b.options
    if b.rank == 0 or not len(qa) or not b.values.numel():
        return (_dequantized(qa, sa, options) @ b.values.t()).to(dtype)
    D, chunk = qa.shape[1], options.chunk_size(qa.shape[1])
    features, top = features_of(options, b.rank, chunk, qa.device), sa.amax(1, keepdim=True)
    if _fits_units(b.values, b.rank, chunk, b.parts):
        return _on_units_of_8_bits((qa, sa, top), b, features, dtype)
    y, shares, top = (_dequantized(qa, sa, options) @ b.values.t()).float(), sa / top, top * features.factor
    for part, of_b in zip(b.parts, b.features, strict=True):
        of_a = _expanded(qa, shares, features.a, features, options.chunks(D), part)
        y += _product(of_a, of_b) * top * b.top.t()
    return y.to(dtype)


def emulated_weight(
    qb: Tensor, sb: Tensor, options: Stochastic, rank: int, at_once_bytes: int | None
) -> EmulatedWeight:
    """b (N, D), whose features are made when they are asked for, of at most so many bytes in a part."""
    if not 0 <= rank <= 128:
        raise BadInput(f"emulate_rank={rank} is refused: give a whole number from 0 to 128.")
    qb, sb, D = qb.contiguous(), sb.contiguous(), qb.shape[1]
    if rank == 0 or not qb.numel():
        return EmulatedWeight(options, rank, _dequantized(qb, sb, options), sb.new_empty(0, 1), (), [])
    chunks, chunk = options.chunks(D), options.chunk_size(D)
    at_once = len(chunks)
    if at_once_bytes is not None:
        at_once = max(1, at_once_bytes // (len(qb) * features_cuda.padded(rank) * chunk))
    parts = [range(i, min(i + at_once, len(chunks))) for i in range(0, len(chunks), at_once)]
    top, features = sb.amax(1, keepdim=True), features_of(options, rank, chunk, qb.device)
    if _fits_units(qb, rank, chunk, parts):
        values = torch.empty_like(qb, dtype=torch.bfloat16)  # filled with the features
        operand, table, masks = (qb, sb, 1 / top), features.b16, features.masks
        pieces = (features_cuda.launch(operand, table, masks, chunk, part, values) for part in parts)
    else:
        values, shares = _dequantized(qb, sb, options), sb / top
        pieces = (_expanded(qb, shares, features.b, features, chunks, part) for part in parts)
    return EmulatedWeight(options, rank, values, top, pieces, parts)


def _fits_units(b: Tensor, rank: int, chunk: int, parts: list[range]) -> bool:
    """Whether float8 units take b (M, D) in these parts."""
    (M, D), rank = b.shape, features_cuda.padded(rank)
    widths = [(min(D, part.stop * chunk) - part.start * chunk) * rank for part in parts]
    whole = M % 16 == 0 and all(width % 16 == 0 for width in widths)
    return whole and add_triton.available and features_cuda.takes(b.device)


def _on_units_of_8_bits(
    a: tuple[Tensor, Tensor, Tensor], b: EmulatedWeight, features: Features, dtype: torch.dtype
) -> Tensor:
    """y of a's codes, scales and rows' scales: the errors, and the plain product added to them."""
    qa, sa, top = a
    one, rows = torch.ones((), device=qa.device, dtype=torch.float32), top * features.factor
    chunk, last = b.options.chunk_size(qa.shape[1]), len(b.parts) - 1
    operand, values = (qa, sa, 1 / top), torch.empty_like(qa, dtype=torch.bfloat16)
    kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    y = torch.empty(len(qa), len(b.values), dtype=kind, device=qa.device)
    for i, (part, of_b) in enumerate(zip(b.parts, b.features, strict=True)):
        of_a = features_cuda.launch(operand, features.a16, features.masks, chunk, part, values)
        error = torch._scaled_mm(of_a, of_b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        base = values @ b.values.t() if i == last else None  # all values are there with the last part
        add_triton.add(y, base, error, rows, b.top, onto=i > 0)
    return y.to(dtype)


def _dequantized(codes: Tensor, scales: Tensor, options: Stochastic) -> Tensor:
    """In bfloat16 on a GPU, float32 elsewhere."""
    D = codes.shape[1]
    size = options.chunk_size(D)
    # A tensor of sizes would wait for the device.
    values = codes * scales.repeat_interleave(size, dim=1)[:, :D]
    return values.bfloat16() if codes.is_cuda else values


def _expanded(
    codes: Tensor, shares: Tensor, table: Tensor, features: Features, chunks: list[slice], part: range
) -> Tensor:
    """Features (rows, D * R) in E4M3 of some chunks."""
    columns, rows = [], table.flatten(0, 1)
    for i in part:
        q = codes[:, chunks[i]]
        which = features.masks[: q.shape[1]] * 128
        values = F.embedding(which + q.abs().long(), rows)  # (rows, D, R)
        values = values * (q.sign() * shares[:, i, None])[..., None]
        columns.append(values.to(torch.float8_e4m3fn).flatten(1))
    return torch.cat(columns, 1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a b^T`` of features, float32, where there are no float8 units for these shapes."""
    dtype = torch.bfloat16 if a.is_cuda else torch.float32
    return (a.to(dtype) @ b.to(dtype).t()).float()
