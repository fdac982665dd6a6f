"""The kernel whose x stays in registers: its source on a CPU in every cut, what it takes, and a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fewbits.formats.base import Packed
from fewbits.kernels.generation.columns import Columns, columns_of, cut_columns
from fewbits.kernels.generation.cut import Work, reading_of
from fewbits.kernels.launch.jit import cdiv, next_power_of_2
from tests.kernels import emulated
from tests.kernels.test_few_rows import READ, Problem, error, needs_gxx, weight_of, with_marks

ROOM = 227 * 1024
PACKED = [name for name in READ if "float16" not in name]


def cut_of(problem: Problem) -> Columns:
    """The cut that is chosen where there are many tiles."""
    reading, (M, K) = reading_of(problem.weights[0]), problem.x.shape
    gated = problem.options["activation"] is not None
    tiles = (
        cdiv(problem.weights[0].shape[0], 8) if gated else sum(cdiv(w.shape[0], 16) for w in problem.weights)
    )
    assert reading is not None
    chosen = columns_of(Work(reading, K, min(M, 2), 4000, 4, ROOM))
    assert chosen is not None
    if M > 2:  # what the kernel can do, and is never asked for
        rows, of_set = next_power_of_2(M), 8 // (chosen.cols * next_power_of_2(M))
        sets = cdiv(K // (4 * chosen.values), of_set)
        wide = cut_columns(Work(reading, K, M, 4000, 4, ROOM), slices=cdiv(sets, 2), teams=1, sets=2)
        assert wide is not None and wide.rows == rows
        chosen = wide
    return replace(chosen, blocks=min(2, cdiv(tiles, chosen.teams)))


def run(problem: Problem, folder: Path, shape: Columns | None = None) -> Columns:
    """The kernel's source on a CPU; how the call was cut."""
    call = problem.call(shape=shape or cut_of(problem))
    assert isinstance(call.shape, Columns)
    library = emulated.build(folder, call.source, "few_rows_emulation.cpp", call.defines)
    library.run(ctypes.byref(call.argument), call.shape.blocks, call.shape.shared_bytes)
    return call.shape


@needs_gxx
@pytest.mark.parametrize("name", with_marks(PACKED))
def test_every_format_gives_the_definition(tmp_path: Path, name: str) -> None:
    problem = Problem(name, 1, 1024, (40,), norm=True)
    run(problem, tmp_path)
    assert error(problem.out, problem.exact) < problem.tolerance


CALLS: list[tuple[str, int, int, tuple[int, ...], dict[str, Any]]] = [
    ("nf4_dq", 1, 1536, (16, 24, 8), {"norm": True, "biases": True, "rank": 4}),
    ("nf4", 1, 512, (24, 24), {"norm": True, "activation": "silu", "out": torch.bfloat16}),
    ("nf4_dq", 3, 1024, (36,), {"add": True, "x": torch.bfloat16}),
    ("int4_g128", 5, 512, (12, 12), {"activation": "gelu_tanh", "rank": 8}),
    ("int4_g64_zp", 2, 1024, (20,), {"norm": True}),
    ("int4_g32", 2, 640, (20,), {}),
    ("int8", 8, 320, (33,), {"add": True, "x": torch.bfloat16}),
    ("int8_g128_zp", 1, 1280, (33,), {"norm": True}),
    ("float8_e4m3_row", 7, 192, (16,), {"x": torch.bfloat16, "size": 1e-6}),
    ("float8_e4m3_128x128", 1, 384, (200,), {"norm": True}),
    ("nf4_dq", 1, 512, (16,), {"size": 1e6}),
]


@needs_gxx
@pytest.mark.parametrize(("name", "M", "K", "N", "what"), CALLS)
def test_rows_and_what_stands_around_them(
    tmp_path: Path, name: str, M: int, K: int, N: tuple[int, ...], what: dict[str, Any]
) -> None:
    problem = Problem(name, M, K, N, **what)
    run(problem, tmp_path)
    rounding = 2.0**-8 if problem.out.dtype == torch.bfloat16 else 0.0
    assert error(problem.out, problem.exact) < problem.tolerance + rounding


@needs_gxx
@pytest.mark.parametrize(
    ("slices", "teams", "sets", "ahead", "blocks"),
    [(1, 1, 2, 4, 1), (2, 2, 1, 2, 2), (3, 1, 1, 4, 3), (1, 3, 2, 8, 2), (2, 1, 1, 1, 9)],
)
def test_every_cut_gives_the_definition(
    tmp_path: Path, slices: int, teams: int, sets: int, ahead: int, blocks: int
) -> None:
    """Also where slices reach beyond K, a team has no tile left, and a block has several."""
    problem = Problem("nf4_dq", 1, 896, (118,), norm=True)
    reading = reading_of(problem.weights[0])
    assert reading is not None
    shape = cut_columns(
        Work(reading, 896, 1, 8, 1, ROOM),
        slices=slices,
        teams=teams,
        sets=sets,
        ahead=ahead,
        most_blocks=blocks,
    )
    assert shape is not None
    run(problem, tmp_path, shape)
    assert error(problem.out, problem.exact) < problem.tolerance


def test_what_is_taken() -> None:
    for name in PACKED:
        for K in (1024, 2560, 4096, 5120, 8192, 14336):
            reading = reading_of(weight_of(name, 16, K))
            assert reading is not None
            shape = columns_of(Work(reading, K, 1, 1792, 132, ROOM))
            if shape is None:  # blocks so small that registers do not hold x
                assert name == "int4_g32" and K > 8192
                continue
            chunks = shape.sets * (8 // (shape.cols * shape.rows))
            assert shape.shared_bytes <= ROOM and shape.warps <= 16
            assert shape.slices * chunks * 4 * shape.values >= K and chunks % shape.ahead == 0


def test_what_is_left_to_the_other_kernel() -> None:
    nf4, bf16 = reading_of(weight_of("nf4", 16, 4096)), reading_of(weight_of("bfloat16", 16, 4096))
    assert nf4 is not None and bf16 is not None
    assert columns_of(Work(nf4, 4096, 1, 1792, 132, ROOM)) is not None
    assert columns_of(Work(nf4, 4096, 1, 256, 132, ROOM)) is None  # few tiles
    assert columns_of(Work(bf16, 4096, 1, 1792, 132, ROOM)) is None
    assert columns_of(Work(nf4, 4096, 3, 1792, 132, ROOM)) is None
    assert columns_of(Work(nf4, 4096 + 64, 1, 1792, 132, ROOM)) is None  # half a chunk
    assert columns_of(Work(nf4, 4096, 1, 1792, 132, 64 * 1024)) is None  # no room for the table


def test_a_packed_weight_is_read_in_pieces_of_16_bytes() -> None:
    for name in PACKED:
        weight = weight_of(name, 8, 1024)
        assert isinstance(weight, Packed)
        shape = cut_of(Problem(name, 1, 1024, (8,)))
        bytes_a_value = weight.codes.shape[-1] * weight.codes.element_size() / 1024
        assert shape.values * bytes_a_value == 16


def test_a_call_with_many_outputs_takes_it() -> None:
    call = Problem("nf4_dq", 1, 512, (512,)).call()  # a CPU passes for a small GPU
    assert isinstance(call.shape, Columns) and call.source == "generation/columns.cu"
    assert Problem("nf4_dq", 1, 512, (64,)).call().source == "generation/few_rows.cu"


@pytest.mark.gpu
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("M", [1, 2])
def test_on_a_gpu(name: str, M: int) -> None:
    problem = Problem(name, M, 2048, (5504, 5504), device="cuda", norm=True, activation="silu", rank=8)
    call = problem.call()
    assert isinstance(call.shape, Columns)
    first = call.launch().clone()
    assert torch.equal(problem.call().launch(), first)
    assert error(first, problem.exact) < problem.tolerance
