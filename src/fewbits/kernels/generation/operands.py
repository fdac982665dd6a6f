"""The operands of a product that decoding asks for, as one value, and as its kernels in CUDA C++ take them.

A `Product` says what is computed (few_rows.py's text defines it) and where its operands are; how it is cut
and which kernel computes it is left to few_rows.py and batch_rows.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.base import Packed
from fewbits.formats.tables import table
from fewbits.kernels.generation.cut import Reading, reading_of
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.jit import cdiv

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
# Rows of x and, over all branches, inner values of them, whose sums the kernel in front can leave.
MOST_ROWS_OF_PARTS, MOST_VALUES_OF_PARTS = 2, 256
MOST_WARPS = 16  # of a block
# Rows of x whose inner values a product computes itself; for more, tensor cores do, in a launch of their own.
MOST_ROWS_OF_INNER = 8
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
        inner: t = x A^T (M, r) float32; rows may be apart. Or (parts, M, r): what kernels in front left of it
            (`NextInner`); their sum, times the factor of the product's norm, is t. Then all branches' are
            columns of one tensor, each from a multiple of four on, and r is one, zeros included.
        scale: s.
        a: None if ``inner`` already holds t. Else A (r, K) in the same 16 bits, contiguous, from which the
            product computes t first (from normalised x, if the product normalises) and writes it to
            ``inner``; only the kernels of batch_rows.py can.
    """

    weight: Tensor
    inner: Tensor
    scale: float
    a: Tensor | None = None

    def rows(self, rows: slice) -> LowRankSum:
        """The same for these rows of x."""
        return replace(self, inner=self.inner[..., rows, :])


@dataclass(frozen=True, eq=False)
class NextInner:
    """A of the branches of the product that reads an output (M, N): its kernel begins t = x A^T.

    Attributes:
        a: (N / 8, ranks, 8) in 16 bits, contiguous: eight columns of all As side by side; ranks, a multiple
            of four, filled up with zeros.
        norm: the RMSNorm between, whose factor is left for later.
    """

    a: Tensor
    norm: RowNorm | None = None

    @property
    def ranks(self) -> int:
        """Rows of all As, those that fill up included."""
        return int(self.a.shape[1])

    def sums_of(self, x: Tensor) -> Tensor:
        """The definition: what x (M, N) gives with all of A, before the norm's factor, (M, ranks) float32."""
        x = x.float()
        if self.norm is not None:
            x = x * (self.norm.weight.float() + self.norm.offset)
        return x @ self.a.float().transpose(1, 2).reshape(x.shape[1], self.ranks)


class InnerParts(ctypes.Structure):
    """Inner values that kernels begin for one another, field by field as in operands.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("parts", "next_a", "next_norm", "next_sums")),
        ("next_offset", ctypes.c_float),
        ("pitch", ctypes.c_int),
    ]


class LowRankInputs(ctypes.Structure):
    """What computes branches' inner values, field by field as in inner_values.cu."""

    _fields_ = [
        ("a", ctypes.c_void_p * 3),
        ("inner", ctypes.c_void_p * 3),
        ("rank", ctypes.c_int * 3),
        ("pitch", ctypes.c_int * 3),
    ]


class Matrix(ctypes.Structure):
    """A weight as the kernels find it, field by field as in operands.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "scale_scales", "scale_offset")),
        *((name, ctypes.c_void_p) for name in ("zero_points", "bias", "branch", "inner")),
        ("row_bytes", ctypes.c_int64),
        ("branch_scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("rank", "inner_pitch")),
        *((name, ctypes.c_int) for name in ("N", "scales_a_row", "tiles", "block_shift")),
    ]


class Arguments(ctypes.Structure):
    """A kernel's argument, field by field as in operands.cu."""

    _fields_ = [
        ("w", Matrix * 3),
        *((name, ctypes.c_void_p) for name in ("x", "norm", "map", "out")),
        *((name, ctypes.c_int64) for name in ("x_pitch", "out_pitch")),
        ("values", ctypes.c_float * 16),
        *((name, ctypes.c_float) for name in ("eps", "norm_offset", "out_factor")),
        *((name, ctypes.c_int) for name in ("K", "M", "tiles", "scale_shift", "block_chunks")),
        ("inner", InnerParts),
    ]


@dataclass(frozen=True, eq=False)
class Product:
    """``out = ...`` or ``out += ...``, over operands that stay where they are.

    Attributes:
        x: (M, K) in float32, bfloat16 or float16, rows contiguous.
        weights: up to three of (N, K), of one format, packed or of 16 bits; exactly two with an activation.
        out: (M, sum of N), or (M, N) with an activation; float32 if ``add``.
        biases: for each weight (N,) in a 16-bit dtype, or None.
        branches: for each weight what is added to its product, or None.
        norm: of x; its weight in a 16-bit dtype.
        activation: "silu", "gelu" or "gelu_tanh" of the first product, times the second.
        add: add to ``out``.
        factor: what the result is multiplied by.
        next: what of the product that reads ``out`` is begun here; of one weight, or with an activation.
    """

    x: Tensor
    weights: Sequence[Packed | Tensor]
    out: Tensor
    biases: Sequence[Tensor | None] | None = None
    branches: Sequence[LowRankSum | None] | None = None
    norm: RowNorm | None = None
    activation: str | None = None
    add: bool = False
    factor: float = 1.0
    next: NextInner | None = None

    @property
    def gated(self) -> bool:
        """Whether two weights give one output."""
        return self.activation is not None

    @property
    def tiles(self) -> list[int]:
        """Tiles of 16 outputs of each weight, of a gated product of 8 and 8."""
        return [cdiv(w.shape[0], 8 if self.gated else 16) for w in self.weights]

    @property
    def all_tiles(self) -> int:
        """Tiles of the whole product."""
        return self.tiles[0] if self.gated else sum(self.tiles)

    @property
    def inner_ranks(self) -> int:
        """How many inner values of a row of x the product computes itself, over all branches."""
        return sum(b.a.shape[0] for b in self.branches or () if b is not None and b.a is not None)

    @property
    def parts(self) -> list[Tensor]:
        """Of the branches whose inner values come as sums of parts, these (parts, M, r)."""
        return [b.inner for b in self.branches or () if b is not None and b.inner.dim() == 3]

    def inner_parts(self, next_sums: Tensor | None) -> InnerParts:
        """Where parts of inner values are found, and where the next product's (parts, M, r) are left."""
        inner = InnerParts()
        if self.parts:
            inner.parts = min(part.data_ptr() for part in self.parts)
            inner.pitch = self.parts[0].stride(1)
        if self.next is not None and next_sums is not None:
            norm = self.next.norm
            inner.next_a, inner.next_sums = self.next.a.data_ptr(), next_sums.data_ptr()
            inner.next_norm = None if norm is None else norm.weight.data_ptr()
            inner.next_offset = 0.0 if norm is None else norm.offset
        return inner

    def low_rank_inputs(self) -> LowRankInputs:
        """What computes them."""
        inputs = LowRankInputs()
        for i, branch in enumerate(self.branches or ()):
            if branch is not None and branch.a is not None:
                inputs.a[i], inputs.inner[i] = branch.a.data_ptr(), branch.inner.data_ptr()
                inputs.rank[i], inputs.pitch[i] = branch.a.shape[0], branch.inner.stride(0)
        return inputs

    def reading(self) -> Reading:
        """How kernels read its weights.

        Raises:
            Unsupported: operands that no kernel takes.
        """
        x, weights, out = self.x, self.weights, self.out
        reading = reading_of(weights[0])
        formats = {w.format if isinstance(w, Packed) else w.dtype for w in weights}
        activation = self.activation
        facts = (
            (len(weights) == 2 if self.gated else 1 <= len(weights) <= 3, "too many or too few weights"),
            (
                len(formats) == 1 and all(reading_of(w) is not None for w in weights),
                f"weights stored as {sorted(map(str, formats))}",
            ),
            (x.dim() == 2 and x.stride(1) == 1 and x.dtype in _KINDS, f"x {tuple(x.shape)} of {x.dtype}"),
            (all(w.shape[1] == x.shape[1] for w in weights), "weights of another inner size"),
            (x.shape[1] % 4 == 0 and x.stride(0) % 4 == 0, f"an inner size of {x.shape[1]}"),
            (not self.add or out.dtype == torch.float32, f"adding to {out.dtype}"),
            (out.stride(1) == 1, "an output whose rows are not contiguous"),
            (activation is None or activation in ACTIVATIONS, f"the activation {activation!r}"),
            (len(self._halves()) <= 1, "two kinds of 16 bits at once"),
            (not self.inner_ranks or takes_inner(x), f"inner values of {len(x)} rows of {x.shape[1]} values"),
            (all(map(_is_aligned, self._inner_weights())), "an A whose rows are not aligned to 16 bytes"),
            *self._facts_of_parts(),
        )
        for holds, fact in facts:
            if not holds:
                raise Unsupported(
                    f"the kernel for a few rows does not take {fact}; use fewbits' packed_linear."
                )
        assert reading is not None
        if reading.kind == _E4M3 and any(_has_no_number(w) for w in weights):
            raise Unsupported(
                "a weight stored as E4M3 has codes that are no numbers (0x7f); quantise it again."
            )
        return reading

    def _facts_of_parts(self) -> Iterator[tuple[bool, str]]:
        parts, branches = self.parts, [b for b in self.branches or () if b is not None]
        if parts:
            values = _columns_of_parts(parts)
            yield from (
                (len(parts) == len(branches), "inner values of which only some come in parts"),
                (len({(p.shape[:2], p.stride()) for p in parts}) == 1, "parts of several tensors"),
                (_few_values(len(self.x), values), f"parts of {len(self.x)} rows of {values} inner values"),
                (all(p.data_ptr() % 16 == 0 and p.stride(1) % 4 == 0 for p in parts), "parts not aligned"),
                (all(map(_in_fours, branches)), "branches in parts whose ranks are not filled up to fours"),
            )
        if self.next is not None:
            rows, columns = self.out.shape
            yield from (
                (self.gated or len(self.weights) == 1, "several weights whose outputs begin inner values"),
                (self.next.a.shape[::2] == (columns // 8, 8) and columns % 8 == 0, "an A of other columns"),
                (_is_aligned(self.next.a) and self.next.ranks % 4 == 0, "an A that is not aligned"),
                (_few_values(rows, self.next.ranks), f"{rows} rows of {self.next.ranks} inner values"),
            )

    def argument(self, reading: Reading, block_chunks: int, next_sums: Tensor | None = None) -> Arguments:
        """What a kernel is given, where ``block_chunks`` of its chunks share a scale.

        ``next_sums`` (parts, M, ranks): where sums for the next product are left.
        """
        x, out, norm, weights = self.x, self.out, self.norm, self.weights
        none = [None] * len(weights)
        first_part = min((part.data_ptr() for part in self.parts), default=0)
        matrices = [
            _matrix_of(*operands, reading, first_part)
            for operands in zip(weights, self.biases or none, self.branches or none, self.tiles, strict=True)
        ]
        return Arguments(
            (Matrix * 3)(*matrices),
            x.data_ptr(),
            None if norm is None else norm.weight.data_ptr(),
            _scale_map(weights[0], x.device),
            out.data_ptr(),
            x.stride(0),
            out.stride(0),
            _values(weights[0]),
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
            self.factor,
            x.shape[1],
            x.shape[0],
            self.all_tiles,
            reading.scale_shift,
            block_chunks,
            self.inner_parts(next_sums),
        )

    def part_defines(self) -> nvrtc.Defines:
        """The macros of inner values that kernels begin for one another: inner_parts.cu."""
        parts, after = self.parts, self.next
        return (
            ("INNER_M", len(self.x) if parts or after is not None else 0),
            ("PARTS", _columns_of_parts(parts) // 4 if parts else 0),
            ("PART_COUNT", len(parts[0]) if parts else 0),
            ("NEXT", 0 if after is None else after.ranks),
            ("NEXT_NORM", int(after is not None and after.norm is not None)),
        )

    def part_bytes(self, warps: int, teams: int) -> int:
        """Shared memory that these take, of a block with so many warps and teams."""
        macros = dict(self.part_defines())
        return macros["INNER_M"] * (16 * (warps + 1) * macros["PARTS"] + 4 * teams * macros["NEXT"])

    def part_reserve(self) -> int:
        """Shared memory that is left free for them."""
        macros = dict(self.part_defines())
        return part_reserve(macros["INNER_M"], 4 * macros["PARTS"] + macros["NEXT"])

    def defines(self) -> nvrtc.Defines:
        """The macros that say what stands around the product."""
        half = next(iter(self._halves()), torch.bfloat16)
        return (
            ("GATED", int(self.gated)),
            ("ACTIVATION", 0 if self.activation is None else ACTIVATIONS[self.activation]),
            ("NORM", int(self.norm is not None)),
            ("X_KIND", _KINDS[self.x.dtype]),
            ("OUT_KIND", _KINDS[self.out.dtype]),
            ("ADD", int(self.add)),
            ("HALF", _KINDS[half]),
        )

    def _inner_weights(self) -> list[Tensor]:
        return [b.a for b in self.branches or () if b is not None and b.a is not None]

    def _halves(self) -> set[torch.dtype]:
        """The dtypes of the operands of 16 bits, which have to be one."""
        tensors = [t for t in (self.x, self.out) if t.dtype != torch.float32]
        tensors += [b for b in self.biases or () if b is not None]
        tensors += [b.weight for b in self.branches or () if b is not None]
        tensors += self._inner_weights()
        if self.next is not None:
            tensors += [self.next.a, *([] if self.next.norm is None else [self.next.norm.weight])]
        tensors += [] if self.norm is None else [self.norm.weight]
        return {t.dtype for t in tensors}


def takes_inner(x: Tensor) -> bool:
    """Whether a product of x (M, K) can compute its branches' inner values."""
    return len(x) <= MOST_ROWS_OF_INNER and x.shape[1] % 8 == 0


def takes_parts(rows: int, ranks: Sequence[int]) -> bool:
    """Whether kernels begin inner values of these branches for one another, for ``rows`` rows of x."""
    return _few_values(rows, sum(cdiv(rank, 4) * 4 for rank in ranks))


def part_reserve(rows: int, ranks: int) -> int:
    """Bytes of shared memory that are left free for so many inner values of a product and of the next one.

    Two blocks may lie side by side, each of at most `MOST_WARPS` warps.
    """
    return 2 * 4 * (MOST_WARPS + 1) * rows * ranks


def _few_values(rows: int, ranks: int) -> bool:
    return 1 <= rows <= MOST_ROWS_OF_PARTS and rows * ranks <= MOST_VALUES_OF_PARTS


def _columns_of_parts(parts: Sequence[Tensor]) -> int:
    """Columns from the first of these parts (parts, M, r) to the last, in whole fours."""
    first = min(part.data_ptr() for part in parts)
    return max((part.data_ptr() - first) // 4 + cdiv(part.shape[2], 4) * 4 for part in parts)


def _in_fours(branch: LowRankSum) -> bool:
    rank = branch.weight.shape[1]
    whole = branch.weight.is_contiguous() and branch.weight.data_ptr() % 8 == 0
    return whole and rank % 4 == 0 and rank == branch.inner.shape[-1]


def _is_aligned(a: Tensor) -> bool:
    return a.is_contiguous() and a.data_ptr() % 16 == 0


def _has_no_number(weight: Packed | Tensor) -> bool:
    """E4M3 has one code of each sign that is none; the kernel would take it for 480."""
    return isinstance(weight, Packed) and bool((weight.codes.view(torch.uint8) & 0x7F == 0x7F).any())


def _matrix_of(
    weight: Packed | Tensor,
    bias: Tensor | None,
    branch: LowRankSum | None,
    tiles: int,
    reading: Reading,
    first_part: int,
) -> Matrix:
    matrix = Matrix(N=weight.shape[0], tiles=tiles, block_shift=reading.block_shift)
    matrix.bias = None if bias is None else bias.data_ptr()
    if branch is not None:
        matrix.branch, matrix.inner = branch.weight.data_ptr(), branch.inner.data_ptr()
        matrix.branch_scale, matrix.rank = branch.scale, branch.weight.shape[1]
        whole = branch.inner.dim() == 2
        matrix.inner_pitch = branch.inner.stride(0) if whole else (matrix.inner - first_part) // 4
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
