"""``y = a b^T`` as stochastic-computing hardware counts it, exactly; see `fewbits.formats.stochastic`.

Shapes: a (N, D), b (M, D), y (N, M) float32, or each with a leading batch axis. With codes qa and qb:

* ``acc[n, m] = sum over d of sign(qa[n, d]) sign(qb[m, d]) T_d(|qa[n, d]|, |qb[m, d]|)``, whole numbers
* bipolar ``y = (acc * Q**2 / L) * (s_a[n] * s_b[m])``; unipolar adds the zero points' terms before the scales
* chunked: the sum of that over chunks, in ascending order

Each float32 operation is one IEEE rounding in the written order, so every device gives the same bits.

The counts need no streams: one operand becomes a table with a vector of row results per (dimension, code),
and the codes of the other look vectors up and add them, ``N * M * D`` additions. The sums are whole numbers
below 2**24, exact in float32 in any order.

What exists is this definition in plain torch. There is no gradient, no Triton kernel and no prepared weight
yet.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import (
    KEPT_TABLE_BYTES,
    Codes,
    Stochastic,
    Streams,
    product_tables,
    quantize_operand,
    table_bytes,
)

# Values of the operand that becomes a table, and codes that are looked up at once. On a CPU a table of 2 MB
# stays in its cache: 512 x 512 x 512 took 4.8 ns an addition where one of 32 MB took 12.8.
_TABLE_VALUES = 2**19
_TABLE_VALUES_CUDA = 2**24
_EXACT_FLOAT32 = 2**24
_COUNTER = 2**31


def sc_matmul(
    a: Tensor,
    b: Tensor,
    granularity: str = "per_row",
    *,
    mode: str = "bipolar",
    sc_prec: int = 8,
    stoc_len: int | None = None,
    chunk_d: int = 0,
    group_a: int = 1,
    group_b: int = 1,
    rng_levels: int | None = None,
    config: None = None,
    halve_bipolar_stoc_len: bool = False,
    smooth_scales: Tensor | None = None,
    scramble: str = "bitrev",
    scramble_rescale: bool = True,
    n_masks: int | None = None,
) -> Tensor:
    """``a @ b.T`` by stochastic computing, bit for bit as scmp_kernels defines it.

    Args:
        a: (N, D) or (B, N, D), floating point.
        b: (M, D) or (B, M, D), floating point, on a's device.
        granularity: see `Stochastic`, as for all options not listed here.
        mode: see `Stochastic`.
        sc_prec: see `Stochastic`.
        stoc_len: see `Stochastic`.
        chunk_d: see `Stochastic`; needs operands of two dimensions.
        group_a: see `Stochastic`.
        group_b: see `Stochastic`.
        rng_levels: see `Stochastic`.
        config: scmp_kernels' choice of other sequences; only None is supported.
        halve_bipolar_stoc_len: see `Stochastic`.
        smooth_scales: (D,); a is divided and b multiplied by it first, each in its own dtype.
        scramble: see `Stochastic`.
        scramble_rescale: see `Stochastic`.
        n_masks: see `Stochastic`.

    Returns:
        (N, M) or (B, N, M) float32, without a gradient.

    Raises:
        BadInput: an option or an operand is wrong.
        Unsupported: the option is not there yet.
    """
    if config is not None:
        raise Unsupported("config chooses other sequences, which are not there yet; leave it None.")
    if isinstance(stoc_len, (Tensor, list, tuple)):
        raise Unsupported("Several stream lengths in one product are not there yet; give one whole number.")
    options = Stochastic(
        granularity=granularity,
        mode=mode,
        sc_prec=sc_prec,
        stoc_len=stoc_len,
        rng_levels=rng_levels,
        halve_bipolar_stoc_len=halve_bipolar_stoc_len,
        chunk_d=chunk_d,
        group_a=group_a,
        group_b=group_b,
        scramble=scramble,
        scramble_rescale=scramble_rescale,
        n_masks=n_masks,
    )
    return sc_matmul_ref(a, b, options, smooth_scales)


@torch.no_grad()
def sc_matmul_ref(a: Tensor, b: Tensor, options: Stochastic, smooth_scales: Tensor | None = None) -> Tensor:
    """The definition, for operands as in `sc_matmul`."""
    _check_operands(a, b, options)
    if smooth_scales is not None:
        a, b = _smooth(a, b, smooth_scales)
    a, b = a.float(), b.float()
    _check_finite(a, b, smooth_scales is not None)
    batched = a.dim() == 3
    a_BND, b_BMD = (a, b) if batched else (a[None], b[None])
    y = torch.zeros(a_BND.shape[0], a_BND.shape[1], b_BMD.shape[1], device=a.device)
    if y.numel() and a.shape[-1]:
        chunks = options.chunks(a.shape[-1])
        for chunk in chunks:
            qa, qb = quantize_operands(a_BND[..., chunk], b_BMD[..., chunk], options, len(chunks) > 1)
            acc = stream_counts(qa.codes, qb.codes, options)
            part = dequantize_counts(acc, qa, qb, options)
            y = part if len(chunks) == 1 else y + part
    return y if batched else y[0]


def quantize_operands(a: Tensor, b: Tensor, options: Stochastic, chunked: bool) -> tuple[Codes, Codes]:
    """Codes of a (B, N, D) and b (B, M, D), float32."""
    return (
        quantize_operand(a, options, group=options.group_a, chunked=chunked),
        quantize_operand(b, options, group=options.group_b, chunked=chunked),
    )


def stream_counts(qa_BND: Tensor, qb_BMD: Tensor, options: Stochastic) -> Tensor:
    """The signed sums of stream counts, (B, N, M) int32, of int16 codes (B, N, D) and (B, M, D)."""
    B, N, D = qa_BND.shape
    M, streams = qb_BMD.shape[1], options.streams
    if D * streams.length >= _COUNTER:
        raise Unsupported(
            f"{D} dimensions of {streams.length} steps overflow a 32-bit counter; "
            "set chunk_d to a smaller part."
        )
    swapped = N > M  # the operand with fewer rows becomes the table
    tabled, other = (qb_BMD, qa_BND) if swapped else (qa_BND, qb_BMD)
    masks = options.masks(D)
    values = _TABLE_VALUES_CUDA if other.is_cuda else _TABLE_VALUES
    step = _dimensions_at_once(streams, min(N, M), max(N, M), num_masks=len(set(masks)), values=values)
    acc = torch.zeros(B, max(N, M), min(N, M), dtype=torch.int32, device=other.device)
    for part in (slice(start, start + step) for start in range(0, D, step)):
        T, index = _tables_of(masks[part], masks, streams, other.device)
        T = T.transpose(-1, -2) if swapped else T
        for i in range(B):
            acc[i] += _looked_up(tabled[i, :, part], other[i, :, part], T, index)
    return acc if swapped else acc.transpose(-1, -2)


def _dimensions_at_once(streams: Streams, rows: int, other_rows: int, *, num_masks: int, values: int) -> int:
    """How many inner dimensions make sums that float32 holds exactly and operands of modest size."""
    limits = [values // ((streams.max_code + 1) * rows), values // other_rows]
    limits.append((_EXACT_FLOAT32 - 1) // streams.length)
    if num_masks * table_bytes(streams) > KEPT_TABLE_BYTES:
        limits.append(KEPT_TABLE_BYTES // table_bytes(streams))
    return max(1, min(limits))


def _tables_of(
    masks: tuple[int, ...], all_masks: tuple[int, ...], streams: Streams, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Product tables, and the index of each dimension's table; all dimensions' tables if they are kept."""
    distinct = sorted(set(all_masks))
    if len(distinct) * table_bytes(streams) > KEPT_TABLE_BYTES:
        distinct = sorted(set(masks))
    position = {mask: i for i, mask in enumerate(distinct)}
    index = torch.tensor([position[mask] for mask in masks], device=device)
    return product_tables(streams, tuple(distinct), device), index


def _looked_up(tabled: Tensor, other: Tensor, T: Tensor, index: Tensor) -> Tensor:
    """The sums (M, R) for codes (R, D) and (M, D); T is (tables, codes of tabled, codes of other)."""
    (R, D), codes = tabled.shape, T.shape[-1]
    vectors = T[index[:, None], tabled.t().abs().long()] * tabled.t().sign()[..., None]  # (D, R, codes) int16
    vectors = vectors.transpose(1, 2).float().reshape(D * codes, R)
    rows = other.abs().int() + torch.arange(0, D * codes, codes, dtype=torch.int32, device=other.device)
    sums = F.embedding_bag(rows, vectors, mode="sum", per_sample_weights=other.sign().float())
    return sums.int()


def dequantize_counts(acc: Tensor, qa: Codes, qb: Codes, options: Stochastic) -> Tensor:
    """The values of counts (B, N, M), float32."""
    tensorwise = options.granularity == "per_tensor"
    c = torch.tensor(options.max_code**2 / options.streams.length, dtype=torch.float32, device=acc.device)
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


# Checks.


def _check_operands(a: Tensor, b: Tensor, options: Stochastic) -> None:
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise BadInput(f"{name} is {kind}, and a product needs floating-point tensors; convert it first.")
    if a.device != b.device:
        raise BadInput(f"a is on {a.device} and b on {b.device}; move both to one device.")
    shapes = f"a is {tuple(a.shape)} and b {tuple(b.shape)}"
    if a.dim() not in (2, 3) or a.dim() != b.dim():
        raise BadInput(f"{shapes}; give both two dimensions, or both three.")
    if a.shape[-1] != b.shape[-1]:
        raise BadInput(f"{shapes}; the last dimensions must be equal.")
    if a.shape[:-2] != b.shape[:-2]:
        raise BadInput(f"{shapes}; the leading dimensions must be equal.")
    _check_fit(a, b, options)


def _check_fit(a: Tensor, b: Tensor, options: Stochastic) -> None:
    """Refuse options that need operands of other dimensions."""
    if options.granularity == "per_head" and a.dim() != 3:
        raise BadInput('granularity "per_head" needs operands of three dimensions; add a leading one.')
    if options.chunk_d and a.dim() != 2:
        raise BadInput(
            f"chunk_d={options.chunk_d} needs operands of two dimensions; give one batch at a time."
        )
    if a.dim() == 3 and options.granularity == "per_row" and options.bipolar:
        for name, group, rows in (
            ("group_a", options.group_a, a.shape[1]),
            ("group_b", options.group_b, b.shape[1]),
        ):
            if 1 < group < rows:
                raise Unsupported(
                    f"{name}={group} with bipolar operands of three dimensions; "
                    f"use 1, or at least {rows} rows."
                )


def _check_finite(a: Tensor, b: Tensor, smoothed: bool) -> None:
    for name, x in (("a", a), ("b", b)):
        if not x.isfinite().all():
            after = " after smooth_scales" if smoothed else ""
            raise BadInput(f"{name} has NaN or infinite values{after}; a scale needs finite ones.")


def _smooth(a: Tensor, b: Tensor, smooth_scales: Tensor) -> tuple[Tensor, Tensor]:
    """Both operands, scaled in their own dtypes."""
    if not isinstance(smooth_scales, Tensor) or smooth_scales.shape != a.shape[-1:]:
        shape = tuple(smooth_scales.shape) if isinstance(smooth_scales, Tensor) else smooth_scales
        raise BadInput(f"smooth_scales is {shape}; give a tensor of shape ({a.shape[-1]},).")
    if smooth_scales.device != a.device:
        raise BadInput(
            f"smooth_scales is on {smooth_scales.device} and a on {a.device}; move both to one device."
        )
    return a / smooth_scales.to(a.dtype), b * smooth_scales.to(b.dtype)
