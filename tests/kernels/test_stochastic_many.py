"""The CUDA kernels for many rows, by lookups and bits: their source, run on a CPU, equals the definition."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fewbits.device import Device
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.kernels import _stochastic_bits as bits
from fewbits.kernels import _stochastic_lookup as lookup
from fewbits.kernels import _stochastic_many as many
from fewbits.kernels.stochastic_codes import stochastic_codes_ref
from kernels import emulated
from kernels.test_stochastic_lookup import operands_of

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
        wrapper = source.removeprefix("_stochastic_").removesuffix(".cu") + "_emulation.cpp"
        return name, emulated.build(self.folder, source, wrapper, defines)

    def launch(self, handle, grid, threads: int, shared_bytes: int, argument) -> None:
        name, library = handle
        self.launches.append((name, grid))
        library.run(ctypes.byref(argument), name.encode(), Triple(*grid), threads, shared_bytes)


@pytest.fixture
def driver(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Emulated:
    gpu = Device(
        type="cuda", name="", memory_bytes=0, capability=(9, 0),
        multiprocessors=1, shared_memory_bytes=227 * 1024,
    )  # fmt: skip
    driver, plan = Emulated(libraries), many.plan
    monkeypatch.setattr(many, "describe", lambda device: gpu)
    for module in (many, bits):
        monkeypatch.setattr(module, "_nvrtc", driver)
    monkeypatch.setattr(many, "plan", lambda *args, **kwargs: plan(*args, **kwargs, threads=64))
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


BITS = {
    "32 steps": (STOCHASTIC, (1, 5, 140, 140), (32,)),
    "31 steps of full streams": (FULL, (1, 130, 9, 64), (31,)),
    "64 steps": (STOCHASTIC, (1, 9, 20, 140), (64,)),
    "33 steps, no chunks": (WHOLE, (2, 17, 20, 150), (33,)),
    "16 steps, codes not aligned": (replace(STOCHASTIC, chunk_d=37), (1, 3, 10, 91), (16,)),
    "lengths": (STOCHASTIC, (2, 17, 20, 300), (32, 0, 17)),
    "4 bits": (Stochastic(sc_prec=4, chunk_d=128), (1, 3, 10, 140), (16,)),
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
