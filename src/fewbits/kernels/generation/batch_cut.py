"""How a call of batch_rows.py is cut into blocks, warps and stages, for either of its kernels.

No arithmetic and no launch: what follows from shapes, formats and the GPU alone, so that it can be tested
anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fewbits.kernels.generation.cut import Work
from fewbits.kernels.launch.jit import cdiv

_BYTES_OF_SUMS = 8 * 20 * 4  # of 16 outputs and 8 rows of x, with what keeps banks apart
_FEWEST_WIDE = 3  # chunks of weights in a ring, and stages of x, that keep the memory busy


@dataclass(frozen=True)
class Cut:
    """How a call is cut.

    Attributes:
        groups: of 8 rows of x.
        wide: four neighbours multiply together (warpgroup.cu).
        tiles: of 16 outputs, that a warp has.
        neighbours: warps of a block with other outputs.
        slices: warps of a block with other parts of K.
        split: blocks with other parts of K.
        stage_chunks: of a slice in a stage of x.
        depth: stages of x that shared memory has.
        stages: of a block.
        ahead: chunks of weights that a warp asks for at once, before it uses those before; of a wide cut,
            that its ring in shared memory holds.
        whole: the parts are all of K, no more.
        shared_bytes: of a block.
    """

    groups: int
    wide: bool
    tiles: int
    neighbours: int
    slices: int
    split: int
    stage_chunks: int
    depth: int
    stages: int
    ahead: int
    whole: bool
    shared_bytes: int

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.neighbours * self.slices

    @property
    def block_tiles(self) -> int:
        """Tiles of 16 outputs of a block."""
        return self.tiles * self.neighbours

    @property
    def chunks(self) -> int:
        """Of all parts together."""
        return self.split * self.stages * self.slices * self.stage_chunks


def cut_batch(
    work: Work, *, tiles: int, neighbours: int, slices: int, split: int, stage_chunks: int = 0, ahead: int = 2
) -> Cut | None:
    """The cut with so many tiles, warps and parts; None if a block's shared memory does not hold it."""
    groups = cdiv(work.M, 8)
    x_at, sums = _fixed_bytes(work, groups), slices * tiles * neighbours * groups * _BYTES_OF_SUMS
    room = work.room - x_at
    for per_stage in (stage_chunks,) if stage_chunks else (4, 2, 1):
        stages = cdiv(cdiv(work.K, work.chunk), split * slices * per_stage)
        of_stage = slices * per_stage * groups * 16 * work.chunk
        depth = max(2, min(stages, 4, room // of_stage))
        if depth * of_stage <= room and (depth > 2 or stages <= 2 or per_stage == 1) and sums <= room:
            whole = split * stages * slices * per_stage * work.chunk == work.K
            parts = (tiles, neighbours, slices, split, per_stage, depth, stages, ahead, whole)
            return Cut(groups, False, *parts, x_at + max(depth * of_stage, sums))
    return None


def cut_wide(
    work: Work,
    *,
    tiles: int,
    neighbours: int,
    slices: int,
    split: int,
    stage_chunks: int = 0,
    depth: int = 0,
    ring: int = 0,
) -> Cut | None:
    """The same for wide_rows.cu; ``depth`` and ``ring``: 0: what there is room for."""
    groups = 1 << (cdiv(work.M, 8) - 1).bit_length()
    x_at, sums = _fixed_bytes(work, groups), slices * tiles * neighbours * groups * _BYTES_OF_SUMS
    room, slot = work.room - x_at, 1024 * tiles * neighbours * slices
    for per_stage in (stage_chunks,) if stage_chunks else (4, 2, 1):
        stages = cdiv(cdiv(work.K, work.chunk), split * slices * per_stage)
        of_stage = slices * per_stage * groups * 16 * work.chunk
        for stages_there in (depth,) if depth else (4, 3):
            slots = ring or min((room - stages_there * of_stage) // slot, 8, max(2, stages * per_stage + 1))
            used = stages_there * of_stage + slots * slot
            if slots >= 2 and used <= room and sums <= room and (ring or slots >= 4 or per_stage == 1):
                whole = split * stages * slices * per_stage * work.chunk == work.K
                parts = (tiles, neighbours, slices, split, per_stage, stages_there, stages, slots, whole)
                return Cut(groups, True, *parts, x_at + max(used, sums))
    return None


def _fixed_bytes(work: Work, groups: int) -> int:
    """Of shared memory before x: X_AT of batch_parts.cu."""
    table = 256 * 256 if work.reading.kind == 0 else 0
    fixed = table + (1024 if work.reading.scales == 2 else 0) + 32 * groups + 16 + 64
    return cdiv(fixed, 128) * 128


# Warps of a block whose registers hold their sums, by groups of 8 rows of x.
_MOST_WARPS = {1: 16, 2: 16, 3: 12, 4: 12}
_MOST_WARPS_OF_MANY_ROWS = 8


def _cuts(work: Work) -> Iterator[Cut]:
    most_warps = _MOST_WARPS.get(cdiv(work.M, 8), _MOST_WARPS_OF_MANY_ROWS)
    for tiles in (2, 1):
        for neighbours in (8, 7, 6, 5, 4, 3, 2, 1):
            for slices in (1, 2, 4, 8):
                for split in (1, 2, 4, 8):
                    if neighbours * slices > most_warps:
                        continue
                    cut = cut_batch(work, tiles=tiles, neighbours=neighbours, slices=slices, split=split)
                    if cut is not None:
                        yield cut


def _wide_cuts(work: Work) -> Iterator[Cut]:
    for neighbours, slices in ((16, 1), (12, 1), (8, 2), (8, 1), (4, 4), (4, 3), (4, 2), (4, 1)):
        for split in (1, 2, 4, 8):
            for stage_chunks, depth in ((4, 4), (2, 3), (2, 4), (1, 3), (1, 4)):
                cut = cut_wide(
                    work,
                    tiles=1,
                    neighbours=neighbours,
                    slices=slices,
                    split=split,
                    stage_chunks=stage_chunks,
                    depth=depth,
                )
                if cut is not None and min(cut.ahead, cut.stages) >= _FEWEST_WIDE:
                    yield cut


def cost_of(work: Work, cut: Cut) -> float:
    """An estimate of a call's time, in microseconds, that ranks cuts.

    Sums of what a block does, times the blocks that a multiprocessor has after each other: chunks that its
    warps walk through, bytes of weights and of x, a meeting of blocks that share outputs, sums of slices. The
    factors are least squares over 1,092 cuts of the 8B shape's four products with 8 to 64 rows on an H200, 23
    November 2026. The cut of the least estimate was within 10 % of the fastest in 38 of 40 cases, each kernel
    by itself; 25 % slower for the product with 14,336 inputs and 16 rows.
    """
    block_tiles, groups, warps = cut.block_tiles, cut.groups, cut.warps
    turns = cdiv(cdiv(work.tiles, block_tiles) * cut.split, work.processors)
    inner = cut.chunks // cut.split * work.chunk
    weights = turns * block_tiles * 16 * inner * work.reading.bits / 8 / 1024
    x = turns * 16 * groups * inner / 1024
    walk = turns * inner / cut.slices / 128
    shared, sums = block_tiles * groups * (1 + cut.split), cut.slices * block_tiles * groups
    if cut.wide:
        meeting = 4.63 + 0.013 * shared if cut.split > 1 else 0.0
        walking = walk * (0.159 + 0.0418 * warps * cut.tiles) + 0.11 * turns * cut.stages
        return 1.1 + walking + 0.0126 * weights + 0.0134 * x + meeting + 0.023 * sums
    meeting = 1.74 + 0.0242 * shared if cut.split > 1 else 0.0
    walking = walk * (0.0285 + 0.0426 * warps * cut.tiles + 0.0864 * groups)
    reading = 0.0161 * weights + (0.0097 + 0.0007 * cut.neighbours) * x
    return 2.96 + walking + reading + meeting + 0.0067 * sums


@lru_cache(maxsize=1024)
def cut_of(work: Work) -> Cut | None:
    """The cut of least estimated time; None if shared memory holds none."""
    cuts = [*_cuts(work), *(_wide_cuts(work) if work.warpgroups else ())]
    return min(cuts, key=lambda cut: cost_of(work, cut), default=None)
