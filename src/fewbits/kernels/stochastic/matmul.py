"""``y = a b^T`` as stochastic-computing hardware counts it, exactly; see `fewbits.formats.stochastic`.

Shapes: a (N, D), b (M, D), y (N, M) float32, or each with a leading batch axis. With codes qa and qb:

* ``acc[n, m] = sum over d of sign(qa[n, d]) sign(qb[m, d]) T_d(|qa[n, d]|, |qb[m, d]|)``, whole numbers
* bipolar ``y = (acc * Q**2 / L) * (s_a[n] * s_b[m])``; unipolar adds the zero points' terms before the scales
* chunked: the sum of that over chunks, in ascending order

Each float32 operation is one IEEE rounding in the written order, so every device gives the same bits.

Three ways, all exact and bit for bit the same:

* `sc_matmul_ref` is the definition, for every option. The counts need no streams: they are looked up in
  tables (`fewbits.formats.streams`) and added.
* Bipolar products with a scale per row and codes of 8 bits go through two ops, `quantize_stochastic` and
  `stochastic_codes`, which have fast kernels.
* The second operand of such a product may be prepared, that is quantised once: `prepared_matmul`.

There is no gradient; a layer that is trained through it has a straight-through one
(`fewbits.nn.stochastic.linear`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack, cast

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.base import Packed
from fewbits.formats.stochastic import Codes, Stochastic, quantize_operand
from fewbits.kernels.stochastic.codes import same_masks, stochastic_codes
from fewbits.kernels.stochastic.counts import Lengths
from fewbits.kernels.stochastic.cpu import codes_product, counts_of_lengths, factor
from fewbits.kernels.stochastic.emulated import stochastic_emulated
from fewbits.kernels.stochastic.operands import (
    Arithmetic,
    LengthTable,
    check_finite,
    check_operands,
    check_prepared,
    check_smooth,
    length_table,
    prepared_options,
    sequences_of,
)
from fewbits.kernels.stochastic.quantize import quantize_stochastic, smoothed

_MAX_LEVELS = 256  # of one product by codes: their index is a byte


def sc_matmul(
    a: Tensor,
    b: Tensor | Packed,
    granularity: str = "per_row",
    *,
    mode: str = "bipolar",
    sc_prec: int = 8,
    stoc_len: int | Tensor | None = None,
    chunk_d: int = 0,
    group_a: int = 1,
    group_b: int = 1,
    rng_levels: int | None = None,
    config: Any = None,
    halve_bipolar_stoc_len: bool = False,
    smooth_scales: Tensor | None = None,
    scramble: str = "bitrev",
    scramble_rescale: bool = True,
    n_masks: int | None = None,
    emulate_rank: int | None = None,
    **arithmetic: Unpack[Arithmetic],
) -> Tensor:
    """``a @ b.T`` by stochastic computing, bit for bit as scmp_kernels defines it.

    Args:
        a: (N, D) or (B, N, D), floating point.
        b: (M, D) or (B, M, D), floating point, on a's device; or the same prepared by
            ``Stochastic(...).quantize(b)`` with the same chunk_d and sc_prec, which gives the same bits.
        granularity: see `Stochastic`, as for all options not listed here.
        mode: see `Stochastic`.
        sc_prec: see `Stochastic`.
        stoc_len: see `Stochastic`. Or a table of whole numbers: the lengths of a's rows (N,), or of rows and
            chunks, of a shape that expands to (N, number of chunks); with a leading axis of (B, N). Each part
            counts as it would in a call of its own with that length; one of length 0 adds nothing.
        chunk_d: see `Stochastic`; needs operands of two dimensions.
        group_a: see `Stochastic`.
        group_b: see `Stochastic`.
        rng_levels: see `Stochastic`.
        config: scmp_kernels' choice of other sequences: one Sobol generator an operand is understood.
        halve_bipolar_stoc_len: see `Stochastic`.
        smooth_scales: (D,); a is divided and b multiplied by it first, each in its own dtype. A prepared b
            is taken to be one of ``b * smooth_scales``.
        scramble: see `Stochastic`.
        scramble_rescale: see `Stochastic`.
        n_masks: see `Stochastic`.
        emulate_rank: None counts exactly; a number models the error instead, see `stochastic_emulated`.
        **arithmetic: other sequences and other ways to multiply and to count, see `Arithmetic`.

    Returns:
        (N, M) or (B, N, M) float32, without a gradient.

    Raises:
        BadInput: an option or an operand is wrong.
        Unsupported: a combination that has no definition, or a ``config`` that has no equivalent here.
    """
    table = stoc_len if isinstance(stoc_len, (Tensor, list, tuple)) else None
    if config is not None:
        sequences = sequences_of(config, sc_prec, a.shape[-1] if isinstance(a, Tensor) else 0)
        arithmetic = cast(Arithmetic, {**arithmetic, **sequences})
    options = Stochastic(
        granularity=granularity,
        mode=mode,
        sc_prec=sc_prec,
        stoc_len=None if isinstance(stoc_len, (Tensor, list, tuple)) else stoc_len,
        rng_levels=rng_levels,
        halve_bipolar_stoc_len=halve_bipolar_stoc_len,
        chunk_d=chunk_d,
        group_a=group_a,
        group_b=group_b,
        scramble=scramble,
        scramble_rescale=scramble_rescale,
        n_masks=n_masks,
        **arithmetic,
    )
    if emulate_rank is not None:
        return _emulated(a, b, options, table, smooth_scales, emulate_rank)
    return _product_of(a, b, options, table, smooth_scales)


@torch.no_grad()
def _emulated(
    a: Tensor, b: Tensor | Packed, options: Stochastic, table: Any, smooth_scales: Tensor | None, rank: int
) -> Tensor:
    """`sc_matmul` with ``emulate_rank``: about what would be counted."""
    check_operands(a, b, options)
    if smooth_scales is not None:
        check_smooth(smooth_scales, a)
    if table is not None or a.dim() != 2 or not (isinstance(b, Packed) or options.prepares):
        raise Unsupported(
            "emulate_rank models bipolar rows of at most 8 bits, in two dimensions and of one stream length; "
            "leave it None for the exact counts of anything else."
        )
    if options.streams.signed or options.or_group > 1:
        raise Unsupported(
            f'emulate_rank models products of magnitudes that are counted one by one, not signs="'
            f'{options.signs}" with or_group={options.or_group}; leave it None.'
        )
    qa, sa = quantize_stochastic(a, options, smooth_scales)
    qb, sb = (
        (b.codes, b.scales)
        if isinstance(b, Packed)
        else quantize_stochastic(b, options, smooth_scales, is_b=True)
    )
    check_finite({"a": sa, "b": sb}, smoothed=smooth_scales is not None)
    return stochastic_emulated(qa, sa, qb, sb, options, rank)


def _product_of(
    a: Tensor, b: Tensor | Packed, options: Stochastic, table: Any, smooth_scales: Tensor | None
) -> Tensor:
    """`sc_matmul` with its options as one value, and a table of lengths or None."""
    check_operands(a, b, options)
    if smooth_scales is not None:
        check_smooth(smooth_scales, a)
    lengths = length_table(table, a, options)
    if len(options.chunks(a.shape[-1])) > 1:
        options = replace(options, group_a=1, group_b=1)  # chunks ignore them
    if isinstance(b, Packed) or options.prepares:
        return _by_codes(a, b, options, lengths, smooth_scales)
    return sc_matmul_ref(a, b, options, smooth_scales, lengths)


@torch.no_grad()
def _by_codes(
    a: Tensor, b: Tensor | Packed, options: Stochastic, lengths: LengthTable, smooth_scales: Tensor | None
) -> Tensor:
    """`sc_matmul` of checked operands through the two ops."""
    qa, sa = quantize_stochastic(a, options, smooth_scales)
    if isinstance(b, Packed):
        qb, sb = b.codes, b.scales
    else:
        qb, sb = quantize_stochastic(b, options, smooth_scales, is_b=True)
    check_finite({"a": sa, "b": sb}, smoothed=smooth_scales is not None)
    if a.dim() == 3:
        return _product(qa, sa, qb, sb, options, lengths)
    return _product(qa[None], sa[None], qb[None], sb[None], options, lengths)[0]


def _product(
    qa: Tensor, sa: Tensor, qb: Tensor, sb: Tensor, options: Stochastic, lengths: LengthTable
) -> Tensor:
    """(B, N, M); lengths of different masks, which the op refuses, by its definition."""
    levels, which = lengths
    if not qa.numel() or not qb.numel():
        return torch.zeros(qa.shape[0], qa.shape[1], qb.shape[1], device=qa.device, dtype=torch.float32)
    if not same_masks(options, levels) or len(levels) > _MAX_LEVELS:
        return codes_product(qa, sa, qb, sb, options, levels, which)
    return stochastic_codes(qa, sa, qb, sb, options, levels, None if which is None else which.to(torch.uint8))


@torch.no_grad()
def prepared_matmul(
    a: Tensor,
    b: Packed,
    options: Stochastic | None = None,
    *,
    levels: tuple[int, ...] | None = None,
    level_index: Tensor | None = None,
    smooth_scales: Tensor | None = None,
) -> Tensor:
    """``a @ b.T`` for a prepared b, without waiting for the device: `sc_matmul` for layers.

    Args:
        a: (N, D). A row with a value that is not finite becomes NaN.
        b: (M, D), prepared.
        options: of the product; None: b's format.
        levels: stream lengths that occur; None: the options' own.
        level_index: which of them each row has in each chunk, whole numbers of shape (1, N or 1, C or 1).
        smooth_scales: (D,); a is divided by it first.

    Returns:
        (N, M) float32.

    Raises:
        BadInput: b is of another format, or was prepared with other codes or chunks than the options say.
    """
    if options is None:
        options = prepared_options(b)
    check_prepared(b, options)
    codes, scales = quantize_stochastic(a, options, smooth_scales)
    return product_of_codes(codes, scales, b, options, levels, level_index)


def product_of_codes(
    codes: Tensor,
    scales: Tensor,
    b: Packed,
    options: Stochastic,
    levels: tuple[int, ...] | None = None,
    level_index: Tensor | None = None,
) -> Tensor:
    """`prepared_matmul` where a is quantised already: codes (N, D), scales (N, C)."""
    lengths = LengthTable((options.length,) if levels is None else levels, level_index)
    return _product(codes[None], scales[None], b.codes[None], b.scales[None], options, lengths)[0]


@torch.no_grad()
def sc_matmul_ref(
    a: Tensor,
    b: Tensor,
    options: Stochastic,
    smooth_scales: Tensor | None = None,
    lengths: LengthTable | None = None,
) -> Tensor:
    """The definition, for operands as in `sc_matmul`."""
    check_operands(a, b, options)
    a, b = smoothed(a, smooth_scales).float(), smoothed(b, smooth_scales, is_b=True).float()
    check_finite({"a": a, "b": b}, smoothed=smooth_scales is not None)
    batched = a.dim() == 3
    a_BND, b_BMD = (a, b) if batched else (a[None], b[None])
    levels, index = lengths or LengthTable((options.length,), None)
    y = torch.zeros(a_BND.shape[0], a_BND.shape[1], b_BMD.shape[1], device=a.device, dtype=torch.float32)
    if y.numel() and a.shape[-1]:
        chunks = options.chunks(a.shape[-1])
        for i, chunk in enumerate(chunks):
            of_rows = None if index is None else index[..., i if index.shape[-1] > 1 else 0].long()
            rows = Lengths(levels, of_rows)
            qa, qb = quantize_operands(a_BND[..., chunk], b_BMD[..., chunk], options, len(chunks) > 1)
            acc = counts_of_lengths(qa.codes, qb.codes, options, rows)
            y = y + dequantize_counts(acc, qa, qb, options, rows)
    return y if batched else y[0]


def quantize_operands(a: Tensor, b: Tensor, options: Stochastic, chunked: bool) -> tuple[Codes, Codes]:
    """Codes of a (B, N, D) and b (B, M, D), float32."""
    return (
        quantize_operand(a, options, group=options.group_a, chunked=chunked),
        quantize_operand(b, options, group=options.group_b, chunked=chunked),
    )


def stream_counts(qa_BND: Tensor, qb_BMD: Tensor, options: Stochastic) -> Tensor:
    """The signed sums of stream counts of codes, (B, N, M) int32, all of the options' length."""
    return counts_of_lengths(qa_BND, qb_BMD, options, Lengths((options.length,))).int()


def dequantize_counts(
    acc: Tensor, qa: Codes, qb: Codes, options: Stochastic, lengths: Lengths | None = None
) -> Tensor:
    """The values of counts (B, N, M), float32."""
    tensorwise = options.granularity == "per_tensor"
    levels, index = lengths or Lengths((options.length,))
    c = torch.tensor([factor(options, level) for level in levels], device=acc.device, dtype=torch.float32)
    c = c[0] if index is None else c[index][..., None]
    if tensorwise:
        scales = (qa.scales * qb.scales).float()
    else:
        scales = qa.scales[..., :, None] * qb.scales[..., None, :]
    if options.granularity == "per_head":
        return acc.float() * (c * scales)
    raw = acc.float() * c
    if qa.zero_points is not None and qb.zero_points is not None:
        raw = raw + _zero_point_terms(qa, qb, qa.zero_points, qb.zero_points, tensorwise)
    return raw * scales


def _zero_point_terms(qa: Codes, qb: Codes, za: Tensor, zb: Tensor, tensorwise: bool) -> Tensor:
    """``-zb * (sum of qa) - za * (sum of qb) + D * za * zb``, float32 in this order, (B, N, M)."""
    D = qa.codes.shape[-1]
    sum_a = qa.codes.sum(-1, dtype=torch.int64).float()[..., :, None]
    sum_b = qb.codes.sum(-1, dtype=torch.int64).float()[..., None, :]
    if tensorwise:
        last = (D * za * zb).float()
        za, zb = za.float(), zb.float()
    else:
        za, zb = za[..., :, None], zb[..., None, :]
        last = (D * za) * zb
    return (-zb * sum_a - za * sum_b) + last
