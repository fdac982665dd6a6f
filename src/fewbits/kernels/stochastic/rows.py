"""Rows of x, quantised, times a prepared b, as stochastic-computing hardware counts: ``y = SC(x / f, b)``.

Shapes: x (N, D), floating point; smooth scales f (D,), or none; codes qb (M, D) and scales sb (M, C) of b;
y (N, M). It is `stochastic_codes` of what `quantize_stochastic` makes of x, rounded to the dtype asked for,
bit by bit, on every path. There is no gradient here.

Why this is one operation: in decoding one row of x meets a whole layer, and four launches (quantise, build
the tables of counts, look up and count, add the chunks) would take longer than the work. On CUDA, up to 16
rows of bfloat16 or float32 in chunks of at most 128 dimensions take two launches. The blocks that build the
tables of a chunk also quantise that chunk of x (the head of lookup.cu explains tables and lookups), and the
kernel that adds the chunks also rounds. All else takes the two ops, quantise and multiply, one by one.

Floor: bytes, ``M * D * (1 + 4 / chunk_d)`` as of `stochastic_codes`.
Run on an H200, 1 to 16 rows; docs/notebook/stochastic-kernels.md has its times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.stochastic import Stochastic
from fewbits.kernels.codec.dequantize import text_of_format
from fewbits.kernels.launch.ops import one_by_one
from fewbits.kernels.stochastic import lookup
from fewbits.kernels.stochastic.codes import (
    options_of_text,
    same_masks,
    stochastic_codes,
    stochastic_codes_ref,
    stochastic_path,
    with_longest,
)
from fewbits.kernels.stochastic.quantize import quantize_stochastic, quantize_stochastic_ref

MOST_ROWS = 16


# 1. The definition.


def stochastic_rows_ref(
    x: Tensor,
    qb: Tensor,
    sb: Tensor,
    options: Stochastic,
    smooth_scales: Tensor | None = None,
    levels: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """y as the module's text defines it; arguments as of `stochastic_rows`."""
    qa, sa = quantize_stochastic_ref(x, options, smooth_scales)
    levels = (options.length,) if levels is None else tuple(levels)
    return stochastic_codes_ref(qa[None], sa[None], qb[None], sb[None], options, levels)[0].to(dtype)


# 4. The op: on a CPU, and where the kernel does not apply, the two ops.


class StochasticRows(NamedTuple):
    """The arguments of the op."""

    x: Tensor
    smooth_scales: Tensor | None
    qb: Tensor
    sb: Tensor
    options: str  # `text_of_format`
    levels: Sequence[int]
    dtype: torch.dtype


def _by_two_ops(o: StochasticRows) -> Tensor:
    value = options_of_text(o.options)
    codes, scales = quantize_stochastic(o.x, value, o.smooth_scales)
    return stochastic_codes(codes, scales, o.qb, o.sb, value, o.levels).to(o.dtype)


_stochastic_rows = torch.library.custom_op(
    "fewbits::stochastic_rows", one_by_one(_by_two_ops), mutates_args=()
)


@_stochastic_rows.register_kernel("cuda")
@one_by_one
def _(o: StochasticRows) -> Tensor:
    x, qb, sb = o.x, o.qb, o.sb
    value, levels, D = options_of_text(o.options), tuple(o.levels), x.shape[1]
    if not takes(x, value, o.dtype) or stochastic_path(x.device, D, value, levels).name != "lookup":
        return _by_two_ops(o)
    chunk = value.chunk_size(D)
    tables = lookup.tables_of(with_longest(value, levels), levels, chunk, x.device)
    scales = sb.new_empty(1, x.shape[0], sb.shape[1])
    smooth = None if o.smooth_scales is None else o.smooth_scales.float().contiguous()
    rows = lookup.Rows(x.contiguous()[None], scales, smooth, value.max_code)
    y = torch.empty(1, x.shape[0], qb.shape[0], dtype=o.dtype, device=x.device)
    assert tables is not None
    lookup.launch_rows(rows, (qb.contiguous()[None], sb.contiguous()[None]), tables, None, chunk, y)
    return y[0]


@_stochastic_rows.register_fake
@one_by_one
def _(o: StochasticRows) -> Tensor:
    return o.x.new_empty(o.x.shape[0], o.qb.shape[0], dtype=o.dtype)


def takes(x: Tensor, options: Stochastic, dtype: torch.dtype) -> bool:
    """Whether the kernel that quantises knows such rows and results.

    x is (N, D).
    """
    kinds = (torch.float32, torch.bfloat16)
    has_kinds = x.dtype in kinds and dtype in kinds and options.chunk_size(x.shape[1]) <= lookup.SLICE
    return has_kinds and x.numel() > 0 and x.shape[0] <= MOST_ROWS


# 5. The public function.


def stochastic_rows(
    x: Tensor,
    qb: Tensor,
    sb: Tensor,
    options: Stochastic,
    smooth_scales: Tensor | None = None,
    levels: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``SC(x / f, b)`` for a prepared b; see the module's text.

    Args:
        x: (N, D), floating point. A row with a value that is not finite becomes NaN.
        qb: (M, D) int8 codes that `quantize_stochastic` made with these options, on x's device.
        sb: (M, C) float32, their scales.
        options: of the streams and of x's codes.
        smooth_scales: (D,); x is divided by it first.
        levels: one stream length, ``(L,)``; None for that of ``options``.
        dtype: of y.

    Returns:
        (N, M).

    Raises:
        BadInput: operands or levels do not fit.
        Unsupported: options whose operands cannot be prepared.
    """
    if not x.is_floating_point() or x.dim() != 2 or qb.dim() != 2 or x.shape[1] != qb.shape[1]:
        raise BadInput(
            f"x is {x.dtype} {tuple(x.shape)} and b has codes {tuple(qb.shape)}; give rows (N, D) of "
            "floating point and codes (M, D)."
        )
    levels = (options.length,) if levels is None else tuple(levels)
    if len(levels) != 1 or not same_masks(options, levels) or 0 in (*x.shape, *qb.shape):
        codes, scales = quantize_stochastic(x, options, smooth_scales)  # which check what is left
        return stochastic_codes(codes, scales, qb, sb, options, levels).to(dtype)
    need = (len(qb), options.num_chunks(x.shape[1]))
    if tuple(sb.shape) != need or qb.dtype != torch.int8 or sb.dtype != torch.float32:
        raise BadInput(
            f"b has codes {qb.dtype} and scales {sb.dtype} {tuple(sb.shape)}, and {tuple(qb.shape)} codes in "
            f"chunks of {options.chunk_d or 'all'} are int8 and have float32 scales {need}; quantise it "
            "with the same options."
        )
    y: Tensor = _stochastic_rows(x.detach(), smooth_scales, qb, sb, text_of_format(options), levels, dtype)
    return y
