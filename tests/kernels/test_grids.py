"""Every launch fits a GPU's grid, whose second and third axes end at 65,535 programs; no tensor is made."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fewbits.kernels
from fewbits.errors import Unsupported
from fewbits.formats.base import Format
from fewbits.formats.codebook import NF4
from fewbits.formats.float8 import E4M3
from fewbits.formats.integer import INT8, INT8_TENSOR
from fewbits.kernels.codec import dequantize_cuda, dequantize_triton, quantize_float8_triton, quantize_triton
from fewbits.kernels.launch.grid import MAX_PROGRAMS, check_grid, programs
from fewbits.kernels.product import matmul_float8
from fewbits.kernels.stochastic import add_triton, bits, many, nibbles
from fewbits.kernels.stochastic.row_blocks import fitting


class Kernel:
    """In a kernel's place: notes its grids and starts nothing."""

    arg_names = ()

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        self.grids.append(grid)
        return lambda *args, **constants: None


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    noted = Kernel()
    for module in (
        dequantize_triton,
        quantize_triton,
        quantize_float8_triton,
        add_triton,
        matmul_float8,
    ):
        for name in dir(module):
            if name.endswith("_kernel") and name.startswith("_"):
                monkeypatch.setattr(module, name, noted)
    return noted.grids


def fits(grid: tuple[int, ...]) -> bool:
    return all(0 < count <= most for count, most in zip(grid, MAX_PROGRAMS, strict=False))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


LONG = 2**31 - 2**16  # values of one axis
SHAPES = [(2**28,), (LONG,), (1, LONG), (2**24, 128), (3, 2**29)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", [NF4, INT8, INT8_TENSOR, E4M3], ids=lambda f: f.name)
def test_packed_tensors(grids: list[tuple[int, ...]], format: Format, shape: tuple[int, ...]) -> None:
    parts = {name: meta(*spec.shape, dtype=spec.dtype) for name, spec in format.layout(shape).items()}
    out = meta(*dequantize_triton.matrix_of(shape))
    assert dequantize_triton.takes(format, shape, out)
    dequantize_triton.launch_kernel(parts, format, shape, None, out, False)
    assert len(grids) == 1 and fits(grids[0])
    if quantize_triton.takes(format, shape, torch.bfloat16):
        quantize_triton.launch_round(meta(*shape), format, parts["codes"], parts["scales"])
        assert len(grids) > 1 and all(map(fits, grids))


def test_rows_that_no_program_counts_to_are_left_to_the_definition() -> None:
    assert not dequantize_triton.takes(NF4, (2**31,), meta(1, 2**31))
    assert not quantize_triton.takes(INT8_TENSOR, (2**31,), torch.bfloat16)


@pytest.mark.parametrize("shape", [(1, LONG), (2**24, 128), (3, 2**29)], ids=str)
def test_float8(grids: list[tuple[int, ...]], shape: tuple[int, int]) -> None:
    x, q, one = meta(*shape), meta(*shape, dtype=torch.float8_e4m3fn), meta(1, dtype=torch.float32)
    quantize_float8_triton.launch_tensor(x, q, one, factor=one, is_scale=True)
    for block in ((1, 128), (128, 128)):
        scale = meta(math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1]), dtype=torch.float32)
        quantize_float8_triton.launch_blocks(x, q, scale, block)
    matmul_float8.launch_weight(x, one, q, False)
    matmul_float8.launch_weight(x, one, meta(*reversed(shape), dtype=q.dtype), True)
    matmul_float8.launch_weight_pair(x, one, q, meta(*reversed(shape), dtype=q.dtype))
    add_triton.add(x, None, x, one, one, onto=True)
    assert len(grids) == 7 and all(map(fits, grids))


@pytest.mark.parametrize("batch, rows", [(1, 2**20), (3, 2**20), (1, 2**24), (70_000, 16)])
@pytest.mark.parametrize("dimensions", [16, 4096])
def test_rows_of_stochastic_products(batch: int, rows: int, dimensions: int) -> None:
    """2**20 rows are 65,536 groups of 16, one more than the axis has."""
    slices = dimensions // 16
    for module in (many, nibbles):
        for entries, part in fitting(batch, rows, slices, module.ROWS)[:3]:
            count = len(range(batch)[entries]), len(range(rows)[part])
            if module is many:
                how = module.plan(*count, 4096, 1, dimensions, multiprocessors=132)
            else:
                how = module.plan(*count, 4096, 1, dimensions, multiprocessors=132, shared=232_448)
            assert all(map(fits, (how.grid, how.grid_a, how.grid_b(count[0]))))
    for part in bits._parts(batch, rows, 1, 4096, slices)[:3]:
        tiles = math.ceil(len(range(rows)[part.rows]) / 128)
        assert fits((1, 8 * tiles, len(range(batch)[part.batch])))


def test_a_wide_weight_is_not_turned_by_a_grid_that_is_too_long() -> None:
    parts = {name: meta(*s.shape, dtype=s.dtype) for name, s in NF4.layout((4, 2**28)).items()}
    out = meta(2**28, 4, dtype=torch.float8_e4m3fn)
    assert not dequantize_cuda.fits(NF4, parts, 4, 2**28, meta(1), out)
    assert dequantize_cuda.fits(NF4, parts, 4, 2**24, meta(1), out)


def test_what_no_grid_takes_is_refused_in_one_sentence() -> None:
    check_grid(MAX_PROGRAMS, "this product")
    for grid in ((1, 65_536, 1), (1, 1, 65_536), (2**31, 1, 1), (1, 65_536)):
        with pytest.raises(Unsupported, match=r"this product needs .* programs"):
            check_grid(grid, "this product")
    assert programs(1, 2**28, 1, 4096) == (65_536,)


def test_no_launch_has_a_second_axis_unless_it_is_checked() -> None:
    found = []
    for path in Path(fewbits.kernels.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name, grid = node.func.value, node.func.slice
                is_launch = isinstance(name, ast.Name) and name.id.endswith("_kernel")
                if is_launch and isinstance(grid, ast.Tuple) and len(grid.elts) > 1:
                    found.append(f"{path.name}:{node.lineno}")
    assert not found, "take fewbits.kernels.launch.grid.programs, or check_grid first"
