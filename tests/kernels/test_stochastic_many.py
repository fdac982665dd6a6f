"""The CUDA kernels for many rows, by lookups and bits: their source, run on a CPU, equals the definition."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fewbits.device import Device, describe
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.kernels.stochastic import bits, choice, lookup, many, nibbles, row_blocks
from fewbits.kernels.stochastic.codes import stochastic_codes, stochastic_codes_ref
from tests.kernels import emulated
from tests.kernels.test_stochastic_lookup import operands_of

FULL = Stochastic(chunk_d=128)
WHOLE = Stochastic(halve_bipolar_stoc_len=True, n_masks=64)
Triple = ctypes.c_int * 3
needs_compiler = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


class Emulated:
    """Stands for the driver: a launch runs the kernel's source."""

    def __init__(self, folder: Path):
        self.folder, self.launches = folder, []

    def kernel(self, source: str, name: str, defines, device, shared_bytes: int):
        wrapper = Path(source).stem + "_emulation.cpp"
        return name, emulated.build(self.folder, source, wrapper, defines)

    def launch(self, handle, grid, threads: int, shared_bytes: int, argument) -> None:
        name, library = handle
        self.launches.append((name, grid))
        library.run(ctypes.byref(argument), name.encode(), Triple(*grid), threads, shared_bytes)


@pytest.fixture
def driver(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Emulated:
    gpu = Device(
        type="cuda",
        name="",
        memory_bytes=0,
        capability=(9, 0),
        multiprocessors=1,
        shared_memory_bytes=227 * 1024,
    )
    driver = Emulated(libraries)
    for module in (row_blocks, bits):
        monkeypatch.setattr(module, "nvrtc", driver)
    for module in (many, nibbles):
        monkeypatch.setattr(module, "describe", lambda device: gpu)
    monkeypatch.setattr(many, "plan", partial(many.plan, threads=64))
    monkeypatch.setattr(nibbles, "plan", partial(nibbles.plan, shapes={(128, 8): 2, (128, 4): 1}))
    # What a kernel does not write must not look right.
    new = torch.empty
    monkeypatch.setattr(many.torch, "empty", lambda *args, **kwargs: new(*args, **kwargs).fill_(77))
    return driver


def run(operands: tuple[Tensor, ...], options: Stochastic, levels, level_index=None) -> Tensor:
    qa, _sa, qb, _sb = operands
    chunk = min(options.chunk_d or qa.shape[2], qa.shape[2])
    tables = lookup.tables_of(options, tuple(levels), chunk, qa.device)
    assert tables is not None
    y = torch.full((*qa.shape[:2], qb.shape[1]), torch.nan)
    many.launch(operands, tables, level_index, chunk, y)
    return y


CASES = {
    "halve": (STOCHASTIC, (1, 18, 37, 260), (128,)),
    "full": (FULL, (1, 16, 37, 140), (256,)),
    "32 steps": (STOCHASTIC, (1, 5, 80, 128), (32,)),
    "no chunks": (WHOLE, (2, 17, 20, 150), (128,)),
    "codes not aligned": (replace(STOCHASTIC, chunk_d=37), (1, 3, 10, 91), (100,)),
    "lengths": (STOCHASTIC, (2, 17, 20, 300), (128, 0, 17)),
    "4 bits": (Stochastic(sc_prec=4, chunk_d=128), (1, 3, 10, 140), (16,)),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_the_source_gives_the_definition(driver: Emulated, name: str) -> None:
    options, shape, levels = CASES[name]
    operands = operands_of(options, *shape)
    index = torch.randint(0, 3, (*shape[:2], 3), dtype=torch.uint8) if len(levels) > 1 else None
    y = run(operands, options, levels, index)
    assert torch.equal(y, stochastic_codes_ref(*operands, options, levels, index))


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_tables_of_4_bits_give_the_definition(driver: Emulated, name: str) -> None:
    options, shape, levels = CASES[name]
    operands = operands_of(options, *shape)
    index = torch.randint(0, 3, (*shape[:2], 3), dtype=torch.uint8) if len(levels) > 1 else None
    chunk = min(options.chunk_d or shape[3], shape[3])
    tables = nibbles.tables_of(options, levels, chunk, torch.device("cpu"))
    assert tables is not None
    y = torch.full(shape[:3], torch.nan)
    nibbles.launch(operands, tables, index, chunk, y)
    assert torch.equal(y, stochastic_codes_ref(*operands, options, levels, index))


@needs_compiler
@pytest.mark.parametrize("shared_b", [False, True])
def test_tables_of_b_give_the_definition(driver: Emulated, shared_b: bool) -> None:
    operands = operands_of(WHOLE, 2, 70, 37, 150, shared_b=shared_b)
    tables = nibbles.tables_of(WHOLE, (128,), 150, torch.device("cpu"), of_b=True)
    assert tables is not None
    y = torch.full((2, 70, 37), torch.nan)
    nibbles.launch_swapped(operands, tables, None, 150, y)
    assert torch.equal(y, stochastic_codes_ref(*operands, WHOLE, (128,)))


BITS = {
    "32 steps": (STOCHASTIC, (1, 5, 140, 140), (32,)),
    "31 steps of full streams": (FULL, (1, 130, 9, 64), (31,)),
    "64 steps": (STOCHASTIC, (1, 9, 20, 140), (64,)),
    "33 steps, no chunks": (WHOLE, (2, 17, 20, 150), (33,)),
    "16 steps, codes not aligned": (replace(STOCHASTIC, chunk_d=37), (1, 3, 10, 91), (16,)),
    "lengths": (STOCHASTIC, (2, 17, 20, 300), (32, 0, 17)),
    "short lengths": (STOCHASTIC, (2, 17, 20, 300), (16, 0, 7)),
    "8 steps, an odd chunk": (replace(STOCHASTIC, chunk_d=37), (1, 140, 10, 91), (8,)),
    "1 step of full streams": (FULL, (1, 5, 20, 131), (1,)),
    "4 bits": (Stochastic(sc_prec=4, chunk_d=128), (1, 3, 10, 140), (16,)),
    "128 steps": (WHOLE, (1, 3, 10, 40), (128,)),
    "256 steps": (FULL, (1, 3, 10, 20), (256,)),
}


@needs_compiler
@pytest.mark.parametrize("name", BITS)
def test_bits_give_the_definition(driver: Emulated, name: str) -> None:
    options, shape, levels = BITS[name]
    operands = operands_of(options, *shape)
    index = torch.randint(0, 3, (*shape[:2], 3), dtype=torch.uint8) if len(levels) > 1 else None
    chunk = min(options.chunk_d or shape[3], shape[3])
    tables = bits.tables_of(options, levels, chunk, torch.device("cpu"))
    y = torch.full(shape[:3], torch.nan)
    bits.launch(operands, tables, index, chunk, y)
    assert torch.equal(y, stochastic_codes_ref(*operands, options, levels, index))


@needs_compiler
@pytest.mark.parametrize("module", [many, bits])
def test_parts_are_the_whole(driver: Emulated, monkeypatch: pytest.MonkeyPatch, module) -> None:
    monkeypatch.setattr(bits if module is bits else row_blocks, "_WORKSPACE_BYTES", 1)
    operands, levels = operands_of(STOCHASTIC, 1, 130 if module is bits else 33, 130, 64), (32,)
    tables = (bits if module is bits else lookup).tables_of(STOCHASTIC, levels, 64, torch.device("cpu"))
    y = torch.full((1, operands[0].shape[1], 130), torch.nan)
    module.launch(operands, tables, None, 64, y)
    assert torch.equal(y, stochastic_codes_ref(*operands, STOCHASTIC, levels))
    assert len(driver.launches) == (4 if module is bits else 3) * 3


@pytest.mark.parametrize("workspace", [1, 2**20, 2**23, 2**30])
@pytest.mark.parametrize(("B", "B_b", "N", "M"), [(1, 1, 2048, 1000), (6, 6, 300, 400), (5, 1, 40, 700)])
def test_parts_cover_each_value_once(monkeypatch: pytest.MonkeyPatch, workspace: int, B, B_b, N, M) -> None:
    monkeypatch.setattr(bits, "_WORKSPACE_BYTES", workspace)
    monkeypatch.setattr(row_blocks, "_WORKSPACE_BYTES", workspace)
    by_bits, by_tables = torch.zeros(B, N, M), torch.zeros(B, N)
    for part in bits._parts(B, N, B_b, M, 4):
        by_bits[part.batch, part.rows, part.outputs] += 1
    for batch, rows in row_blocks.fitting(B, N, 16, many.ROWS):
        by_tables[batch, rows] += 1
    assert (by_bits == 1).all() and (by_tables == 1).all()


def gpu_of(shared: int, capability: tuple[int, int] = (9, 0)) -> Device:
    return Device(
        type="cuda",
        name="",
        memory_bytes=0,
        capability=capability,
        multiprocessors=132,
        shared_memory_bytes=shared,
    )


@pytest.mark.parametrize(
    ("sizes", "longest", "name", "before"),
    [
        ((1, 16, 14336, 4096), 32, "few rows", "few rows"),
        ((1, 32, 4096, 14336), 128, "few rows", "few rows"),
        ((1, 64, 14336, 4096), 128, "wide bits", "few rows"),
        ((1, 128, 4096, 14336), 128, "wide bits", "few rows"),
        ((1, 2048, 14336, 4096), 32, "wide bits", "bits"),
        ((1, 2048, 14336, 4096), 64, "wide bits", "32 rows"),
        ((1, 2048, 14336, 4096), 128, "wide bits", "32 rows"),
        ((1, 2048, 4096, 14336), 256, "32 rows", "32 rows"),
        ((1, 2048, 14336, 4096), 0, "32 rows", "32 rows"),
        ((1, 2048, 14336, 4100), 64, "32 rows", "32 rows"),
        ((8, 8192, 2048, 128), 128, "wide bits", "32 rows"),
        ((8, 8192, 128, 2048), 128, "wide bits of b", "32 rows of b"),
    ],
)
def test_the_kernels_of_a_product(sizes, longest: int, name: str, before: str) -> None:
    """Those that were the quickest when all were measured; on older GPUs; where shared memory is small."""
    chunked = choice.Sizes(*sizes, min(128, sizes[3]) if sizes[0] == 1 else sizes[3])
    assert choice.ways(chunked, longest, gpu_of(227 * 1024))[0].name == name
    assert choice.ways(chunked, longest, gpu_of(227 * 1024, (8, 0)))[0].name == before
    assert [way.name for way in choice.ways(chunked, longest, gpu_of(64 * 1024))] == ["few rows"]


@pytest.mark.slow
def test_counts_that_do_not_fit_take_the_next_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Independent numbers are too far from straight lines for 4 bits, and the choice says so."""
    monkeypatch.setattr(choice, "describe", lambda device: gpu_of(227 * 1024, (8, 0)))
    sizes, cpu = choice.Sizes(1, 2048, 14336, 4096, 128), torch.device("cpu")
    chosen = choice.choose(sizes, STOCHASTIC, (128,), cpu, mixed=False)
    assert (chosen.way.name, chosen.reason) == ("32 rows", "")
    chosen = choice.choose(sizes, replace(STOCHASTIC, sequence="random"), (128,), cpu, mixed=False)
    assert chosen.way.name == "16 rows"
    assert (
        chosen.reason
        == "counts lie too far from straight lines, or chunks are too long, for tables of 4 bits"
    )


@pytest.mark.parametrize("of_b", [False, True])
@pytest.mark.parametrize("scramble", ["bitrev", "counter", "random", "off"])
def test_sobol_counts_fit_4_bits(scramble: str, of_b: bool) -> None:
    """At any length, but for some from 199 to 255 in b's tables: a line of four slopes leaves 8 values."""
    for options, longest in ((STOCHASTIC, 128), (FULL, 190 if of_b else 256)):
        options = replace(options, scramble=scramble)
        for length in (0, 1, int(torch.randint(2, longest, ())), longest):
            tables = nibbles.tables_of(options, (length,), 128, torch.device("cpu"), of_b=of_b)
            assert tables is not None


@pytest.mark.parametrize(
    "capability",
    [90, *(pytest.param(sm, marks=pytest.mark.nightly) for sm in (80, 100))],
)
def test_compiles_to_machine_code(capability: int) -> None:
    """By NVRTC, without a GPU, where shared memory holds a block."""
    from fewbits.kernels.launch import nvrtc

    if nvrtc.missing():
        pytest.skip(str(nvrtc.missing()))
    tables = lookup.tables_of(STOCHASTIC, (128,), 128, torch.device("cpu"))
    assert tables is not None
    plan = many.plan(1, 2048, 4096, 32, 128, multiprocessors=132)
    assert nvrtc.cubin(many.SOURCE, plan.defines(tables), capability)[:4] == b"\x7fELF"
    for shared in (227 * 1024, 163 * 1024, 99 * 1024):
        small = nibbles.plan(1, 2048, 4096, 32, 128, multiprocessors=132, shared=shared)
        assert nvrtc.cubin(nibbles.SOURCE, small.defines, capability)[:4] == b"\x7fELF"
    for share in (1, 2, 4):
        assert nvrtc.cubin(bits.SOURCE, bits.defines_of(1, share), capability)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_gpu_every_way_is_exact(name: str) -> None:
    """All kernels that many rows may take, whatever the estimate, at the cases' shapes and larger ones."""
    options, (B, N, M, D), levels = CASES[name]
    for shape in ((B, N, M, D), (B, 130, 1100, 700)):
        operands = operands_of(options, *shape)
        on_gpu = [x.cuda().contiguous() for x in operands]
        index = torch.randint(0, 3, (*shape[:2], operands[1].shape[2]), dtype=torch.uint8)
        mixed = len(levels) > 1
        want = stochastic_codes(*operands, options, levels, index if mixed else None)
        chunk = options.chunk_size(shape[3])
        sizes = choice.Sizes(*shape, chunk)
        for way in choice.ways(sizes._replace(rows=2048), max(levels), describe(on_gpu[0].device)):
            tables = way.tables_of(options, levels, chunk, on_gpu[0].device)
            if tables is None or (way.one_length and mixed):
                continue
            y = torch.full(want.shape, torch.nan, device="cuda")
            way.launch(on_gpu, tables, index.cuda() if mixed else None, chunk, y)
            assert torch.equal(y.cpu(), want), way.name
