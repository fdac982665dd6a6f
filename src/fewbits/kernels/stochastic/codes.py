"""``y = a b^T`` of prepared operands, as stochastic-computing hardware counts it, exactly.

Shapes: codes qa (B, N, D) and qb (B or 1, M, D), int8 from -Q to Q; scales sa (B, N, C) and
sb (B or 1, M, C), float32, for the C chunks of the inner dimension; y (B, N, M), float32. For chunks in
ascending order:

    acc = sum over the chunk's d of sign(qa[n, d]) sign(qb[m, d]) T_d(|qa[n, d]|, |qb[m, d]|)
    y[n, m] = y[n, m] + (acc * (Q**2 / L)) * (sa[n] * sb[m])

T is the product table of `fewbits.formats.streams` under the mask of dimension d of a chunk. (With signs in
the streams it is one of signed codes; OR-ed groups have a sum of their own, or_counts.py.) acc is a whole
number, exact in any order; the other operations are one float32 rounding each, in the written order, so that
every device and every path below gives the same bits. L, the length of the streams, belongs to a's rows: to a
row, a chunk, or a row's chunk. Streams of no steps count nothing and add nothing. A scale that is NaN makes
its row or column NaN. There is no gradient here.

Paths, all exact; `stochastic_path` says which one a product takes, and why not a faster one:

* "lookup", on CUDA, in CUDA C++ compiled at run time: the quickest of five ways by estimate
  (choice.py). Few rows look up counts in shared memory, a table for each row and 128 dimensions
  (lookup.cu). Many rows do so for 32 rows at a time by what 4 bits hold of a count
  (nibbles.cu; of a's rows, or of b's where a has the more), or, where a count does not fit them,
  for 16 (many.cu); with short streams they multiply the streams' own bits on matrix units
  (bits.cu). In all, matrix units make the sums.
* "thermometer", on CUDA: streams as one INT8 matrix product in Triton (thermometer.py); where
  NVRTC is missing, or counts do not fit the tables of the first.
* "definition": plain torch (cpu.py), on a CPU, and where there is no Triton.

Floors on an H200 (4.28 TB/s of a copy, 132 multiprocessors at 1.8 GHz), for Llama-3.1-8B's gate projection:

* bytes: weights once, ``M * D * (1 + 4 / chunk_d)``: 60.6 MB, 14.1 us
* lookups, 32 words a clock and multiprocessor, a word holding 4 rows: ``M * D * ceil(N / 4)`` words: 7.7 us
  for up to 4 rows; of 8 rows for many: 2.0 ms for 2048
* bits, three products of ``N * M * D * L`` at the 5.1e15 multiply-adds a second that mma.sync reaches with
  them: 2.3 ms for 2048 rows and 32 steps, 4.5 ms for 64

docs/notebook/stochastic-kernels.md has what was measured beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import Stochastic, stochastic_options
from fewbits.formats.streams import product_tables
from fewbits.kernels.codec.dequantize import format_of_text, text_of_format
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.jit import capability_of, constant_when_compiled, triton
from fewbits.kernels.launch.ops import one_by_one, run
from fewbits.kernels.stochastic import lookup, thermometer
from fewbits.kernels.stochastic.choice import Sizes, choose
from fewbits.kernels.stochastic.cpu import codes_product
from fewbits.kernels.stochastic.or_counts import or_sums_by_steps

_REDUX = (8, 0)  # the first GPUs that add over a warp in one instruction


# 1. The definition.


def stochastic_codes_ref(
    qa: Tensor,
    sa: Tensor,
    qb: Tensor,
    sb: Tensor,
    options: Stochastic,
    levels: Sequence[int],
    level_index: Tensor | None = None,
) -> Tensor:
    """y as the module's text defines it; arguments as of `stochastic_codes`, all of three dimensions."""
    y = torch.zeros(qa.shape[0], qa.shape[1], qb.shape[1], device=qa.device, dtype=torch.float32)
    factors = count_factors(options, levels, qa.device)
    for i, chunk in enumerate(options.chunks(qa.shape[-1])):
        level = _levels_of_chunk(level_index, i, qa)  # (B, N)
        acc = _counts(qa[..., chunk], qb[..., chunk], options, levels, level)
        scales = sa[..., i, None] * sb[:, None, :, i]
        y = y + (acc.float() * factors[level][..., None]) * scales
    return y


def count_factors(options: Stochastic, levels: Sequence[int], device: torch.device) -> Tensor:
    """Q**2 / L of each length as float32 (lengths,); 0 for streams of no steps."""
    factors = [options.max_code**2 / length if length else 0.0 for length in levels]
    return torch.tensor(factors, dtype=torch.float64).float().to(device)


def _levels_of_chunk(level_index: Tensor | None, chunk: int, qa: Tensor) -> Tensor:
    shape = qa.shape[:2]
    if level_index is None:
        return torch.zeros(shape, dtype=torch.int64, device=qa.device)
    return level_index[..., chunk if level_index.shape[-1] > 1 else 0].long().expand(shape)


def _counts(qa: Tensor, qb: Tensor, options: Stochastic, levels: Sequence[int], level: Tensor) -> Tensor:
    """acc of one chunk, (B, N, M) int64: one dimension after the other."""
    masks, streams = options.masks(qa.shape[-1]), options.streams
    if streams.or_group > 1:
        return _or_counts(qa, qb, options, levels, level)
    distinct = tuple(dict.fromkeys(masks))
    tables = torch.stack(
        [_tables(options, length, distinct, qa.device) for length in levels]
    )  # (levels, masks, Q + 1, Q + 1)
    signed = torch.zeros(qa.shape[0], qa.shape[1], qb.shape[1], dtype=torch.int64, device=qa.device)
    for d, mask in enumerate(masks):
        a, b = qa[:, :, d].long(), qb[:, :, d].long()
        if streams.signed:  # tables over codes from -Q to Q
            rows = tables[level, distinct.index(mask), a + options.max_code]
            columns = (b + options.max_code)[:, None, :].expand(len(a), a.shape[1], -1)
            signed += torch.gather(rows, 2, columns)
            continue
        rows = tables[level, distinct.index(mask), a.abs()] * a.sign()[..., None]  # (B, N, Q + 1)
        columns = b.abs()[:, None, :].expand(len(a), a.shape[1], -1)
        signed += torch.gather(rows, 2, columns) * b.sign()[:, None, :]
    return signed


def _tables(options: Stochastic, length: int, masks: tuple[int, ...], device: torch.device) -> Tensor:
    if length:
        return product_tables(options.with_length(length).streams, masks, device).long()
    size = options.streams.num_codes
    return torch.zeros(len(masks), size, size, dtype=torch.int64, device=device)


def _or_counts(qa: Tensor, qb: Tensor, options: Stochastic, levels: Sequence[int], level: Tensor) -> Tensor:
    signed = torch.zeros(qa.shape[0], qa.shape[1], qb.shape[1], dtype=torch.int64, device=qa.device)
    for i, length in enumerate(levels):
        if length:
            streams = options.with_length(length).streams
            part = or_sums_by_steps(qa, qb, streams, options.with_length(length).masks(qa.shape[-1]))
            signed += part * (level == i)[..., None]
    return signed


# 2. Which way.


class Path(NamedTuple):
    """A way to compute a product, and why it is not a faster one ("" if there is none)."""

    name: str  # "lookup", "thermometer" or "definition"
    reason: str = ""


def without_tables(options: Stochastic) -> str:
    """Why no GPU's kernel knows the streams of ``options``, whatever their length; "" where one may."""
    if options.streams.or_group > 1:
        return "OR-ed groups of products have no table of pairs, which the kernels look up"
    if options.streams.signed:
        return "signs are in the streams, and the kernels' tables are of magnitudes"
    return ""


def stochastic_path(
    device: torch.device, D: int, options: Stochastic, levels: Sequence[int] | None = None
) -> Path:
    """The way a product of D inner dimensions takes on a device; all give the same bits."""
    if device.type != "cuda":
        return Path("definition")
    if reason := without_tables(options):
        return Path("definition", reason)
    levels = (options.length,) if levels is None else tuple(levels)
    options, chunk = with_longest(options, levels), options.chunk_size(D)
    why = nvrtc.missing()
    if capability_of(device) < _REDUX:
        why = "the lookups need compute capability 8.0"
    elif why is None and lookup.tables_of(options, levels, chunk, device) is None:
        why = "counts are too far from a straight line for tables of 8 bits"
    if why is None:
        return Path("lookup")
    if triton is None:
        return Path("definition", f"{why}, and there is no Triton")
    if thermometer.tables_of(options, levels, chunk, device) is None:
        return Path("definition", f"{why}, and steps of this arithmetic and length do not fit 8 bits")
    return Path("thermometer", why)


@lru_cache(maxsize=256)
def with_longest(options: Stochastic, levels: tuple[int, ...]) -> Stochastic:
    """The options with the masks that streams of these lengths have."""
    return options.with_length(max(levels)) if max(levels) else options


# torch.compile traces through lru_cache, and a frozen value's constructor wrongly: it calls these two.


@lru_cache(maxsize=64)
@constant_when_compiled
def _longest_text(options: str, levels: tuple[int, ...]) -> str:
    return text_of_format(with_longest(options_of_text(options), levels))


@lru_cache(maxsize=64)
@constant_when_compiled
def _same_masks(options: str, levels: tuple[int, ...]) -> bool:
    stochastic = options_of_text(options)
    return len({stochastic.with_length(length).masks(256) for length in levels if length}) <= 1


def same_masks(options: Stochastic, levels: tuple[int, ...]) -> bool:
    """Whether streams of these lengths have the same masks, as the streams of one product must."""
    return _same_masks(options.text, levels)


# 3. The op: on a CPU the definition's counts, quicker; on CUDA the path.


class StochasticCodes(NamedTuple):
    """The arguments of the op."""

    qa: Tensor
    sa: Tensor
    qb: Tensor
    sb: Tensor
    options: str  # `text_of_format`
    levels: Sequence[int]
    level_index: Tensor | None


def _by_counts(o: StochasticCodes) -> Tensor:
    return codes_product(*o[:4], options_of_text(o.options), o.levels, o.level_index)


_stochastic_codes = torch.library.custom_op(
    "fewbits::stochastic_codes", one_by_one(_by_counts), mutates_args=()
)


def _cuda_codes(o: StochasticCodes) -> Tensor:
    qa, sa, qb, sb = o[:4]
    value, levels, D = options_of_text(o.options), tuple(o.levels), qa.shape[-1]
    path = stochastic_path(qa.device, D, value, levels).name
    if path == "definition" or 0 in (*qa.shape, *qb.shape):
        return _by_counts(o)
    longest, chunk = with_longest(value, levels), value.chunk_size(D)
    y = sa.new_empty(qa.shape[0], qa.shape[1], qb.shape[1])  # float32, whatever torch's default is
    operands = [x.contiguous() for x in (qa, sa, qb, sb)]
    if path == "lookup":
        sizes = Sizes(qa.shape[0], qa.shape[1], qb.shape[1], D, chunk)
        choice = choose(sizes, longest, levels, qa.device, mixed=o.level_index is not None)
        choice.way.launch(operands, choice.tables, o.level_index, chunk, y)
    else:
        tables = thermometer.tables_of(longest, levels, chunk, qa.device)
        assert tables is not None  # or the path were another
        thermometer.launch(operands, tables, o.level_index, chunk, y)
    return y


_stochastic_codes.register_kernel("cuda")(one_by_one(_cuda_codes))


@_stochastic_codes.register_fake
@one_by_one
def _(o: StochasticCodes) -> Tensor:
    return o.sa.new_empty(o.qa.shape[0], o.qa.shape[1], o.qb.shape[1])


def options_of_text(text: str) -> Stochastic:
    """The options of a stochastic product, of an op's argument."""
    options = stochastic_options(format_of_text(text))
    assert options is not None
    return options


# 4. The public function.


def stochastic_codes(
    qa: Tensor,
    sa: Tensor,
    qb: Tensor,
    sb: Tensor,
    options: Stochastic,
    levels: Sequence[int] | None = None,
    level_index: Tensor | None = None,
) -> Tensor:
    """``a b^T`` of operands that `Stochastic.quantize` or `quantize_stochastic` made.

    Args:
        qa: (N, D) or (B, N, D) int8 codes of a.
        sa: (N, C) or (B, N, C) float32 scales of a.
        qb: (M, D), (1, M, D) or (B, M, D) int8 codes of b, on a's device.
        sb: the scales of b.
        options: of the streams, which made the codes too. The length of its streams is not read where
            ``levels`` are given.
        levels: the lengths of streams in this product; None for that of ``options``.
        level_index: uint8 of shape (B or 1, N or 1, C or 1), or without the first: which of the levels each
            of a's rows and chunks has; None for the first. Not checked against the number of levels.

    Returns:
        (N, M) or (B, N, M) float32.

    Raises:
        BadInput: operands or levels do not fit.
        Unsupported: options whose operands cannot be prepared, or counts that could exceed 32 bits.
    """
    if not options.prepares:
        options.layout((1, 1))  # raises and says why
    levels = (options.length,) if levels is None else tuple(levels)
    two = qa.dim() == 2
    if two:
        qa, sa = qa[None], sa[None]
        qb, sb = (qb[None], sb[None]) if qb.dim() == 2 else (qb, sb)
    elif qb.dim() == 2:
        qb, sb = qb[None], sb[None]
    if level_index is not None and level_index.dim() == 2:
        level_index = level_index[None]
    _check(qa, sa, qb, sb, options)
    _check_levels(options, levels, level_index, (*qa.shape[:2], sa.shape[-1]))
    if level_index is not None and level_index.device != qa.device:
        raise BadInput(
            f"level_index is on {level_index.device} and a on {qa.device}; move both to one device."
        )
    text = _longest_text(options.text, levels)
    y = run(_stochastic_codes, _cuda_codes, qa, StochasticCodes(qa, sa, qb, sb, text, levels, level_index))
    return y[0] if two else y


def _check(qa: Tensor, sa: Tensor, qb: Tensor, sb: Tensor, options: Stochastic) -> None:
    for name, codes, scales in (("a", qa, sa), ("b", qb, sb)):
        if codes.dtype != torch.int8 or scales.dtype != torch.float32 or codes.dim() != 3:
            raise BadInput(
                f"{name} has codes {codes.dtype} of {codes.dim()} dimensions and scales {scales.dtype}; give "
                "the int8 codes and float32 scales that quantize_stochastic makes."
            )
        need = (*codes.shape[:2], options.num_chunks(codes.shape[2]))
        if tuple(scales.shape) != need:
            raise BadInput(
                f"{name} has scales {tuple(scales.shape)}, and codes {tuple(codes.shape)} in chunks of "
                f"{options.chunk_d or 'all'} have {need}; quantise it with the same options."
            )
    if qa.shape[2] != qb.shape[2] or qb.shape[0] not in (1, qa.shape[0]):
        raise BadInput(
            f"a has codes {tuple(qa.shape)} and b {tuple(qb.shape)}; the last dimensions must be equal, and "
            "b's first 1 or a's."
        )
    if len({x.device for x in (qa, sa, qb, sb)}) > 1:
        raise BadInput(f"a is on {qa.device} and b on {qb.device}; move both to one device.")


def _check_levels(
    options: Stochastic, levels: Sequence[int], level_index: Tensor | None, shape: tuple[int, ...]
) -> None:
    longest = options.longest
    if not 1 <= len(levels) <= 256 or not all(0 <= length <= longest for length in levels):
        raise BadInput(f"levels={tuple(levels)} is refused: give 1 to 256 lengths from 0 to {longest}.")
    if level_index is not None:
        fits = level_index.dim() == 3 and all(
            n in (1, m) for n, m in zip(level_index.shape, shape, strict=True)
        )
        if level_index.dtype != torch.uint8 or not fits:
            raise BadInput(
                f"level_index is {level_index.dtype} {tuple(level_index.shape)}; give uint8 that broadcasts "
                f"to {shape}."
            )
    if shape[-1] and not same_masks(options, tuple(levels)):
        raise Unsupported(
            f"levels={tuple(levels)} have different masks (full streams on a full grid "
            "have none); make two products."
        )
