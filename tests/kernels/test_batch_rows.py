"""Products of a batch's rows: the CUDA kernels' sources on a CPU in every cut, machine code, a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.kernels.generation.batch_cut import Cut, cut_batch, cut_of, cut_wide
from fewbits.kernels.generation.batch_rows import (
    MOST_ROWS,
    SOURCE,
    SOURCE_OF_X,
    BatchRows,
    Workspace,
)
from fewbits.kernels.generation.cut import Work, reading_of
from fewbits.kernels.launch import nvrtc
from tests.kernels import emulated
from tests.kernels.test_few_rows import READ, Problem, error, needs_gxx, weight_of, with_marks

ROOM = 227 * 1024


def run(problem: Problem, folder: Path, cut: Cut | None = None) -> BatchRows:
    """Both kernels' sources on a CPU, twice with the same workspace."""
    call = BatchRows(problem.product(), cut=cut)
    order = emulated.build(folder, SOURCE_OF_X, "batch_rows_emulation.cpp", call.defines_of_x)
    multiply = emulated.build(folder, call.source, "batch_rows_emulation.cpp", call.defines)
    before, blocks = problem.out.clone(), -(-problem.product().all_tiles // call.cut.block_tiles)
    results = []
    for _ in range(2):
        problem.out.copy_(before)
        order.run(ctypes.byref(call.argument_of_x), call.blocks_of_x, 1, call.shared_of_x)
        multiply.run(ctypes.byref(call.argument), blocks, call.cut.split, call.cut.shared_bytes)
        results.append(problem.out.clone())
    assert torch.equal(*results)
    return call


def tolerance(problem: Problem) -> float:
    """Beside few_rows' roundings those of scales and of weights times scales, and of the output."""
    return 2 * problem.tolerance + (2.0**-8 if problem.out.dtype == torch.bfloat16 else 0.0)


@needs_gxx
@pytest.mark.parametrize("name", with_marks(READ))
def test_every_format_gives_the_definition(tmp_path: Path, name: str) -> None:
    problem = Problem(name, 11, 256, (40,), norm=True)
    run(problem, tmp_path)
    assert error(problem.out, problem.exact) < tolerance(problem)


CALLS: list[tuple[str, int, int, tuple[int, ...], dict[str, Any]]] = [
    ("nf4_dq", 16, 512, (16, 24, 8), {"norm": True, "biases": True, "rank": 4}),
    ("nf4", 3, 320, (24, 24), {"norm": True, "activation": "silu", "out": torch.bfloat16}),
    ("int4_g64_zp", 40, 192, (12, 12), {"activation": "gelu_tanh", "rank": 8}),
    ("int8", 9, 80, (33,), {"add": True, "x": torch.bfloat16}),
    ("float8_e4m3_row", 64, 48, (16,), {"x": torch.bfloat16, "size": 1e-6}),
    ("nf4_dq", 24, 512, (16,), {"size": 1e6}),
    ("bfloat16", 17, 40, (18, 18), {"activation": "gelu"}),
    ("nf4_dq", 8, 512, (16, 24, 8), {"norm": True, "biases": True, "inner": 8}),
    ("nf4", 3, 320, (24, 24), {"norm": True, "activation": "silu", "inner": 5, "out": torch.bfloat16}),
]


@needs_gxx
@pytest.mark.parametrize(("name", "M", "K", "N", "what"), CALLS)
def test_rows_and_what_stands_around_them(
    tmp_path: Path, name: str, M: int, K: int, N: tuple[int, ...], what: dict[str, Any]
) -> None:
    problem = Problem(name, M, K, N, **what)
    run(problem, tmp_path)
    assert error(problem.out, problem.exact) < tolerance(problem)


@needs_gxx
@pytest.mark.parametrize(
    ("tiles", "neighbours", "slices", "split", "stage_chunks", "ahead"),
    [(2, 3, 1, 2, 1, 2), (1, 2, 2, 1, 2, 1), (2, 1, 1, 4, 1, 4), (1, 1, 4, 2, 1, 2)],
)
def test_every_cut_gives_the_definition(
    tmp_path: Path, tiles: int, neighbours: int, slices: int, split: int, stage_chunks: int, ahead: int
) -> None:
    """Also where parts reach beyond K, and where a block's last tiles are not there."""
    problem = Problem("nf4_dq", 9, 704, (70,), add=True)
    reading = reading_of(problem.weights[0])
    assert reading is not None
    cut = cut_batch(
        Work(reading, 704, 9, 5, 4, ROOM),
        tiles=tiles,
        neighbours=neighbours,
        slices=slices,
        split=split,
        stage_chunks=stage_chunks,
        ahead=ahead,
    )
    assert cut is not None and cut.chunks * 128 >= 704
    run(problem, tmp_path, cut)
    assert error(problem.out, problem.exact) < tolerance(problem)


def wide_cut_of(problem: Problem, **cut: int) -> Cut:
    """A cut for the tensor cores of warpgroups, as its arguments say."""
    product = problem.product()
    reading = reading_of(problem.weights[0])
    assert reading is not None
    M, K = product.x.shape
    found = cut_wide(Work(reading, K, M, product.all_tiles, 4, ROOM), **{"tiles": 1, "neighbours": 4, **cut})
    assert found is not None and found.wide
    return found


@needs_gxx
@pytest.mark.parametrize("name", with_marks(READ))
def test_every_format_gives_the_definition_by_warpgroups(tmp_path: Path, name: str) -> None:
    problem = Problem(name, 11, 256, (70,), norm=True)
    run(problem, tmp_path, wide_cut_of(problem, slices=1, split=1, stage_chunks=1, depth=2, ring=3))
    assert error(problem.out, problem.exact) < tolerance(problem)


WIDE_CALLS: list[tuple[str, int, int, tuple[int, ...], dict[str, Any], dict[str, int]] | Any] = [
    ("nf4_dq", 64, 1024, (64,), {"add": True}, {"slices": 1, "split": 1, "depth": 3, "stage_chunks": 2}),
    pytest.param(
        "nf4_dq",
        9,
        1280,
        (70,),
        {"add": True},
        {"slices": 1, "split": 3, "depth": 3, "stage_chunks": 1},
        marks=pytest.mark.slow,
    ),
    ("nf4", 3, 320, (24, 24), {"norm": True, "activation": "silu"}, {"slices": 2, "split": 1}),
    pytest.param(
        "int4_g64_zp",
        20,
        512,
        (40, 40),
        {"activation": "gelu_tanh", "rank": 8},
        {"slices": 1, "split": 1},
        marks=pytest.mark.slow,
    ),
    ("int4_g64", 17, 704, (80, 16), {"out": torch.bfloat16}, {"slices": 1, "split": 1, "ring": 2}),
    pytest.param(
        "int8",
        9,
        800,
        (33,),
        {"add": True, "x": torch.bfloat16},
        {"slices": 2, "split": 2},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "float8_e4m3_row",
        64,
        512,
        (80,),
        {"x": torch.bfloat16, "size": 1e-6},
        {"slices": 1, "split": 1},
        marks=pytest.mark.slow,
    ),
    ("bfloat16", 17, 360, (72, 72), {"activation": "gelu"}, {"slices": 1, "split": 1, "tiles": 2}),
    pytest.param(
        "nf4_dq",
        16,
        512,
        (16, 24, 8),
        {"norm": True, "biases": True},
        {"slices": 1, "split": 2},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "nf4_dq",
        40,
        512,
        (36,),
        {"out": torch.bfloat16},
        {"slices": 1, "split": 2, "stage_chunks": 1},
        marks=pytest.mark.slow,
    ),
]


@needs_gxx
@pytest.mark.parametrize(("name", "M", "K", "N", "what", "cut"), WIDE_CALLS)
def test_rows_by_warpgroups_and_what_stands_around_them(
    tmp_path: Path, name: str, M: int, K: int, N: tuple[int, ...], what: dict[str, Any], cut: dict[str, int]
) -> None:
    """Sums straight from registers, through slices and through several blocks; rings of several depths."""
    problem = Problem(name, M, K, N, **what)
    run(problem, tmp_path, wide_cut_of(problem, **cut))
    assert error(problem.out, problem.exact) < tolerance(problem)


@pytest.mark.parametrize("name", ["nf4_dq", "int8_g64", "bfloat16"])
def test_cuts_of_real_sizes_fit(name: str) -> None:
    for K in (1024, 4096, 14336, 28672):
        reading = reading_of(weight_of(name, 16, K))
        assert reading is not None
        for M in (2, 9, 16, 33, 64):
            for tiles in (64, 256, 384, 1792, 8016):
                for warpgroups in (False, True):
                    work = Work(reading, K, M, tiles, 132, ROOM, warpgroups)
                    cut = cut_of(work)
                    assert cut is not None and cut.shared_bytes <= ROOM and cut.groups * 8 >= M
                    assert cut.chunks * work.chunk >= K and (warpgroups or not cut.wide)


def test_many_rows_of_a_wide_product_take_warpgroups() -> None:
    """Where they were a third faster than mma.sync; a small product of few rows was faster without them."""
    reading = reading_of(weight_of("nf4_dq", 16, 4096))
    assert reading is not None
    many, few = (
        cut_of(Work(reading, 4096, 64, 1792, 132, ROOM, True)),
        cut_of(Work(reading, 4096, 8, 256, 132, ROOM, True)),
    )
    assert many is not None and many.wide and many.neighbours == 16
    assert few is not None and not few.wide


def test_calls_share_a_workspace_and_refuse_too_many_rows() -> None:
    space, problem = Workspace(torch.device("cpu")), Problem("nf4", 5, 128, (24,))
    first = BatchRows(problem.product(), space)
    assert BatchRows(problem.product(), space).argument.p.x == first.argument.p.x
    assert error(first.launch(), problem.exact) < 1e-5
    too_many = replace(problem.product(), x=torch.randn(MOST_ROWS + 1, 128))
    with pytest.raises(BadInput, match="takes 1 to 64"):
        BatchRows(too_many)


@pytest.mark.skipif(nvrtc.missing() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("name", ["nf4_dq", "int4_g64_zp", "int8", "bfloat16"])
def test_warpgroups_compile_to_machine_code(name: str) -> None:
    for M in (8, 64) if name == "nf4_dq" else (24,):
        problem = Problem(name, M, 1024, (64, 64), norm=True, activation="silu")
        call = BatchRows(problem.product(), cut=wide_cut_of(problem, slices=1, split=1, depth=3), early=True)
        assert nvrtc.cubin(call.source, call.defines, 90)[:4] == b"\x7fELF"


@pytest.mark.skipif(nvrtc.missing() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles_to_machine_code(capability: int) -> None:
    problem = Problem("nf4_dq", 40, 4096, (64, 64), norm=True, activation="silu")
    call = BatchRows(problem.product())
    for source, defines in ((SOURCE, call.defines), (SOURCE_OF_X, call.defines_of_x)):
        for_gpu = tuple((dict(defines) | {"EARLY": int(capability >= 90)}).items())
        assert nvrtc.cubin(source, for_gpu, capability)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize(
    ("M", "K", "N", "what"),
    [
        (16, 256, (64,), {"norm": True}),
        (4, 1024, (40, 40), {"activation": "silu", "rank": 16}),
        (23, 2176, (130,), {"add": True}),
        (64, 4096, (512, 128, 128), {"norm": True, "biases": True}),
        (33, 14336, (256,), {"add": True, "x": torch.bfloat16}),
        (8, 4096, (512, 128, 128), {"norm": True, "inner": 16}),
    ],
)
def test_on_a_gpu(name: str, M: int, K: int, N: tuple[int, ...], what: dict[str, Any]) -> None:
    if name == "float16" and what.get("x") == torch.bfloat16:
        pytest.skip("two kinds of 16 bits")
    problem = Problem(name, M, K, N, device="cuda", **what)
    before, call = problem.out.clone(), BatchRows(problem.product())
    first = call.launch().clone()
    problem.out.copy_(before)
    assert torch.equal(call.launch(), first)
    assert error(first, problem.exact) < tolerance(problem)


@pytest.mark.gpu
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize(
    ("M", "N", "K", "slices", "split"), [(64, 256, 1024, 1, 1), (23, 130, 2176, 2, 2), (8, 72, 512, 1, 4)]
)
def test_warpgroups_on_a_gpu(name: str, M: int, N: int, K: int, slices: int, split: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("products of warpgroups are of compute capability 9.0 alone")
    problem = Problem(name, M, K, (N,), device="cuda", add=True)
    before = problem.out.clone()
    call = BatchRows(problem.product(), cut=wide_cut_of(problem, slices=slices, split=split, stage_chunks=1))
    first = call.launch().clone()
    problem.out.copy_(before)
    assert torch.equal(call.launch(), first)
    assert error(first, problem.exact) < tolerance(problem)
