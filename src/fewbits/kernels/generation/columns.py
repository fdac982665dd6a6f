"""How columns.cu cuts a product of one or two rows, where it takes it; few_rows.py prepares the call.

No arithmetic and no launch: what follows from shapes and formats alone, so that it can be tested anywhere.
The kernel's columns and sets are explained at the head of its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from fewbits.formats.base import Packed
from fewbits.kernels.generation.cut import Reading, Work
from fewbits.kernels.launch.jit import cdiv, next_power_of_2

SOURCE = "generation/columns.cu"
_COLUMNS = 8  # of the second operand of a product on tensor cores
_MOST_ROWS = 2  # with four rows few_rows.cu is faster: 26.8 us for gate and up of the 8B shape, here 33.6
_MOST_WARPS = 16
_MOST_APART = 15  # warps that need not wait for one another: barriers of a block
_MOST_X_REGISTERS = 32  # of a thread, for its share of x
# Tiles for each multiprocessor from which this kernel is worth its registers, which keep blocks of the next
# kernel from asking for their weights early. A step of the 8B shape in NF4 on an H200: without this kernel
# 2.380 ms, with it for gate and up 2.295, for all four products 2.387.
_FEWEST_TILES = 4
_MOST_SHARE = 8  # four dimensions in registers of a thread, while x is brought


@dataclass(frozen=True)
class Columns:
    """How a call is cut.

    Attributes:
        values: weights of one output that a lane reads at once: 16 bytes.
        cols: blocks with a scale of their own in a chunk (of 4 * values dimensions).
        rows: columns for each block: a power of two, at least the rows of x.
        slices: warps that share a tile of outputs, each with a part of the inner dimension.
        teams: of so many warps, in a block.
        sets: of 8 columns that a warp has.
        ahead: chunks that are asked for before they are used.
        block_chunks: chunks that share a scale.
        whole: the slices are all of K, no more.
        blocks: of threads.
        shared_bytes: of a block.
        share: how many times four dimensions of x a thread brings; 0 if registers do not hold them.
    """

    values: int
    cols: int
    rows: int
    slices: int
    teams: int
    sets: int
    ahead: int
    block_chunks: int
    whole: bool
    blocks: int
    shared_bytes: int
    share: int

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.slices * self.teams


@lru_cache(maxsize=1024)
def columns_of(work: Work) -> Columns | None:
    """The cut of a product; None where the kernel does not take it, or where the other one is faster."""
    if work.reading.kind >= 5 or work.K % work.chunk or work.tiles < _FEWEST_TILES * work.processors:
        return None
    rows = next_power_of_2(work.M)
    if rows > _MOST_ROWS or work.cols * rows > _COLUMNS:
        return None
    sets = cdiv(work.K // work.chunk, _COLUMNS // (work.cols * rows))
    most_sets = _MOST_X_REGISTERS // (work.values // 2)
    each = next((n for n in range(1, most_sets + 1) if cdiv(sets, n) <= _MOST_WARPS // 2), most_sets)
    slices = cdiv(sets, each)
    if slices > _MOST_WARPS:
        return None
    teams = max(1, min(_MOST_WARPS // 2 // slices, cdiv(work.tiles, work.processors)))
    return cut_columns(work, slices=slices, teams=teams, sets=each)


def cut_columns(
    work: Work, *, slices: int, teams: int, sets: int, ahead: int = 2, most_blocks: int | None = None
) -> Columns | None:
    """The cut with so many slices, teams and sets; None if a block's shared memory does not hold it."""
    reading, K, M = work.reading, work.K, work.M
    rows, warps = next_power_of_2(M), slices * teams
    chunks = sets * (_COLUMNS // (work.cols * rows))
    ahead = next(n for n in range(min(ahead, chunks), 0, -1) if chunks % n == 0)
    table = 256 * 256 if reading.kind == 0 else 0
    x_at = cdiv(table + (1024 if reading.scales == 2 else 0) + 4 * rows + 8 * warps + 16, 16) * 16
    slots = 2 * slices if warps <= _MOST_APART else 2
    x_bytes, sums_bytes = M * (cdiv(2 * K, 128) * 128 + 32), slots * warps * 16 * rows * 4
    shared_bytes = x_at + max(x_bytes, sums_bytes) + 256
    if shared_bytes > work.room:
        return None
    many = work.tiles >= 4 * work.processors * teams
    beside = 2 if many and warps <= _MOST_WARPS // 2 and 2 * shared_bytes <= work.room else 1
    share = cdiv(K, 4 * 32 * warps)
    return Columns(
        values=work.values,
        cols=work.cols,
        rows=rows,
        slices=slices,
        teams=teams,
        sets=sets,
        ahead=ahead,
        block_chunks=max(1, work.block // work.chunk) if reading.scales else 1,
        whole=slices * chunks * work.chunk == K,
        blocks=min(cdiv(work.tiles, teams), most_blocks or beside * work.processors),
        shared_bytes=shared_bytes,
        share=share if share <= _MOST_SHARE else 0,
    )


def read_in_pairs(reading: Reading, weights: Sequence[Packed | Tensor], cut: Columns) -> bool:
    """Whether a lane's two scales of weights (N, K) lie side by side, for one aligned read."""
    if not reading.scales or cut.rows > 1 or cut.block_chunks > 1 or not cut.whole:
        return False
    scales = [w.parts["scales"] for w in weights if isinstance(w, Packed)]
    size = 2 * scales[0].element_size()
    return all(s.shape[-1] % 2 == 0 and s.data_ptr() % size == 0 for s in scales)


def follow_each_other(reading: Reading, weights: Sequence[Packed | Tensor], gated: bool) -> bool:
    """Whether a tile of weights (N, K) is found from the one before: one matrix, or two if gated."""
    alone = len(weights) == (2 if gated else 1)
    return alone and reading.block_shift == 0 and weights[0].shape[0] % (8 if gated else 16) == 0


def macros_of(reading: Reading, cut: Columns, *, pairs: bool, simple: bool) -> tuple[tuple[str, int], ...]:
    """The macros that say how weights are read and how the work is cut."""
    return (
        ("KIND", reading.kind),
        ("VALUES", cut.values),
        ("SCALES", reading.scales),
        ("ZERO_POINTS", int(reading.zero_points)),
        ("SHARE", cut.share),
        ("SLICES", cut.slices),
        ("TEAMS", cut.teams),
        ("SETS", cut.sets),
        ("AHEAD", cut.ahead),
        ("MC", cut.rows),
        ("COLS", cut.cols),
        ("WHOLE", int(cut.whole)),
        ("PAIRS", int(pairs)),
        ("SIMPLE", int(simple)),
    )
