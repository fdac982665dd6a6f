"""``y = x W^T`` for the rows of a batch (2 to 64) and packed weights: the same product as few_rows.py's.

Numbers: the definition is that of few_rows.py. The kernel rounds x to float16 (times a power of two, so
that none overflows) as few_rows.py does, and beside it each decoded weight: code times scale, times a power
of two of the whole matrix, in float16. Codes of integers and of float8 are exact before they meet their
scale, values of NF4's and FP4's tables are rounded to float16, scales and products too: each 2**-12 of a
value at most. Weights below 2**-26 of the largest lose bits, for lack of room in float16. bfloat16 weights
are multiplied as they are, with x rounded to bfloat16. Sums are in float32, in a fixed order: equal calls
give equal bits.

Floor: each weight is read once, and each block of threads reads the part of x that it needs. A matrix of
16 outputs by 16 inputs of W and 8 rows of x is one instruction of the tensor cores; 64 rows of the 8B shape's
gate and up take 20 us of those on an H200, reading the weights in NF4 13.8.

Two kernels: batch_x.cu puts x in order; batch_rows.cu multiplies, or wide_rows.cu on a GPU of compute
capability 9.0, where batch_cut.py estimates that it is faster. No gradient: decoding has none.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from math import floor, log2

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.base import Packed
from fewbits.kernels.generation.batch_cut import Cut, cut_of
from fewbits.kernels.generation.cut import Work, has_warpgroups, shared_bytes_of
from fewbits.kernels.generation.few_rows import define
from fewbits.kernels.generation.operands import Arguments, LowRankInputs, Product
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.jit import cdiv, multiprocessors, on_device_of

SOURCE = "generation/batch_rows.cu"
WIDE_SOURCE = "generation/wide_rows.cu"
SOURCE_OF_X = "generation/batch_x.cu"
MOST_ROWS = 64
_TARGET = 2.0**12  # for the largest decoded weight; float16 ends at 2**16
_WARPS_OF_X = 16
_ROWS_OF_A = 4  # of a block that computes branches' inner values


class _BatchArguments(ctypes.Structure):
    """The kernel's argument, field by field as in batch_rows.cu."""

    _fields_ = [
        ("p", Arguments),
        *((name, ctypes.c_void_p) for name in ("factors", "parts", "arrived")),
        ("up", ctypes.c_float * 3),
        ("down", ctypes.c_float * 3),
    ]


class _RowsOfX(ctypes.Structure):
    """The argument of batch_x.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "norm", "out", "factors")),
        ("x_pitch", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("norm_offset", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("K", "K_padded", "M")),
        ("low", LowRankInputs),
    ]


@dataclass
class Workspace:
    """Memory that products which run one after the other share: x in order, sums of parts."""

    device: torch.device
    _memory: dict[str, Tensor] = field(default_factory=dict)

    def get(self, name: str, bytes_: int) -> Tensor:
        """At least so many bytes, (n,) uint8, zeros at first; larger than before, they are others."""
        memory = self._memory.get(name)
        if memory is None or memory.numel() < bytes_:
            memory = self._memory[name] = torch.zeros(bytes_, dtype=torch.uint8, device=self.device)
        return memory


def batch_rows_ref(product: Product) -> Tensor:
    """The definition, that of few_rows.py's text, in float32: the output (M, N), written or added."""
    return define(product)


def batch_rows(product: Product) -> Tensor:
    """Compute a product of up to `MOST_ROWS` rows: its output (M, N), written or added.

    Raises:
        Unsupported: operands that the kernel for GPUs does not take.
        BadInput: no row, or too many.
    """
    return BatchRows(product).launch()


class BatchRows:
    """One prepared product of up to `MOST_ROWS` rows, launched as often as wanted.

    Attributes:
        out: where the result is written or added.
        cut: how the work is cut.
        blocks_of_x, shared_of_x: of the first kernel: its grid, with the blocks that compute branches' inner
            values, and a block's bytes of shared memory.
        argument, argument_of_x: what the two kernels are given; tests run their sources with the same.
        defines, defines_of_x: the macros they are compiled with.
    """

    def __init__(
        self,
        product: Product,
        workspace: Workspace | None = None,
        *,
        early: bool = False,
        cut: Cut | None = None,
    ) -> None:
        """Prepare the launches of a product.

        Args:
            product: what is computed.
            workspace: of products that run one after the other on the same stream; None: its own.
            early: start before the kernel before has ended (compute capability 9.0 and later).
            cut: how the work is cut; None: as `cut_of` estimates to be fastest.

        Raises:
            Unsupported: operands that the kernel does not take.
            BadInput: no row, or too many.
        """
        self.out, self._early, self._product = product.out, early, product
        reading, device = product.reading(), product.x.device
        M, K = product.x.shape
        _check_rows(product)
        tiles, room = product.all_tiles, shared_bytes_of(device)
        work = Work(reading, K, M, tiles, multiprocessors(device), room, has_warpgroups(device))
        chosen = cut or cut_of(work)
        if chosen is None:
            raise BadInput(f"{work.room} bytes of shared memory do not hold a product with {M} rows of x.")
        self.cut, self.source = chosen, WIDE_SOURCE if chosen.wide else SOURCE
        space = workspace or Workspace(device)
        self._blocks = cdiv(work.tiles, chosen.block_tiles)
        rows, padded = 8 * chosen.groups, chosen.chunks * work.chunk
        x, factors = space.get("x", rows * padded * 2), space.get("factors", 4 * MOST_ROWS)
        parts = space.get("parts", 64 * rows * work.tiles * chosen.split if chosen.split > 1 else 16)
        arrived = space.get("arrived", 4 * self._blocks)
        self._held = (x, factors, parts, arrived)
        argument = product.argument(reading, 1)
        argument.x = x.data_ptr()
        powers = [_power_of(w) if reading.scales else 1.0 for w in product.weights]
        undo = 256.0 if reading.kind == 3 and reading.scales else 1.0
        self.argument = _BatchArguments(argument, factors.data_ptr(), parts.data_ptr(), arrived.data_ptr())
        for i, power in enumerate(powers):
            self.argument.up[i], self.argument.down[i] = power, undo / power
        norm = product.norm
        self.argument_of_x = _RowsOfX(
            product.x.data_ptr(),
            None if norm is None else norm.weight.data_ptr(),
            x.data_ptr(),
            factors.data_ptr(),
            product.x.stride(0),
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
            K,
            padded,
            M,
            product.low_rank_inputs(),
        )
        inner = cdiv(product.inner_ranks, _ROWS_OF_A)
        self.blocks_of_x, self.shared_of_x = M + inner, _WARPS_OF_X * max(8, 4 * (_ROWS_OF_A + 1) * M)
        wide = ("WIDE", int(chosen.wide))
        read = (("KIND", reading.kind), ("VALUES", work.values), ("GROUPS", chosen.groups), wide)
        around = (*product.defines(), ("EARLY", int(early)))
        scales = (
            ("SCALES", reading.scales),
            ("ZERO_POINTS", int(reading.zero_points)),
            ("BLOCK", work.block),
        )
        self.defines: nvrtc.Defines = (*read, *scales, *_defines_of(chosen), *around)
        many = (("INNER", inner), ("INNER_M", M if inner else 0), ("A_ROWS", _ROWS_OF_A))
        share = cdiv(padded, 4 * 32 * _WARPS_OF_X)
        self.defines_of_x: nvrtc.Defines = (*read, ("SHARE", share), ("WARPS", _WARPS_OF_X), *around, *many)

    def launch(self) -> Tensor:
        """Run it on the current stream of the operands' device, on a CPU by the definition: (M, N)."""
        if not self.out.is_cuda:
            return batch_rows_ref(self._product)
        with on_device_of(self.out):
            device, shared = self.out.device.index, self.cut.shared_bytes
            order = nvrtc.kernel(SOURCE_OF_X, "batch_x", self.defines_of_x, device, self.shared_of_x)
            name = "wide_rows" if self.cut.wide else "batch_rows"
            multiply = nvrtc.kernel(self.source, name, self.defines, device, shared)
            rows, threads = (self.blocks_of_x, 1, 1), 32 * _WARPS_OF_X
            nvrtc.launch(order, rows, threads, self.shared_of_x, self.argument_of_x, early=self._early)
            grid = (self._blocks, self.cut.split, 1)
            nvrtc.launch(multiply, grid, 32 * self.cut.warps, shared, self.argument, early=self._early)
        return self.out


def _defines_of(cut: Cut) -> nvrtc.Defines:
    return (
        ("R", cut.tiles),
        ("WN", cut.neighbours),
        ("WK", cut.slices),
        ("SPLIT", cut.split),
        ("CS", cut.stage_chunks),
        ("DEPTH", cut.depth),
        ("STAGES", cut.stages),
        ("RING" if cut.wide else "AHEAD", cut.ahead),
        ("WHOLE", int(cut.whole)),
    )


def _check_rows(product: Product) -> None:
    rows = len(product.x)
    if not 1 <= rows <= MOST_ROWS:
        raise BadInput(f"x has {rows} rows; the kernel for a batch takes 1 to {MOST_ROWS}.")
    if product.next is not None or product.parts:
        raise BadInput("the kernel for a batch takes inner values of branches whole; few_rows, in parts.")


def _power_of(weight: Packed | Tensor) -> float:
    """The power of two that brings a matrix's largest possible weight (N, K) to float16's upper range."""
    if isinstance(weight, Tensor) or weight.format.contract.coding is None:
        return 1.0
    coding = weight.format.contract.coding
    most = max(map(abs, coding.values)) if coding.values else _LARGEST[coding.kind, coding.bits]
    if "zero_points" in weight.parts:
        most += float(weight.parts["zero_points"].abs().amax())
    if coding.scale_block:
        scale = float(weight.parts["scale_scales"].abs().amax()) * max(map(abs, coding.scale_values))
        if "scale_offset" in weight.parts:
            scale += abs(float(weight.parts["scale_offset"]))
    else:
        scale = float(weight.scales.abs().amax())
    largest = most * scale
    return 2.0 ** floor(log2(_TARGET / largest)) if 0 < largest < float("inf") else 1.0


# The largest magnitude of a code as the kernel has it: integers, and float8 whose bits have been moved.
_LARGEST = {("whole", 4): 8.0, ("whole", 8): 128.0, ("e4m3", 8): 448.0 / 256, ("e5m2", 8): 57344.0}
