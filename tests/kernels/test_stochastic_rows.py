"""Rows quantised by the kernel that multiplies them: its source, run on a CPU, equals the two ops."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.kernels.stochastic import lookup
from fewbits.kernels.stochastic.rows import stochastic_rows, stochastic_rows_ref, takes
from tests.kernels import emulated
from tests.kernels.test_stochastic_lookup import Triple, add, needs_compiler

WHOLE = Stochastic(halve_bipolar_stoc_len=True, n_masks=64)
FULL = Stochastic(chunk_d=128)
CASES = {  # options, N, M, D, dtype of x, smooth, dtype of y
    "a row": (STOCHASTIC, 1, 37, 400, torch.bfloat16, False, torch.bfloat16),
    "a row, smooth": (STOCHASTIC, 1, 21, 300, torch.bfloat16, True, torch.float32),
    "rows": (STOCHASTIC, 3, 37, 300, torch.bfloat16, True, torch.bfloat16),
    "float32": (STOCHASTIC, 2, 9, 256, torch.float32, True, torch.float32),
    "full": (FULL, 5, 20, 260, torch.bfloat16, False, torch.bfloat16),
    "one chunk": (WHOLE, 4, 20, 100, torch.bfloat16, False, torch.bfloat16),
    "small chunks": (replace(STOCHASTIC, chunk_d=37), 2, 10, 91, torch.float32, False, torch.bfloat16),
    "4 bits": (Stochastic(sc_prec=4, chunk_d=128), 3, 10, 140, torch.bfloat16, False, torch.float32),
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_the_source_quantises_too(libraries: Path, name: str) -> None:
    options, N, M, D, dtype, smooth, out = CASES[name]
    x = torch.randn(N, D).to(dtype)
    x[0, :40] *= 1e-7  # below the least scale; and codes at their end
    x[-1, 3], x[-1, 8] = 100.0, -100.0
    f = torch.rand(D) + 0.5 if smooth else None
    assert takes(x, options, out)
    b = options.quantize(torch.randn(M, D))
    chunk, C = (options.chunk_d if 0 < options.chunk_d < D else D), b.scales.shape[1]
    tables = lookup.tables_of(options, (options.length,), chunk, x.device)
    plan = lookup.plan(1, N, M, C, chunk, multiprocessors=8, shared=227 * 1024)
    plan = replace(plan, threads=64)
    rows = lookup.Rows(x[None], torch.full((1, N, C), torch.nan), f, options.max_code)
    y = torch.full((1, N, M), torch.nan, dtype=out)
    argument, _counts = lookup.product_of(rows, (b.codes[None], b.scales[None]), y, tables, None, plan, chunk)
    defines = plan.defines(tables, lookup.alignment(b.codes, chunk), rows, out)
    library = emulated.build(libraries, lookup.SOURCE, "lookup_emulation.cpp", defines)
    library.run(ctypes.byref(argument), Triple(*plan.grid), plan.shared_bytes)
    add(library, plan, argument)
    expected = stochastic_rows_ref(x, b.codes, b.scales, options, f, dtype=out)
    assert torch.equal(y[0], expected)
    assert torch.equal(stochastic_rows(x, b.codes, b.scales, options, f, dtype=out), expected)


@needs_compiler
def test_rows_that_are_not_finite_become_nan(libraries: Path) -> None:
    x = torch.randn(4, 256)
    x[1, 200], x[2, 5] = torch.inf, torch.nan
    b = STOCHASTIC.quantize(torch.randn(20, 256))
    tables = lookup.tables_of(STOCHASTIC, (128,), 128, x.device)
    plan = replace(lookup.plan(1, 4, 20, 2, 128, multiprocessors=8, shared=227 * 1024), threads=64)
    rows = lookup.Rows(x[None], torch.zeros(1, 4, 2))
    y = torch.zeros(1, 4, 20)
    argument, _counts = lookup.product_of(rows, (b.codes[None], b.scales[None]), y, tables, None, plan, 128)
    defines = plan.defines(tables, 16, rows, torch.float32)
    library = emulated.build(libraries, lookup.SOURCE, "lookup_emulation.cpp", defines)
    library.run(ctypes.byref(argument), Triple(*plan.grid), plan.shared_bytes)
    add(library, plan, argument)
    expected = stochastic_rows_ref(x, b.codes, b.scales, STOCHASTIC)
    assert torch.equal(y[0].isnan(), expected.isnan())
    assert torch.equal(y[0].nan_to_num(), expected.nan_to_num())
    assert y[0].isnan().all(1).tolist() == [False, True, True, False]


def test_what_the_kernel_does_not_take() -> None:
    x = torch.zeros(4, 256)
    assert takes(x, STOCHASTIC, torch.float32)
    assert not takes(x, WHOLE, torch.float32), "a chunk of two slices"
    assert not takes(x.half(), STOCHASTIC, torch.float32)
    assert not takes(x, STOCHASTIC, torch.float16)
    assert not takes(torch.zeros(17, 256), STOCHASTIC, torch.float32)


def test_operands_that_do_not_fit() -> None:
    b = STOCHASTIC.quantize(torch.randn(20, 256))
    with pytest.raises(BadInput, match="rows"):
        stochastic_rows(torch.zeros(4, 128), b.codes, b.scales, STOCHASTIC)
    with pytest.raises(BadInput, match="same options"):
        stochastic_rows(torch.zeros(4, 256), b.codes, b.scales[:, :1], STOCHASTIC)
    empty = stochastic_rows(torch.zeros(0, 256), b.codes, b.scales, STOCHASTIC, dtype=torch.bfloat16)
    assert empty.shape == (0, 20) and empty.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 2, 4, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_equals_the_two_ops(N: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    x, f = torch.randn(N, 4096, device=device, dtype=dtype), torch.rand(4096, device=device) + 0.5
    b = STOCHASTIC.quantize(torch.randn(1030, 4096, device=device))
    got = stochastic_rows(x, b.codes, b.scales, STOCHASTIC, f, dtype=torch.bfloat16)
    on_cpu = stochastic_rows(
        *(t.cpu() for t in (x, b.codes, b.scales)), STOCHASTIC, f.cpu(), dtype=torch.bfloat16
    )
    assert torch.equal(got.cpu(), on_cpu)
