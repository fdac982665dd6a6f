"""``y = x W^T`` for a few rows of x (decoding) and packed weights, with what stands around it in a decoder.

    x' = x / rms(x) * (w_norm + offset)    if a norm is given, else x
    y_i = x' W_i^T + b_i + s_i t_i B_i^T   for up to three weights that share x (q, k and v); optional: a
                                           bias, and a low-rank branch, whose t_i = x' A_i^T
    sums = (out * (w_next + offset)) A^T   if the product that reads ``out`` has branches: what kernels begin
                                           for it, in parts (inner_parts.cu)
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

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.base import Packed
from fewbits.kernels.decoder.gated_activation import gated_activation_ref
from fewbits.kernels.decoder.rmsnorm import rmsnorm_ref
from fewbits.kernels.generation import columns
from fewbits.kernels.generation.columns import (
    Columns,
    columns_of,
    follow_each_other,
    macros_of,
    read_in_pairs,
)
from fewbits.kernels.generation.cut import (
    Reading,
    Shape,
    Work,
    cut,
    max_rows,
    shape_of,
    share_of,
    shared_bytes_of,
    vector_scales,
)
from fewbits.kernels.generation.operands import LowRankSum, Product, RowNorm
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.jit import cdiv, multiprocessors, on_device_of

SOURCE = "generation/few_rows.cu"


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
    factor_of_x = torch.ones(len(x), dtype=acc, device=x.device)
    if norm is not None:
        x, factor_of_x = rmsnorm_ref(x, norm.weight, norm.eps, norm.offset)
    products = []
    for i, weight in enumerate(weights):
        dense = weight.dequantize(torch.float32) if isinstance(weight, Packed) else weight
        y = x @ dense.to(acc).t()
        bias = None if biases is None else biases[i]
        branch = None if branches is None else branches[i]
        if bias is not None:
            y = y + bias.to(acc)
        if branch is not None:
            inner = branch.inner.to(acc) if branch.a is None else x @ branch.a.to(acc).t()
            if inner.dim() == 3:
                inner = inner.sum(0) * factor_of_x[:, None]
            y = y + branch.scale * (inner @ branch.weight.to(acc).t())
        products.append(y)
    if activation is not None:
        return gated_activation_ref(products[0], products[1], activation).to(acc) * factor
    return torch.cat(products, dim=-1) * factor


def define(product: Product) -> Tensor:
    """Compute a product by its definition; its output (M, N)."""
    y = few_rows_ref(
        product.x,
        product.weights,
        biases=product.biases,
        branches=product.branches,
        norm=product.norm,
        activation=product.activation,
        factor=product.factor,
    )
    return product.out.add_(y) if product.add else product.out.copy_(y)


class FewRows:
    """One prepared product, launched as often as wanted.

    Attributes:
        out: where the result is written or added.
        shape: how the work is cut.
        next_sums: (parts, M, ranks) float32, what each launch leaves for the product that reads ``out``;
            None if it begins nothing there.
        argument: what the kernel is given; tests run its source on a CPU with the same.
        defines: the macros it is compiled with.
        source: of the kernel, few_rows.cu or columns.cu.
    """

    def __init__(
        self,
        product: Product,
        *,
        early: bool = False,
        shape: tuple[int, int, int, int] | Columns | None = None,
    ) -> None:
        """Prepare the launches of a product.

        Args:
            product: what is computed, of at most `max_rows` rows.
            early: start before the kernel before has ended (compute capability 9.0 and later).
            shape: warps, loads, depth and blocks, or columns of the other kernel; None: what fits.

        Raises:
            Unsupported: operands that the kernel does not take.
            BadInput: too many rows.
        """
        self.out, self._early, self._product = product.out, early, product
        reading, x = product.reading(), product.x
        most = min(max_rows(w) for w in product.weights)
        if not 1 <= len(x) <= most:
            raise BadInput(
                f"x has {len(x)} rows; with these weights the kernel for few rows takes 1 to {most}."
            )
        if product.inner_ranks:
            raise BadInput("the kernel for few rows computes no inner values of branches; batch_rows does.")
        self.shape = _shape(reading, product, shape)
        by_columns = isinstance(self.shape, Columns)
        self.next_sums = _next_sums(product, self.shape)
        self.argument = product.argument(
            reading,
            self.shape.block_chunks if isinstance(self.shape, Columns) else reading.block_chunks,
            self.next_sums,
        )
        self.source, self._name = (columns.SOURCE, "columns") if by_columns else (SOURCE, "few_rows")
        self.defines: nvrtc.Defines = (
            *_cut_macros(reading, self.shape, product),
            *product.defines(),
            *product.part_defines(),
            ("EARLY", int(early)),
        )

    def launch(self) -> Tensor:
        """Run it on the current stream of the operands' device, on a CPU by the definition: (M, N)."""
        if not self.out.is_cuda:
            define(self._product)
            if self._product.next is not None and self.next_sums is not None:
                self.next_sums.zero_()[0] = self._product.next.sums_of(self.out)
            return self.out
        with on_device_of(self.out):
            kernel = nvrtc.kernel(
                self.source, self._name, self.defines, self.out.device.index, self.shape.shared_bytes
            )
            grid, threads = (self.shape.blocks, 1, 1), 32 * self.shape.warps
            nvrtc.launch(kernel, grid, threads, self.shape.shared_bytes, self.argument, early=self._early)
        return self.out


def _shape(
    reading: Reading, product: Product, chosen: tuple[int, int, int, int] | Columns | None
) -> Shape | Columns:
    (M, K), tiles, device = product.x.shape, product.all_tiles, product.x.device
    room, processors = shared_bytes_of(device), multiprocessors(device)
    room -= product.part_reserve()
    shape: Shape | Columns
    if isinstance(chosen, Columns):
        shape = chosen
    elif chosen is not None:
        warps, loads, depth, blocks = chosen
        shape = cut(reading, K, M, tiles, blocks, warps, loads, depth)
    else:
        work = Work(reading, K, M, tiles, processors, room)
        shape = columns_of(work) or shape_of(reading, K, M, tiles, processors, room)
    beside = product.part_bytes(shape.warps, _teams_of(shape))
    return replace(shape, shared_bytes=shape.shared_bytes + beside)


def _teams_of(shape: Shape | Columns) -> int:
    """Groups of warps of a block that have tiles of their own."""
    return shape.teams if isinstance(shape, Columns) else 1


def _next_sums(product: Product, shape: Shape | Columns) -> Tensor | None:
    if product.next is None:
        return None
    size = (shape.blocks * _teams_of(shape), len(product.x), product.next.ranks)
    return torch.zeros(size, dtype=torch.float32, device=product.x.device)


def _cut_macros(reading: Reading, shape: Shape | Columns, product: Product) -> nvrtc.Defines:
    weights = product.weights
    if isinstance(shape, Columns):
        pairs = read_in_pairs(reading, weights, shape)
        return macros_of(
            reading, shape, pairs=pairs, simple=follow_each_other(reading, weights, product.gated)
        )
    M, K = product.x.shape
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
    return FewRows(Product(x, weights, out, biases, branches, norm, activation, factor=factor)).launch()
