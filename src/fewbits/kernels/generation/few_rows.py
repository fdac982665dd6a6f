"""``y = x W^T`` for a few rows of x (decoding) and packed weights, with what stands around it in a decoder.

    x' = x / rms(x) * (w_norm + offset)    if a norm is given, else x
    y_i = x' W_i^T + b_i + s_i t_i B_i^T   for up to three weights that share x (q, k and v); optional: a
                                           bias, and a low-rank branch, whose t_i = x' A_i^T
    out = [y_0, y_1, y_2], or f(y_0) * y_1 if an activation f is given (gate and up), times ``factor``
    out is written, or added to what is there (the residual stream)

Shapes: x (M, K), W_i (N_i, K) packed or plain, out (M, sum of N_i), or (M, N_0) of a gated product. M is at
most `max_rows`.

Numbers: the definition computes in float32 with the weights decoded to float32. The kernel takes x and the
codes' values in float16 (x times a power of two, so that none overflows and the small ones of a row are
kept), sums in float32 and multiplies by scales in float32. Codes of integers and of float8 are exact in
float16; NF4's and FP4's table is rounded to it, 2**-12 of a value; a bfloat16 weight is multiplied as it is,
with x rounded to bfloat16. Equal calls give equal bits: all sums are taken in a fixed order.

Floor: each weight is read once. The 8B shapes' gate and up in NF4 with double quantisation are 60.6 MB:
13.8 us at the 4.4 TB/s that an H200's memory gives. The kernel is in CUDA C++ (few_rows.cu), for compute
capability 8.0 and later; a call is prepared once (`FewRows`) and launched for every token, or captured.
No gradient: decoding has none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.base import Packed
from fewbits.formats.tables import table
from fewbits.kernels.decoder.gated_activation import gated_activation_ref
from fewbits.kernels.generation import columns
from fewbits.kernels.generation.columns import (
    Columns,
    Work,
    columns_of,
    follow_each_other,
    macros_of,
    read_in_pairs,
)
from fewbits.kernels.generation.cut import (
    Reading,
    Shape,
    cut,
    max_rows,
    reading_of,
    shape_of,
    share_of,
    shared_bytes_of,
    vector_scales,
)
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.jit import cdiv, multiprocessors, on_device_of

SOURCE = "generation/few_rows.cu"
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
_E4M3 = 3  # Reading.kind
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class RowNorm:
    """An RMSNorm in front of a product: its weight (K,), epsilon, and what is added to the weight."""

    weight: Tensor
    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class LowRankSum:
    """A low-rank branch that is added to a product: ``scale * inner @ weight^T``.

    Attributes:
        weight: B (N, r) in the 16 bits of the other operands, contiguous.
        inner: t (M, r) float32; rows may be apart.
        scale: s.
    """

    weight: Tensor
    inner: Tensor
    scale: float


class _Matrix(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "scale_scales", "scale_offset")),
        *((name, ctypes.c_void_p) for name in ("zero_points", "bias", "branch", "inner")),
        ("row_bytes", ctypes.c_int64),
        ("branch_scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("rank", "inner_pitch")),
        *((name, ctypes.c_int) for name in ("N", "scales_a_row", "tiles", "block_shift")),
    ]


class Arguments(ctypes.Structure):
    """The kernel's argument, field by field as in the source."""

    _fields_ = [
        ("w", _Matrix * 3),
        *((name, ctypes.c_void_p) for name in ("x", "norm", "map", "out")),
        *((name, ctypes.c_int64) for name in ("x_pitch", "out_pitch")),
        ("values", ctypes.c_float * 16),
        *((name, ctypes.c_float) for name in ("eps", "norm_offset", "out_factor")),
        *((name, ctypes.c_int) for name in ("K", "M", "tiles", "scale_shift", "block_chunks")),
    ]


def few_rows_ref(
    x: Tensor,
    weights: Sequence[Packed | Tensor],
    *,
    biases: Sequence[Tensor | None] | None = None,
    branches: Sequence[LowRankSum | None] | None = None,
    norm: RowNorm | None = None,
    activation: str | None = None,
    factor: float = 1.0,
) -> Tensor:
    """The definition, in float32 (float64 for float64 x): (M, sum of N), or (M, N) with an activation."""
    acc = torch.promote_types(x.dtype, torch.float32)
    x = x.to(acc)
    if norm is not None:
        x = (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
            * (norm.weight.to(acc) + norm.offset)
        )
    products = []
    for i, weight in enumerate(weights):
        dense = weight.dequantize(torch.float32) if isinstance(weight, Packed) else weight
        y = x @ dense.to(acc).t()
        bias = None if biases is None else biases[i]
        branch = None if branches is None else branches[i]
        if bias is not None:
            y = y + bias.to(acc)
        if branch is not None:
            y = y + branch.scale * (branch.inner.to(acc) @ branch.weight.to(acc).t())
        products.append(y)
    if activation is not None:
        return gated_activation_ref(products[0], products[1], activation).to(acc) * factor
    return torch.cat(products, dim=-1) * factor


class FewRows:
    """One prepared call: operands that stay where they are, launched as often as wanted.

    Attributes:
        out: where the result is written or added.
        shape: how the work is cut.
        argument: what the kernel is given; tests run its source on a CPU with the same.
        defines: the macros it is compiled with.
        source: of the kernel, few_rows.cu or columns.cu.
    """

    def __init__(
        self,
        x: Tensor,
        weights: Sequence[Packed | Tensor],
        out: Tensor,
        *,
        biases: Sequence[Tensor | None] | None = None,
        branches: Sequence[LowRankSum | None] | None = None,
        norm: RowNorm | None = None,
        activation: str | None = None,
        add: bool = False,
        factor: float = 1.0,
        early: bool = False,
        shape: tuple[int, int, int, int] | Columns | None = None,
    ) -> None:
        """Prepare ``out = ...`` (or ``out += ...``) as the module's text defines it.

        Args:
            x: (M, K) in float32, bfloat16 or float16, rows contiguous, on a GPU.
            weights: up to three of (N, K), of one format; exactly two with an activation.
            out: (M, sum of N), or (M, N) with an activation; float32 if ``add``.
            biases: for each weight (N,) in a 16-bit dtype, or None.
            branches: for each weight what is added to its product, or None.
            norm: of x; its weight in a 16-bit dtype.
            activation: "silu", "gelu" or "gelu_tanh".
            add: add to ``out``.
            factor: what the result is multiplied by.
            early: start before the kernel before has ended (compute capability 9.0 and later).
            shape: warps, loads, depth and blocks, or columns of the other kernel; None: what fits.

        Raises:
            Unsupported: operands that the kernel does not take.
        """
        self.out, self._early, self._add = out, early, add
        self._operands = (x, weights, biases, branches, norm, activation, factor)
        halves = _halves(x, out, biases, branches, norm)
        reading = _checked_reading(x, weights, out, halves, activation, add)
        M, K = x.shape
        sizes = [w.shape[0] for w in weights]
        tiles = [cdiv(n, 8 if activation is not None else 16) for n in sizes]
        total = tiles[0] if activation is not None else sum(tiles)
        processors = multiprocessors(x.device)
        self.shape = _shape(reading, x, total, processors, shape)
        half = next(iter(halves), torch.bfloat16)
        none = [None] * len(weights)
        matrices = [
            _matrix(*operands, reading)
            for operands in zip(weights, biases or none, branches or none, tiles, strict=True)
        ]
        self.argument = Arguments(
            (_Matrix * 3)(*matrices),
            x.data_ptr(),
            None if norm is None else norm.weight.data_ptr(),
            _scale_map(weights[0], x.device),
            out.data_ptr(),
            x.stride(0),
            out.stride(0),
            _values(weights[0]),
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
            factor,
            K,
            M,
            total,
            reading.scale_shift,
            self.shape.block_chunks if isinstance(self.shape, Columns) else reading.block_chunks,
        )
        by_columns = isinstance(self.shape, Columns)
        self.source, self._name = (columns.SOURCE, "columns") if by_columns else (SOURCE, "few_rows")
        self.defines: nvrtc.Defines = (
            *_cut_macros(reading, self.shape, weights, (M, K), activation is not None),
            ("GATED", int(activation is not None)),
            ("ACTIVATION", 0 if activation is None else ACTIVATIONS[activation]),
            ("NORM", int(norm is not None)),
            ("X_KIND", _KINDS[x.dtype]),
            ("OUT_KIND", _KINDS[out.dtype]),
            ("ADD", int(add)),
            ("HALF", _KINDS[half]),
            ("EARLY", int(early)),
        )

    def launch(self) -> Tensor:
        """Run it on the current stream of the operands' device, on a CPU by the definition; ``out``."""
        if not self.out.is_cuda:
            return self._define()
        with on_device_of(self.out):
            kernel = nvrtc.kernel(
                self.source, self._name, self.defines, self.out.device.index, self.shape.shared_bytes
            )
            grid, threads = (self.shape.blocks, 1, 1), 32 * self.shape.warps
            nvrtc.launch(kernel, grid, threads, self.shape.shared_bytes, self.argument, early=self._early)
        return self.out

    def _define(self) -> Tensor:
        x, weights, biases, branches, norm, activation, factor = self._operands
        y = few_rows_ref(
            x, weights, biases=biases, branches=branches, norm=norm, activation=activation, factor=factor
        )
        return self.out.add_(y) if self._add else self.out.copy_(y)


def _shape(
    reading: Reading,
    x: Tensor,
    tiles: int,
    processors: int,
    chosen: tuple[int, int, int, int] | Columns | None,
) -> Shape | Columns:
    M, K = x.shape
    if isinstance(chosen, Columns):
        return chosen
    if chosen is not None:
        warps, loads, depth, blocks = chosen
        return cut(reading, K, M, tiles, blocks, warps, loads, depth)
    room = shared_bytes_of(x.device)
    work = Work(reading, K, M, tiles, processors, room)
    return columns_of(work) or shape_of(reading, K, M, tiles, processors, room)


def _cut_macros(
    reading: Reading,
    shape: Shape | Columns,
    weights: Sequence[Packed | Tensor],
    size: tuple[int, int],
    gated: bool,
) -> nvrtc.Defines:
    if isinstance(shape, Columns):
        pairs, simple = read_in_pairs(reading, weights, shape), follow_each_other(reading, weights, gated)
        return macros_of(reading, shape, pairs=pairs, simple=simple)
    M, K = size
    vectors = vector_scales(reading, weights, shape)
    return (*_macros(reading, shape, K, M), ("VECTOR_SCALES", int(vectors)))


def _macros(reading: Reading, shape: Shape, K: int, M: int) -> nvrtc.Defines:
    """The macros that say how weights are read and how the work is cut."""
    return (
        ("KIND", reading.kind),
        ("VALUES", reading.values),
        ("SCALES", reading.scales),
        ("ZERO_POINTS", int(reading.zero_points)),
        ("GROUPS", cdiv(M, 8)),
        ("ONE", int(M == 1)),
        ("SHARE", share_of(reading, K, shape.warps)),
        ("WARPS", shape.warps),
        ("LOADS", shape.loads),
        ("DEPTH", shape.depth),
        ("ROUNDS", shape.rounds),
        ("FULL", int(shape.full)),
    )


def few_rows(
    x: Tensor,
    weights: Sequence[Packed | Tensor],
    *,
    biases: Sequence[Tensor | None] | None = None,
    branches: Sequence[LowRankSum | None] | None = None,
    norm: RowNorm | None = None,
    activation: str | None = None,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The product that the module's text defines: (M, sum of N), or (M, N) with an activation.

    Args:
        x: (M, K); on a GPU M is at most `max_rows`.
        weights: up to three of (N, K), of one format, packed or 16-bit tensors; two with an activation.
        biases: for each weight (N,) or None.
        branches: for each weight what is added to its product, or None.
        norm: an RMSNorm of x in front.
        activation: "silu", "gelu" or "gelu_tanh" of the first product times the second.
        factor: what the result is multiplied by.
        dtype: of the result; None: x's.

    Raises:
        Unsupported: operands that the kernel for GPUs does not take.
    """
    dtype = dtype or x.dtype
    if not x.is_cuda:
        y = few_rows_ref(
            x, weights, biases=biases, branches=branches, norm=norm, activation=activation, factor=factor
        )
        return y.to(dtype)
    columns = weights[0].shape[0] if activation is not None else sum(w.shape[0] for w in weights)
    out = torch.empty(len(x), columns, dtype=dtype, device=x.device)
    call = FewRows(
        x, weights, out, biases=biases, branches=branches, norm=norm, activation=activation, factor=factor
    )
    return call.launch()


def _checked_reading(
    x: Tensor,
    weights: Sequence[Packed | Tensor],
    out: Tensor,
    halves: set[torch.dtype],
    activation: str | None,
    add: bool,
) -> Reading:
    readings = {reading_of(w) for w in weights}
    formats = {w.format if isinstance(w, Packed) else w.dtype for w in weights}
    reading = next(iter(readings))
    facts = (
        (1 <= len(weights) <= 3 and (activation is None or len(weights) == 2), "too many or too few weights"),
        (len(formats) == 1 and reading is not None, f"weights stored as {sorted(map(str, formats))}"),
        (x.dim() == 2 and x.stride(1) == 1 and x.dtype in _KINDS, f"x {tuple(x.shape)} of {x.dtype}"),
        (all(w.shape[1] == x.shape[1] for w in weights), "weights of another inner size"),
        (x.shape[1] % 4 == 0 and x.stride(0) % 4 == 0, f"an inner size of {x.shape[1]}"),
        (not add or out.dtype == torch.float32, f"adding to {out.dtype}"),
        (out.stride(1) == 1, "an output whose rows are not contiguous"),
        (activation is None or activation in ACTIVATIONS, f"the activation {activation!r}"),
        (len(halves) <= 1, "two kinds of 16 bits at once"),
    )
    for holds, fact in facts:
        if not holds:
            raise Unsupported(f"the kernel for a few rows does not take {fact}; use fewbits' packed_linear.")
    assert reading is not None
    if reading.kind == _E4M3 and any(_has_no_number(w) for w in weights):
        raise Unsupported("a weight stored as E4M3 has codes that are no numbers (0x7f); quantise it again.")
    most = min(max_rows(w) for w in weights)
    if not 1 <= len(x) <= most:
        raise BadInput(f"x has {len(x)} rows; with these weights the kernel for few rows takes 1 to {most}.")
    return reading


def _has_no_number(weight: Packed | Tensor) -> bool:
    """E4M3 has one code of each sign that is none; the kernel would take it for 480."""
    return isinstance(weight, Packed) and bool((weight.codes.view(torch.uint8) & 0x7F == 0x7F).any())


def _halves(
    x: Tensor,
    out: Tensor,
    biases: Sequence[Tensor | None] | None,
    branches: Sequence[LowRankSum | None] | None,
    norm: RowNorm | None,
) -> set[torch.dtype]:
    """The dtypes of the operands of 16 bits, which have to be one."""
    tensors = [t for t in (x, out) if t.dtype != torch.float32]
    tensors += [b for b in biases or () if b is not None]
    tensors += [b.weight for b in branches or () if b is not None]
    tensors += [] if norm is None else [norm.weight]
    return {t.dtype for t in tensors}


def _matrix(
    weight: Packed | Tensor, bias: Tensor | None, branch: LowRankSum | None, tiles: int, reading: Reading
) -> _Matrix:
    matrix = _Matrix(N=weight.shape[0], tiles=tiles, block_shift=reading.block_shift)
    matrix.bias = None if bias is None else bias.data_ptr()
    if branch is not None:
        matrix.branch, matrix.inner = branch.weight.data_ptr(), branch.inner.data_ptr()
        matrix.branch_scale, matrix.rank = branch.scale, branch.weight.shape[1]
        matrix.inner_pitch = branch.inner.stride(0)
    if isinstance(weight, Tensor):
        matrix.codes, matrix.row_bytes = weight.data_ptr(), weight.stride(0) * weight.element_size()
        return matrix
    for name in ("codes", "scales", "scale_scales", "scale_offset", "zero_points"):
        if name in weight.parts:
            setattr(matrix, name, weight.parts[name].data_ptr())
    matrix.row_bytes = weight.codes.shape[-1] * weight.codes.element_size()
    scales = weight.scales
    matrix.scales_a_row = prod(scales.shape[1:]) if scales.dim() > 1 else 0
    return matrix


def _scale_map(weight: Packed | Tensor, device: torch.device) -> Any:
    coding = weight.format.contract.coding if isinstance(weight, Packed) else None
    if coding is not None and coding.scale_block:
        return table(coding.scale_values, device).data_ptr()
    return None


def _values(weight: Packed | Tensor) -> Any:
    coding = weight.format.contract.coding if isinstance(weight, Packed) else None
    return (ctypes.c_float * 16)(*(() if coding is None else coding.values))
