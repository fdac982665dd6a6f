"""The CUDA lookup kernel: its own source, run on a CPU, equals the definition bit for bit; plans fit GPUs."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.kernels.stochastic import lookup
from fewbits.kernels.stochastic.codes import stochastic_codes_ref
from tests.kernels import emulated

FULL = Stochastic(chunk_d=128)
WHOLE = Stochastic(halve_bipolar_stoc_len=True, n_masks=64)
Triple = ctypes.c_int * 3
needs_compiler = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def run(
    libraries: Path, operands: tuple[Tensor, ...], options: Stochastic, levels, level_index=None, **how
) -> Tensor:
    """y by the kernel's source, with the plan that a small GPU would get; ``how`` changes it."""
    qa, sa, qb, sb = operands
    (B, N, D), M, C = qa.shape, qb.shape[1], sa.shape[2]
    chunk = min(options.chunk_d or D, D)
    tables = lookup.tables_of(options, tuple(levels), chunk, qa.device)
    assert tables is not None
    shared = how.pop("shared", 227 * 1024)
    multiprocessors = how.pop("multiprocessors", 8)
    plan = lookup.plan(B, N, M, C, chunk, multiprocessors=multiprocessors, shared=shared, wide=tables.wide)
    plan = replace(plan, threads=how.pop("threads", 64), **how)
    y = torch.full((B, N, M), torch.nan)
    argument, counts = lookup.product_of(lookup.Rows(qa, sa), (qb, sb), y, tables, level_index, plan, chunk)
    if counts is not None:
        counts.fill_(-(2**15))
    defines = plan.defines(tables, lookup.alignment(qb, chunk), lookup.Rows(qa, sa), y.dtype)
    library = emulated.build(libraries, lookup.SOURCE, "lookup_emulation.cpp", defines)
    library.run(ctypes.byref(argument), Triple(*plan.grid), plan.shared_bytes)
    add(library, plan, argument)
    return y


def add(library: ctypes.CDLL, plan: lookup.LookupTiling, argument: lookup.Product) -> None:
    """Run the kernel that adds the slices, where there are several."""
    if plan.combine is not None:
        name, *_, threads, shared, grid = plan.combine
        adding = {"stochastic_combine": library.combine, "stochastic_add_row": library.add_row}
        adding[name](ctypes.byref(argument), Triple(*grid), threads, shared)


def operands_of(options: Stochastic, B: int, N: int, M: int, D: int, *, shared_b: bool = False):
    a, b = torch.randn(B, N, D), torch.randn(1 if shared_b else B, M, D)
    a[0, 0] = b[0, 0] = 1.0  # all codes at their end: the largest counts there are
    if M > 1:
        b[0, 1] = -1.0
    return tuple(part for x in (a, b) for part in options.quantize(x).parts.values())


CASES = {
    "one row": (STOCHASTIC, (1, 1, 21, 300), (128,)),
    "two rows": (STOCHASTIC, (1, 2, 9, 256), (128,)),
    "rows beyond a block": (STOCHASTIC, (2, 5, 19, 300), (128,)),
    "full streams": (FULL, (1, 3, 10, 260), (256,)),
    "full streams, one row": (FULL, (1, 1, 10, 128), (256,)),
    "63 steps": (STOCHASTIC, (1, 3, 10, 132), (63,)),
    "31 steps": (STOCHASTIC, (1, 3, 10, 132), (31,)),
    "31 steps, one row": (STOCHASTIC, (1, 1, 10, 132), (31,)),
    "no chunks": (WHOLE, (2, 3, 10, 300), (128,)),
    "codes not aligned": (replace(STOCHASTIC, chunk_d=37), (1, 3, 10, 91), (100,)),
    "small chunks": (replace(STOCHASTIC, chunk_d=64), (1, 4, 10, 200), (128,)),
    "4 bits": (Stochastic(sc_prec=4, chunk_d=128), (1, 3, 10, 140), (16,)),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_the_source_gives_the_definition(libraries: Path, name: str) -> None:
    options, shape, levels = CASES[name]
    operands = operands_of(options, *shape)
    y = run(libraries, operands, options, levels)
    assert torch.equal(y, stochastic_codes_ref(*operands, options, levels))


@needs_compiler
@pytest.mark.parametrize("rows_shared", [(4, 227 * 1024), (3, 99 * 1024)])
@pytest.mark.parametrize("index_shape", [(1, 1, 3), (1, 6, 1), (2, 6, 3)])
def test_lengths_of_rows_and_chunks(libraries: Path, rows_shared, index_shape) -> None:
    levels = (128, 0, 17)
    operands = operands_of(STOCHASTIC, 2, 6, 11, 300, shared_b=True)
    index = torch.randint(0, 3, index_shape, dtype=torch.uint8)
    y = run(libraries, operands, STOCHASTIC, levels, index, shared=rows_shared[1])
    assert torch.equal(y, stochastic_codes_ref(*operands, STOCHASTIC, levels, index))


ROWS = {
    "halve": (STOCHASTIC, (1, 13, 37, 300), (128,)),
    "full": (FULL, (1, 9, 37, 300), (256,)),
    "one row, many tiles": (STOCHASTIC, (1, 1, 300, 400), (128,)),
    "many tiles": (STOCHASTIC, (1, 4, 230, 128), (128,)),
    "chunks beyond those summed at once": (replace(STOCHASTIC, chunk_d=16), (1, 1, 20, 2064), (128,)),
    "the same of four rows": (replace(STOCHASTIC, chunk_d=16), (1, 3, 20, 1040), (128,)),
    "40 steps": (STOCHASTIC, (2, 8, 20, 260), (40,)),
    "no chunks": (WHOLE, (2, 11, 20, 304), (128,)),
    "one slice": (WHOLE, (2, 5, 35, 128), (128,)),
    "one slice of few dimensions": (WHOLE, (2, 5, 35, 48), (128,)),
    "lengths": (STOCHASTIC, (2, 9, 20, 300), (128, 0, 17)),
}


@needs_compiler
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_several_blocks(libraries: Path, name: str) -> None:
    options, shape, levels = ROWS[name]
    operands = operands_of(options, *shape)
    index = None
    if len(levels) > 1:
        index = torch.randint(0, 3, (*shape[:2], 3), dtype=torch.uint8)
    y = run(libraries, operands, options, levels, index, multiprocessors=1)
    assert torch.equal(y, stochastic_codes_ref(*operands, options, levels, index))


ONE_ROW = {  # of blocks as a GPU has them; options, M, D, levels, multiprocessors
    "halve": (STOCHASTIC, 403, 400, (128,), 3),
    "a block has several chunks": (STOCHASTIC, 290, 1040, (128,), 2),
    "full streams": (FULL, 120, 640, (256,), 4),
    "lengths": (STOCHASTIC, 200, 656, (128, 0, 17), 4),
    "fewer tiles than warps": (STOCHASTIC, 17, 256, (40,), 8),
    "a tile": (replace(STOCHASTIC, chunk_d=32), 5, 160, (128,), 2),
}


@needs_compiler
@pytest.mark.parametrize("at_once", [None, 2])
@pytest.mark.parametrize("name", ONE_ROW)
def test_one_row(libraries: Path, name: str, at_once: int | None) -> None:
    """Rows of the tables staged, and a block that adds all of its chunks, or some at a time."""
    options, M, D, levels, multiprocessors = ONE_ROW[name]
    operands = operands_of(options, 1, 1, M, D)
    C = operands[1].shape[2]
    index = torch.randint(0, len(levels), (1, 1, C), dtype=torch.uint8) if len(levels) > 1 else None
    plan = lookup.plan(1, 1, M, C, options.chunk_d, multiprocessors=multiprocessors, shared=227 * 1024)
    assert plan.combine is not None and plan.combine.name == "stochastic_add_row" and plan.ring
    how = {"combine": plan.combine._replace(at_once=at_once)} if at_once else {}
    y = run(libraries, operands, options, levels, index, multiprocessors=multiprocessors, threads=256, **how)
    assert torch.equal(y, stochastic_codes_ref(*operands, options, levels, index))


@needs_compiler
@pytest.mark.parametrize(("options", "shared", "shared_b"), [(FULL, 227, False), (STOCHASTIC, 99, True)])
def test_one_row_of_each_entry(libraries: Path, options: Stochastic, shared: int, shared_b: bool) -> None:
    """Three blocks add for each, the last an odd number of outputs; a smaller GPU has no ring."""
    levels = (options.streams.length, 17)
    operands = operands_of(options, 3, 1, 75, 400, shared_b=shared_b)
    index = torch.randint(0, 2, (3, 1, 4), dtype=torch.uint8)
    plan = lookup.plan(3, 1, 75, 4, 128, multiprocessors=8, shared=shared * 1024, wide=options is FULL)
    assert plan.combine is not None and plan.combine.grid == (3, 3, 1) and plan.ring == (shared == 227)
    y = run(libraries, operands, options, levels, index, shared=shared * 1024, threads=256)
    assert torch.equal(y, stochastic_codes_ref(*operands, options, levels, index))


class Emulated:
    """Stands for the driver: a kernel is its library's function, a launch runs it."""

    def __init__(self, folder: Path):
        self.folder, self.launches = folder, []

    def kernel(self, source: str, name: str, defines, device, shared_bytes: int, *, beside: bool):
        return name, emulated.build(self.folder, source, "lookup_emulation.cpp", defines)

    def launch(self, handle, grid, threads: int, shared_bytes: int, argument, *, early: bool) -> None:
        assert early
        name, library = handle
        self.launches.append((name, grid))
        if name == "stochastic_lookup":
            library.run(ctypes.byref(argument), Triple(*grid), shared_bytes)
        elif name == "stochastic_add_row":
            library.add_row(ctypes.byref(argument), Triple(*grid), threads, shared_bytes)
        else:
            library.combine(ctypes.byref(argument), Triple(*grid), threads, shared_bytes)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "B", "workspace", "launches"),
    [
        ("all at once", 2, 2**26, 2),
        ("entry by entry", 2, 3 * 6 * 32, 4),
        ("rows of an entry", 1, 3 * 8 * 32, 4),
    ],
)
def test_launches_cover_the_product(
    libraries: Path, monkeypatch: pytest.MonkeyPatch, name: str, B: int, workspace: int, launches: int
) -> None:
    """The launches of a GPU that is not there, each run by the kernel's own source."""
    from fewbits.device import Device

    gpu = Device(
        type="cuda",
        name="",
        memory_bytes=0,
        capability=(9, 0),
        multiprocessors=132,
        shared_memory_bytes=227 * 1024,
    )
    driver, N = Emulated(libraries), 13 if name == "rows of an entry" else 6
    monkeypatch.setattr(lookup, "describe", lambda device: gpu)
    monkeypatch.setattr(lookup, "nvrtc", driver)
    monkeypatch.setattr(lookup, "_WORKSPACE", workspace)
    operands, levels = operands_of(STOCHASTIC, B, N, 20, 300), (128, 17)
    index = torch.randint(0, 2, (B, N, 3), dtype=torch.uint8)
    tables = lookup.tables_of(STOCHASTIC, levels, 128, torch.device("cpu"))
    y = torch.full((B, N, 20), torch.nan)
    lookup.launch(operands, tables, index, 128, y)
    assert torch.equal(y, stochastic_codes_ref(*operands, STOCHASTIC, levels, index))
    assert len(driver.launches) == launches, driver.launches


@pytest.mark.parametrize("shared", [99, 163, 227])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 2048])
@pytest.mark.parametrize(("M", "D"), [(14336, 4096), (4096, 14336), (8192, 28672), (1024, 128)])
def test_plans_cover_all_outputs(shared: int, rows: int, M: int, D: int) -> None:
    chunks = D // 128
    plan = lookup.plan(1, rows, M, chunks, 128, multiprocessors=132, shared=shared * 1024)
    splits = plan.splits
    assert plan.items == plan.row_groups * splits * chunks >= plan.grid[0]
    assert plan.row_groups * plan.rows >= rows > (plan.row_groups - 1) * plan.rows
    assert splits * plan.outputs >= M > (splits - 1) * plan.outputs
    assert plan.shared_bytes <= shared * 1024 and plan.grid[1:] == (1, 1)
    if (
        rows == 1 and plan.combine is not None
    ):  # beside the blocks that look up, at least where they have a ring
        _, at_once, own, *_, bytes_of_block, grid = plan.combine
        resident = plan.grid[0] // 132 + (plan.grid[0] % 132 > 0)
        assert own * grid[0] >= M and 1 <= at_once <= chunks
        assert bytes_of_block + resident * (plan.shared_bytes + 1024) <= shared * 1024 or at_once == 1


def test_blocks_that_add_need_not_ask_for_shared_memory() -> None:
    for chunks in range(1, 400):
        for rows in (1, 2, 3, 16):
            for chunk in (128, 256):
                plan = lookup.plan(1, rows, 4096, chunks, chunk, multiprocessors=132, shared=227 * 1024)
                if plan.combine is not None and plan.combine.name == "stochastic_combine":
                    assert plan.combine.shared_bytes + 2048 <= 48 * 1024
                    assert plan.combine.at_once <= plan.combine.threads // 32 * 8


@pytest.mark.parametrize("options", [STOCHASTIC, FULL, STOCHASTIC.with_length(32)])
def test_tables_are_counts(options: Stochastic) -> None:
    from fewbits.formats.streams import product_tables

    tables = lookup.tables_of(options, (options.streams.length,), 128, torch.device("cpu"))
    assert tables is not None
    masks = tuple(dict.fromkeys(options.masks(128)))
    counts = product_tables(options.streams, masks, torch.device("cpu"))
    line = torch.arange(128) * tables.slopes[0, ..., None]
    assert torch.equal(tables.bytes[0].int() - 128 // tables.added + line, counts.int())
    assert tables.bytes.min() >= 1  # 256 less a byte is a byte


@pytest.mark.parametrize(
    "capability",
    [90, *(pytest.param(sm, marks=pytest.mark.nightly) for sm in (80, 89, 100, 120))],
)
def test_compiles_to_machine_code(capability: int) -> None:
    """By NVRTC, without a GPU; as for a decode step of 8 rows at 128 steps."""
    from fewbits.kernels.launch import nvrtc

    if nvrtc.missing():
        pytest.skip(str(nvrtc.missing()))
    tables = lookup.tables_of(STOCHASTIC, (128,), 128, torch.device("cpu"))
    assert tables is not None
    for N, shared in ((1, 99), (1, 227), (8, 99), (8, 227)):
        plan = lookup.plan(1, N, 4096, 32, 128, multiprocessors=132, shared=shared * 1024)
        for dtype in (torch.int8, torch.bfloat16):
            rows = lookup.Rows(torch.empty(1, N, 4096, dtype=dtype), torch.empty(1, N, 32))
            defines = plan.defines(tables, 16, rows, torch.bfloat16)
            assert nvrtc.cubin(lookup.SOURCE, defines, capability)[:4] == b"\x7fELF"
