"""How many programs a launch has, and which tile each of them takes.

A grid's first axis has room for 2**31 - 1 programs, the other two for 65,535 each: one long row, a million
rows or a large batch pass that. So tiles of matrices lie on the first axis alone; what cannot is refused.
"""

from __future__ import annotations

from operator import gt

from fewbits.errors import Unsupported
from fewbits.kernels.launch.jit import cdiv, jit, tl

MAX_PROGRAMS = (2**31 - 1, 65535, 65535)  # of a grid's three axes, on every GPU


def check_grid(grid: tuple[int, ...], what: str) -> None:
    """Refuse a grid that no GPU takes: the driver says "invalid argument", and of it names nothing.

    Raises:
        Unsupported: an axis of ``grid`` is longer than `MAX_PROGRAMS`.
    """
    if any(map(gt, grid, MAX_PROGRAMS)):
        raise Unsupported(
            f"{what} needs {' x '.join(map(str, grid))} programs, and a GPU starts at most 65,535 along the "
            "last two axes: cut the tensor into parts."
        )


def programs(rows: int, columns: int, block_rows: int, block_columns: int) -> tuple[int]:
    """The grid of a matrix's tiles, of which `split_program` tells a program its own."""
    return (cdiv(rows, block_rows) * cdiv(columns, block_columns),)


@jit
def split_program(row_tiles):
    """The place of this program's tile, rows and columns, among ``row_tiles`` rows of tiles."""
    program = tl.program_id(0)
    return program % row_tiles, program // row_tiles
