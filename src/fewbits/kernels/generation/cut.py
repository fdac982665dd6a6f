"""How few_rows.py's kernel reads a weight, and how a call is cut into blocks, warps and stages.

No arithmetic and no launch: what follows from shapes and formats alone, so that it can be tested anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fewbits.formats.base import Packed
from fewbits.formats.contract import Coding
from fewbits.kernels.launch.jit import cdiv

_MOST_SHARE = 8  # four dimensions in registers of a thread
_SHARED_BYTES = 227 * 1024  # of a block on Hopper


@dataclass(frozen=True)
class Reading:
    """How the kernel reads a weight: macros of the source, fields of its argument."""

    kind: int
    values: int  # that a lane reads of one output and one chunk
    scales: int = 0
    zero_points: bool = False
    block_chunks: int = 1
    block_shift: int = 0
    scale_shift: int = 0

    @property
    def chunk(self) -> int:
        """Values of the inner dimension that four lanes read at once."""
        return 4 * self.values

    @property
    def bits(self) -> int:
        """Of a weight."""
        return 4 if self.kind < 2 else 8 if self.kind < 5 else 16


@dataclass(frozen=True)
class Work:
    """What a call has to do, and on what.

    Attributes:
        reading: how weights are stored.
        K: the inner size.
        M: rows of x.
        tiles: of 16 outputs.
        processors: multiprocessors of the GPU.
        room: bytes of shared memory that a block may have.
        warpgroups: whether four warps can multiply together (warpgroup.cu).
    """

    reading: Reading
    K: int
    M: int
    tiles: int
    processors: int
    room: int
    warpgroups: bool = False

    @property
    def values(self) -> int:
        """Weights of one output in 16 bytes."""
        return 128 // self.reading.bits

    @property
    def chunk(self) -> int:
        """Of the inner dimension, what four lanes read at once if each reads 16 bytes."""
        return 4 * self.values

    @property
    def block(self) -> int:
        """Dimensions that share a scale."""
        return self.reading.chunk * self.reading.block_chunks

    @property
    def cols(self) -> int:
        """Blocks with a scale of their own in a chunk."""
        return max(1, self.chunk // self.block) if self.reading.scales else 1


def reading_of(weight: Packed | Tensor) -> Reading | None:
    """How the kernel reads a weight (N, K); None if it does not."""
    shape = tuple(weight.shape)
    if len(shape) != 2:
        return None
    if isinstance(weight, Tensor):
        kind = {torch.bfloat16: 5, torch.float16: 6}.get(weight.dtype)
        contiguous = weight.stride(1) == 1 and weight.stride(0) % 8 == 0
        return Reading(kind, 8) if kind is not None and contiguous and shape[1] % 8 == 0 else None
    coding = weight.format.contract.coding
    if coding is None:
        return None
    if coding.kind == "table":
        return _reading_of_table(coding, shape)
    kind = {("whole", 4): 1, ("whole", 8): 2, ("e4m3", 8): 3, ("e5m2", 8): 4}.get((coding.kind, coding.bits))
    if kind is None or coding.through:
        return None
    return _reading_of_blocks(kind, 128 // coding.bits, coding.block, shape, coding.zero_point)


def _reading_of_table(coding: Coding, shape: tuple[int, int]) -> Reading | None:
    block = coding.block[1]
    if len(coding.values) != 16 or shape[1] % block or block % 32 or not _power_of_two(block):
        return None
    if not coding.through or (coding.scale_block and not _power_of_two(coding.scale_block)):
        return None
    return Reading(
        kind=0,
        values=min(32, block // 4),
        scales=2 if coding.scale_block else 1,
        block_chunks=max(1, block // 128),
        scale_shift=coding.scale_block.bit_length() - 1 if coding.scale_block else 0,
    )


def _reading_of_blocks(
    kind: int, most_values: int, block: tuple[int, int], shape: tuple[int, int], zero_point: bool
) -> Reading | None:
    """``most_values``: of 16 bytes."""
    rows, columns = block
    if block == (0, 0) or columns == 0:
        whole = rows in (0, 1) and not zero_point and shape[1] % most_values == 0
        return Reading(kind, most_values) if whole else None
    if not (_power_of_two(rows) and _power_of_two(columns) and columns >= 32) or shape[1] % columns:
        return None
    values = min(most_values, columns // 4)
    return Reading(
        kind,
        values,
        scales=1,
        zero_points=zero_point,
        block_chunks=columns // (4 * values),
        block_shift=rows.bit_length() - 1,
    )


def max_rows(weight: Packed | Tensor, reserve: int = 0) -> int:
    """Rows of x that one call takes with this weight; 0 if the kernel does not read it.

    x is (M, K), the weight (N, K); ``reserve``: bytes of shared memory that are for something else.
    """
    reading = reading_of(weight)
    if reading is None:
        return 0
    K, room = weight.shape[1], shared_bytes_of(_device_of(weight)) - reserve
    fitting = (
        M for M in (32, 24, 16, 12, 8, 7, 6, 5, 4, 3, 2, 1) if _choice(reading, K, M, room) is not None
    )
    return next(fitting, 0)


def _x_pitch(reading: Reading, K: int) -> int:
    """Bytes of a row of x in shared memory: X_PITCH of the source."""
    chunks = cdiv(K, reading.chunk)
    sums = 4 * chunks if reading.kind in (1, 2) else 0
    return cdiv(chunks * reading.chunk * 2 + sums, 128) * 128 + 32


@dataclass(frozen=True)
class Shape:
    """How a call is cut: warps of a block, chunks asked for at once, how often; blocks; shared memory."""

    warps: int
    loads: int
    depth: int
    rounds: int
    blocks: int
    shared_bytes: int
    full: bool


@lru_cache(maxsize=1024)
def shape_of(reading: Reading, K: int, M: int, tiles: int, processors: int, room: int) -> Shape:
    """The cut that leaves fewest warps idle, one block a multiprocessor, or two where each has many tiles.

    Measured on an H200 with the 8B shapes and one row, in NF4: 8 warps for o (6.1 us, with two blocks 8.1),
    14 for down (15.5, with 4 warps 24), two blocks of 4 warps for gate and up (25.4, with one of 8 27.1).
    """
    many = tiles >= 4 * processors  # then two blocks that wait for their memory in turn are worth more
    choice = (_choice(reading, K, M, room // 2) if many else None) or _choice(reading, K, M, room)
    assert choice is not None, "max_rows allows no such call"
    one = cut(reading, K, M, tiles, processors, *choice)
    beside = 2 if many and 2 * one.shared_bytes <= room else 1
    return cut(reading, K, M, tiles, processors * beside, *choice)


@lru_cache(maxsize=1024)
def _choice(reading: Reading, K: int, M: int, room: int) -> tuple[int, int, int] | None:
    """Warps, loads and depth for a call; None if it does not fit into shared memory."""
    chunks, chunk_bytes = cdiv(K, reading.chunk), reading.chunk * reading.bits // 8
    best, choice = -1.0, None
    for warps in (14, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1):
        for loads in (16, 8, 4, 2, 1):
            for depth in (4, 3, 2):
                if loads * chunk_bytes > 256 or (depth > 2 and reading.bits < 16):
                    continue
                if cut(reading, K, M, 1, 1, warps, loads, depth).shared_bytes > room:
                    continue
                used = chunks / (cdiv(chunks, warps * loads) * warps * loads)
                score = used + 0.04 * warps * loads * chunk_bytes / 3584 + 0.005 * depth + 0.0005 * loads
                if score > best + 1e-9:
                    best, choice = score, (warps, loads, depth)
    return choice


def cut(
    reading: Reading, K: int, M: int, tiles: int, most_blocks: int, warps: int, loads: int, depth: int
) -> Shape:
    """The cut with so many warps, loads and stages."""
    chunks = cdiv(K, reading.chunk)
    rounds, rows = cdiv(chunks, warps * loads), 8 * cdiv(M, 8)
    sum_rows = 1 if M == 1 else rows
    table_bytes = 256 * 128 if reading.kind == 0 else 0
    fixed = table_bytes + (1024 if reading.scales == 2 else 0) + 2 * warps * 16 * sum_rows * 4
    fixed += warps * depth * _most_stage_bytes(reading, loads)
    x_at = cdiv(fixed + 4 * rows + 8 * warps + 16, 16) * 16
    full = rounds * warps * loads * reading.chunk == K
    blocks = min(tiles, most_blocks)
    return Shape(warps, loads, depth, rounds, blocks, x_at + M * _x_pitch(reading, K) + 256, full)


def _most_stage_bytes(reading: Reading, loads: int) -> int:
    """Bytes of a warp's stage: STAGE_BYTES of the source, scales read as one piece."""
    words = reading.values * reading.bits // 32
    row_bytes = loads * reading.chunk * reading.bits // 8
    pitch = row_bytes + (128 + 16 * words - row_bytes % 128) % 128
    scales = (0, 4, 1)[reading.scales] * loads * 16 + (64 if reading.scales == 2 else 0)
    return cdiv(16 * pitch + scales + (16 * loads if reading.zero_points else 0), 16) * 16


@lru_cache(maxsize=64)
def shared_bytes_of(device: torch.device) -> int:
    """Shared memory that one block may have."""
    if device.type != "cuda":
        return _SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@lru_cache(maxsize=64)
def has_warpgroups(device: torch.device) -> bool:
    """Whether a GPU has products of warpgroups: compute capability 9.0, and none after it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _device_of(weight: Packed | Tensor) -> torch.device:
    return weight.codes.device if isinstance(weight, Packed) else weight.device


def share_of(reading: Reading, K: int, warps: int) -> int:
    """How many times four dimensions a thread brings to shared memory; 0 if registers do not hold them."""
    share = cdiv(cdiv(K, reading.chunk) * reading.chunk, 4 * 32 * warps)
    return share if share <= _MOST_SHARE else 0


def vector_scales(reading: Reading, weights: Sequence[Packed | Tensor], shape: Shape) -> bool:
    """Whether scales of all chunks that a warp asks for at once can be read as one aligned piece.

    Each weight is (N_i, K).
    """
    if not reading.scales or reading.block_chunks > 1 or not shape.full or shape.loads % 4:
        return False
    scales = [w.parts["scales"] for w in weights if isinstance(w, Packed)]
    size = shape.loads if reading.scales == 2 else 16
    return all(s.shape[-1] % shape.loads == 0 and s.data_ptr() % size == 0 for s in scales) and (
        reading.scales == 1 or (1 << reading.scale_shift) % shape.loads == 0
    )


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
