"""The CUDA kernel that multiplies streams by warpgroups: its source, run on a CPU, equals the definition."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fewbits.device import Device, describe
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.formats.streams import product_tables
from fewbits.kernels.stochastic import wide_bits, wide_lengths
from fewbits.kernels.stochastic.codes import stochastic_codes, stochastic_codes_ref
from tests.kernels import emulated
from tests.kernels.test_stochastic_lookup import operands_of
from tests.kernels.test_stochastic_many import Emulated

FULL = Stochastic(chunk_d=128)
WHOLE = Stochastic(halve_bipolar_stoc_len=True, n_masks=64)
H200 = Device(
    type="cuda",
    name="",
    memory_bytes=0,
    capability=(9, 0),
    multiprocessors=132,
    shared_memory_bytes=227 * 1024,
)
needs_compiler = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
CASES = {
    "128 steps": (STOCHASTIC, (1, 37, 140, 144), (128,)),
    "100 steps of full streams": (FULL.with_length(100), (1, 3, 9, 80), (100,)),
    "64 steps": (STOCHASTIC, (1, 9, 70, 272), (64,)),
    "33 steps, no chunks, a batch": (WHOLE, (2, 17, 20, 160), (33,)),
    "32 steps": (STOCHASTIC, (1, 40, 20, 256), (32,)),
    "16 steps": (replace(STOCHASTIC, chunk_d=48), (1, 3, 10, 112), (16,)),
    "7 steps": (STOCHASTIC, (1, 5, 20, 144), (7,)),
    "lengths": (STOCHASTIC, (2, 17, 20, 272), (128, 0, 17)),
    "short lengths": (STOCHASTIC, (2, 17, 20, 272), (16, 0, 7)),
    "4 bits": (Stochastic(sc_prec=4, chunk_d=128), (1, 3, 10, 144), (16,)),
    "no scramble": (replace(STOCHASTIC, scramble="off"), (1, 3, 10, 64), (50,)),
    "another sequence": (replace(STOCHASTIC, sequence="lfsr"), (1, 3, 10, 64), (31,)),
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def driver(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Emulated:
    driver = Emulated(libraries)
    monkeypatch.setattr(wide_bits, "nvrtc", driver)
    for module in (wide_bits, wide_lengths):
        monkeypatch.setattr(module, "describe", lambda device: H200)
    monkeypatch.setattr(wide_bits, "plan", partial(wide_bits.plan, columns=32))
    new = torch.empty  # what a kernel does not write must not look right
    monkeypatch.setattr(wide_bits.torch, "empty", lambda *args, **kwargs: new(*args, **kwargs).fill_(77))
    return driver


def run(operands: tuple[Tensor, ...], options: Stochastic, levels, index) -> Tensor:
    qa, _sa, qb, _sb = operands
    chunk = min(options.chunk_d or qa.shape[2], qa.shape[2])
    tables = wide_bits.tables_of(options, levels, chunk, qa.device)
    assert tables is not None
    y = torch.full((*qa.shape[:2], qb.shape[1]), torch.nan)
    wide_bits.launch(operands, tables, index, chunk, y)
    return y


def extreme(operands: tuple[Tensor, ...], largest: int) -> tuple[Tensor, ...]:
    """Some codes replaced by the largest of either sign, and by 0."""
    qa, sa, qb, sb = operands
    for q in (qa, qb):
        which = torch.rand(q.shape)
        q[which < 0.2] = largest
        q[(which >= 0.2) & (which < 0.4)] = -largest
        q[(which >= 0.4) & (which < 0.5)] = 0
    return qa, sa, qb, sb


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_the_source_gives_the_definition(driver: Emulated, name: str) -> None:
    options, shape, levels = CASES[name]
    operands = extreme(operands_of(options, *shape), options.max_code)
    C = operands[1].shape[2]
    index = torch.randint(0, 3, (*shape[:2], C), dtype=torch.uint8) if len(levels) > 1 else None
    y = run(operands, options, levels, index)
    assert torch.equal(y, stochastic_codes_ref(*operands, options, levels, index))


@needs_compiler
@pytest.mark.parametrize("columns", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_wider_blocks_give_the_definition(driver: Emulated, monkeypatch, columns: int) -> None:
    monkeypatch.setattr(wide_bits, "plan", partial(wide_bits.plan.func, columns=columns))
    operands = operands_of(STOCHASTIC, 1, columns + 3, 70, 64)
    y = run(operands, STOCHASTIC, (32,), None)
    assert torch.equal(y, stochastic_codes_ref(*operands, STOCHASTIC, (32,)))


@needs_compiler
@pytest.mark.parametrize("shared_b", [False, True])
def test_tables_of_b_give_the_definition(driver: Emulated, shared_b: bool) -> None:
    for length, inner in ((128, 80), (20, 144)):
        operands = extreme(operands_of(WHOLE, 2, 70, 37, inner, shared_b=shared_b), WHOLE.max_code)
        tables = wide_bits.tables_of_b(WHOLE, (length,), inner, torch.device("cpu"))
        assert tables is not None
        y = torch.full((2, 70, 37), torch.nan)
        wide_bits.launch_swapped(operands, tables, None, inner, y)
        assert torch.equal(y, stochastic_codes_ref(*operands, WHOLE, (length,)))


@needs_compiler
@pytest.mark.parametrize(("of_chunks", "shared_b"), [(True, False), (False, True)])
def test_tables_of_b_have_lengths_of_rows(driver: Emulated, of_chunks: bool, shared_b: bool) -> None:
    operands = extreme(operands_of(STOCHASTIC, 2, 70, 37, 272, shared_b=shared_b), STOCHASTIC.max_code)
    for levels in ((128, 0, 40), (9, 16)):
        index = torch.randint(0, len(levels), (2, 70, 3 if of_chunks else 1), dtype=torch.uint8)
        for chosen in (index, index[:1], None):
            tables = wide_bits.tables_of_b(STOCHASTIC, levels, 128, torch.device("cpu"))
            y = torch.full((2, 70, 37), torch.nan)
            wide_bits.launch_swapped(operands, tables, chosen, 128, y)
            assert torch.equal(y, stochastic_codes_ref(*operands, STOCHASTIC, levels, chosen))


@needs_compiler
@pytest.mark.parametrize("shared_b", [False, True])
def test_parts_are_the_whole(driver: Emulated, monkeypatch: pytest.MonkeyPatch, shared_b: bool) -> None:
    monkeypatch.setattr(wide_bits, "_WORKSPACE_BYTES", 1)
    operands = operands_of(STOCHASTIC, 2, 40, 20, 64, shared_b=shared_b)
    y = run(operands, STOCHASTIC, (32,), None)
    assert torch.equal(y, stochastic_codes_ref(*operands, STOCHASTIC, (32,)))
    assert [name for name, _ in driver.launches].count("stochastic_wide_bits") == 4


# Levels as a caller gives them, and the shape of what tells each row's.
LENGTHS = {
    "four groups": ((128, 96, 40, 20, 6), (2, 70, 1)),
    "rows alike in a batch": ((16, 0, 128), (1, 70, 1)),
    "chunks of their own": ((64, 9), (2, 70, 3)),
    "one for all rows": ((64, 9), (1, 1, 1)),
    "the first": ((9, 64), None),
    "one group": ((25, 0, 32), (2, 70, 1)),
}


@pytest.fixture
def always_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_lengths, "is_quicker", lambda sizes, widths, gpu: True)


@needs_compiler
@pytest.mark.parametrize("name", LENGTHS)
def test_rows_in_the_order_of_their_lengths_give_the_definition(
    driver: Emulated, always_apart: None, name: str
) -> None:
    levels, shape = LENGTHS[name]
    operands = extreme(operands_of(STOCHASTIC, 2, 70, 20, 272), STOCHASTIC.max_code)
    index = None if shape is None else torch.randint(0, len(levels), shape, dtype=torch.uint8)
    tables = wide_lengths.tables_of(STOCHASTIC, levels, 128, torch.device("cpu"))
    assert tables is not None
    y = torch.full((2, 70, 20), torch.nan)
    wide_lengths.launch(operands, tables, index, 128, y)
    assert torch.equal(y, stochastic_codes_ref(*operands, STOCHASTIC, levels, index))
    groups = 4 if "four" in name else 2 if "alike" in name else 1
    assert [kernel for kernel, _ in driver.launches].count("stochastic_wide_bits") == groups


@needs_compiler
def test_lengths_in_parts_are_the_whole(
    driver: Emulated, always_apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide_bits, "_WORKSPACE_BYTES", 1)
    operands = operands_of(STOCHASTIC, 2, 40, 20, 64)
    index = torch.randint(0, 2, (2, 40, 1), dtype=torch.uint8)
    tables = wide_lengths.tables_of(STOCHASTIC, (8, 40), 64, torch.device("cpu"))
    y = torch.full((2, 40, 20), torch.nan)
    wide_lengths.launch(operands, tables, index, 64, y)
    assert torch.equal(y, stochastic_codes_ref(*operands, STOCHASTIC, (8, 40), index))


def test_when_rows_are_ordered() -> None:
    """Where it was quicker on an H200 (28 November 2026), if lengths are as often."""
    gate = wide_bits.WideSizes(1, 2048, 14336, 32, 128, 128)
    scores = wide_bits.WideSizes(8, 8192, 2048, 1, 128, 64)
    few = wide_bits.WideSizes(1, 256, 1024, 32, 128, 128)
    assert wide_lengths.is_quicker(gate, (32, 64, 128), H200)
    assert not wide_lengths.is_quicker(gate, (128,), H200)
    assert not wide_lengths.is_quicker(scores, (32, 64), H200)
    assert not wide_lengths.is_quicker(few, (32, 64, 128), H200)


@pytest.mark.parametrize("of_b", [False, True])
def test_one_product_of_bits_and_two_of_bytes_count_with_signs(of_b: bool) -> None:
    """Of all pairs of signed codes, from the tables alone, for options and lengths drawn at random."""
    for _ in range(20):
        prec, scramble = int(torch.randint(4, 9, ())), ("bitrev", "counter", "off")[int(torch.randint(3, ()))]
        halve = bool(torch.rand(()) < 0.6)
        length = int(torch.randint(1, min(128, 2 ** (prec - halve)) + 1, ()))
        options = Stochastic(sc_prec=prec, halve_bipolar_stoc_len=halve, scramble=scramble).with_length(
            length
        )
        tables = wide_bits.tables_of(options, (length,), 16, torch.device("cpu"), of_b=of_b)
        assert tables is not None
        mask = options.masks(16)[0]
        counts = product_tables(options.streams, (mask,), torch.device("cpu"))[0].long()
        counts = counts.mT if of_b else counts
        width = 32 * tables.words // tables.share
        codes = torch.arange(-options.max_code, options.max_code + 1)
        s, size, sign = (codes < 0).long(), codes.abs(), codes.sign()
        bits = (tables.words_a[0, 0][..., None] >> torch.arange(32) & 1).flatten(1)[size, :width].long()
        x = bits ^ s[:, None]
        z = tables.ones_b[0, 0].long()[size] * sign
        t, w = (z < 0).long(), z.abs() + (z.abs() >= tables.skip)
        y = (torch.arange(width) < w[:, None]).long() ^ t[:, None]
        k = -64 if width == 128 else 0
        g, h = x.sum(1) + k * s, torch.where(t == 1, -w - k, w)
        assert (-g).min() >= -128 and (-g).max() <= 127
        signed = x @ y.mT - g[:, None] * t - s[:, None] * h
        assert torch.equal(signed, counts[size][:, size] * sign[:, None] * sign)


def test_what_has_no_tables() -> None:
    cpu = torch.device("cpu")
    assert wide_bits.tables_of(FULL, (256,), 128, cpu) is None
    assert not wide_bits.fits((10, 0), 128, 32) and not wide_bits.fits((9, 0), 100, 32)
    assert wide_bits.fits((9, 0), 112, 128) and not wide_bits.fits((9, 0), 112, 129)
    assert wide_bits.tables_of(STOCHASTIC, (32,), 37, cpu) is None
    assert wide_bits.tables_of(STOCHASTIC, (0,), 128, cpu) is None
    assert wide_lengths.tables_of(STOCHASTIC, (0,), 128, cpu) is None
    assert wide_lengths.tables_of(FULL, (256, 9), 128, cpu) is None
    assert wide_bits.tables_of(replace(STOCHASTIC, gate="and"), (32,), 128, cpu) is None


def test_compiles_to_machine_code() -> None:
    """By NVRTC, without a GPU; what lies in shared memory fits it."""
    from fewbits.kernels.launch import nvrtc

    if nvrtc.missing():
        pytest.skip(str(nvrtc.missing()))
    for longest, columns in ((8, 32), (64, 64), (128, 128)):
        how = wide_bits.plan(wide_bits.WideSizes(1, 2048, 4096, 32, 128, longest), H200, columns)
        assert how.depth >= 2 and how.shared_bytes <= 227 * 1024
        defines = (*how.defines, ("LEVELS_OF_B", int(longest == 64)))
        assert nvrtc.cubin(wide_bits.SOURCE, defines, 90)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_gpu_gives_the_definition(name: str) -> None:
    if describe(torch.device("cuda", 0)).capability != wide_bits.CAPABILITY:
        pytest.skip("needs compute capability 9.0")
    options, (B, N, M, D), levels = CASES[name]
    for shape in ((B, N, M, D), (B, 300, 1100, 1040)):
        operands = extreme(operands_of(options, *shape), options.max_code)
        index = torch.randint(0, 3, (*shape[:2], operands[1].shape[2]), dtype=torch.uint8)
        chosen = index if len(levels) > 1 else None
        want = stochastic_codes(*operands, options, levels, chosen)
        chunk = options.chunk_size(shape[3])
        tables = wide_bits.tables_of(options, levels, chunk, torch.device("cuda", 0))
        assert tables is not None
        y = torch.full(want.shape, torch.nan, device="cuda")
        on_gpu = [x.cuda().contiguous() for x in operands]
        on_device = None if chosen is None else chosen.cuda()
        wide_bits.launch(on_gpu, tables, on_device, chunk, y)
        assert torch.equal(y.cpu(), want)
        of_b = wide_bits.tables_of_b(options, levels, chunk, torch.device("cuda", 0))
        if of_b is not None:
            wide_bits.launch_swapped(on_gpu, of_b, on_device, chunk, y.fill_(torch.nan))
            assert torch.equal(y.cpu(), want)
