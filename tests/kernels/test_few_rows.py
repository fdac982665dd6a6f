"""Products of a few rows: the definition, the CUDA kernel's source on a CPU, its machine code, and a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.formats import FORMATS
from fewbits.formats.base import Packed
from fewbits.kernels.generation.cut import cut, max_rows, reading_of, shape_of
from fewbits.kernels.generation.few_rows import FewRows, few_rows, few_rows_ref
from fewbits.kernels.generation.operands import LowRankSum, Product, RowNorm
from fewbits.kernels.launch import nvrtc
from tests.kernels import emulated

READ = [
    *("nf4", "nf4_dq", "fp4", "int4_g32", "int4_g64", "int4_g128", "int4_g64_zp"),
    *("int8", "int8_tensor", "int8_g64", "int8_g128_zp"),
    *("float8_e4m3", "float8_e4m3_row", "float8_e4m3_1x128", "float8_e4m3_128x128", "float8_e5m2_row"),
    *("bfloat16", "float16"),
]
# Those of one layout and one reading with another of READ: read every night.
READ_ALIKE = {
    *("fp4", "int4_g32", "int4_g128", "int8_tensor", "int8_g64"),
    *("float8_e4m3", "float8_e4m3_1x128", "float8_e5m2_row"),
}
# x and NF4's table are rounded to float16, 2**-12 each at most; bfloat16 weights meet x in bfloat16, 2**-9,
# twice where two products are multiplied.
TOLERANCE = {"bfloat16": 2.0**-7}
needs_gxx = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")


def with_marks(cases: list[Any]) -> list[Any]:
    """Formats, or cases that begin with one, of which those that are like another run every night."""
    rows = [(case,) if isinstance(case, str) else case for case in cases]
    return [pytest.param(*row, marks=pytest.mark.nightly if row[0] in READ_ALIKE else ()) for row in rows]


def weight_of(name: str, N: int, K: int, device: str = "cpu") -> Packed | Tensor:
    dense = torch.randn(N, K, device=device) * 0.02
    if name in FORMATS:
        return FORMATS[name].quantize(dense.to(torch.bfloat16))
    return dense.to(getattr(torch, name))


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


class Problem:
    """Operands of one call as a decoder has them, the output full of NaN unless it is added to."""

    def __init__(
        self, name: str, M: int, K: int, N: tuple[int, ...], *, device: str = "cpu", **what: Any
    ) -> None:
        half = torch.float16 if name == "float16" else torch.bfloat16
        self.weights = [weight_of(name, n, K, device) for n in N]
        self.tolerance = TOLERANCE.get(name, 2.0**-11)
        kind = what.get("x", torch.float32)
        self.x = (torch.randn(M, K, device=device) * what.get("size", 3.0)).to(kind)
        self.options: dict[str, Any] = {"activation": what.get("activation")}
        if what.get("norm"):
            self.options["norm"] = RowNorm((torch.randn(K, device=device) * 0.2 + 1).to(half), 1e-5, 0.5)
        if what.get("biases"):
            self.options["biases"] = [torch.randn(n, device=device).to(half) for n in N]
        if what.get("rank"):
            inner = torch.randn(M, what["rank"] + 3, device=device)[:, : what["rank"]]
            b = torch.randn(N[0], what["rank"], device=device).to(half)
            self.options["branches"] = [LowRankSum(b, inner, 0.5), *[None] * (len(N) - 1)]
        if what.get("inner"):  # of each weight, computed with the product
            self.options["branches"] = []
            for i, n in enumerate(N):
                rank = what["inner"] + 4 * i
                a, b = (torch.randn(s, device=device).to(half) for s in ((rank, K), (n, rank)))
                t = torch.full((M, rank + 8), torch.nan, device=device)[:, :rank]
                self.options["branches"].append(LowRankSum(b * K**-0.5, t, 0.5, a))
        columns = N[0] if what.get("activation") else sum(N)
        self.add = bool(what.get("add"))
        self.out = torch.full((M, columns), torch.nan, device=device, dtype=what.get("out", torch.float32))
        if self.add:
            self.out = torch.randn(M, columns, device=device)
        self.exact = few_rows_ref(self.x.double(), self.weights, **self.options)
        if self.add:
            self.exact = self.exact + self.out

    def call(self, **more: Any) -> FewRows:
        return FewRows(self.product(), **more)

    def product(self) -> Product:
        return Product(self.x, self.weights, self.out, add=self.add, **self.options)


CALLS: list[tuple[str, int, int, tuple[int, ...], dict[str, Any]]] = [
    *((name, 2, 256, (20,), {"norm": True}) for name in READ),
    ("nf4_dq", 1, 1024, (16, 24, 8), {"norm": True, "biases": True, "rank": 4}),
    ("nf4", 1, 320, (24, 24), {"norm": True, "activation": "silu", "out": torch.bfloat16}),
    ("int4_g64", 5, 192, (12, 12), {"activation": "gelu_tanh", "rank": 8}),
    ("int8", 9, 80, (33,), {"add": True, "x": torch.bfloat16}),
    ("float8_e4m3_row", 1, 48, (16,), {"activation": None, "x": torch.bfloat16, "size": 1e-6}),
    ("nf4_dq", 1, 512, (16,), {"size": 1e6}),
    ("bfloat16", 3, 40, (18, 18), {"activation": "gelu"}),
    ("nf4", 1, 2240, (16,), {"x": torch.bfloat16, "add": True}),
    ("nf4", 1, 64, (20, 33, 8), {"add": True}),
]


@needs_gxx
@pytest.mark.parametrize(
    ("name", "M", "K", "N", "what"),
    with_marks(CALLS),
    ids=lambda v: str(v) if isinstance(v, str | int) else None,
)
def test_the_source_gives_the_definition(
    tmp_path: Path, name: str, M: int, K: int, N: tuple[int, ...], what: dict[str, Any]
) -> None:
    problem = Problem(name, M, K, N, **what)
    call = problem.call()
    library = emulated.build(tmp_path, call.source, "few_rows_emulation.cpp", call.defines)
    library.run(ctypes.byref(call.argument), call.shape.blocks, call.shape.shared_bytes)
    rounding = 2.0**-8 if problem.out.dtype == torch.bfloat16 else 0.0
    assert error(problem.out, problem.exact) < problem.tolerance + rounding


@needs_gxx
@pytest.mark.parametrize(
    ("warps", "loads", "depth", "blocks"), [(1, 1, 2, 1), (3, 2, 3, 2), (2, 8, 2, 5), (4, 4, 4, 3)]
)
def test_every_cut_gives_the_definition(
    tmp_path: Path, warps: int, loads: int, depth: int, blocks: int
) -> None:
    """Also where chunks are left over, and where a block has several tiles."""
    problem = Problem("nf4_dq", 1, 704, (70,), norm=True)
    call = problem.call(shape=(warps, loads, depth, blocks))
    library = emulated.build(tmp_path, call.source, "few_rows_emulation.cpp", call.defines)
    library.run(ctypes.byref(call.argument), call.shape.blocks, call.shape.shared_bytes)
    assert error(problem.out, problem.exact) < problem.tolerance


def test_a_cpu_computes_the_definition() -> None:
    problem = Problem("nf4", 3, 128, (8, 8), norm=True, activation="silu", biases=True)
    y = few_rows(problem.x, problem.weights, **problem.options)
    assert error(y, problem.exact) < 1e-5
    x, w = torch.randn(2, 64), torch.randn(5, 64).to(torch.bfloat16)
    assert error(few_rows(x, [w]), x.double() @ w.double().t()) < 1e-6


def test_a_prepared_call_on_a_cpu_writes_or_adds_the_definition() -> None:
    for add in (False, True):
        problem = Problem("int4_g64", 2, 128, (8,), norm=True, add=add)
        assert error(problem.call().launch(), problem.exact) < 1e-6


def test_what_is_not_finite_stays_so() -> None:
    dense = torch.randn(16, 64)
    dense[3, 5] = torch.inf
    y = few_rows(torch.randn(1, 64), [FORMATS["nf4"].quantize(dense)])
    assert y[0].isfinite().sum() == 15 and y[0, 3].isnan()


@pytest.mark.parametrize("name", READ)
def test_what_is_read_fits_into_shared_memory(name: str) -> None:
    for K in (1024, 4096, 5120, 8192, 14336):
        weight = weight_of(name, 16, K)
        reading, most = reading_of(weight), max_rows(weight)
        assert reading is not None and most >= 1
        for M in (1, most):
            shape = shape_of(reading, K, M, 4096, 132, 227 * 1024)
            assert shape.shared_bytes <= 227 * 1024
            assert shape.rounds * shape.warps * shape.loads * reading.chunk >= K


def test_what_the_kernel_does_not_read() -> None:
    assert reading_of(weight_of("nf4", 4, 96)) is None  # codes lie through the rows
    assert reading_of(torch.randn(4, 64)) is None
    assert reading_of(weight_of("int4_zp", 4, 64)) is None
    assert max_rows(torch.randn(4, 64)) == 0
    x, out = torch.randn(1, 64), torch.empty(1, 4)
    with pytest.raises(Unsupported, match="does not take weights stored as"):
        FewRows(Product(x, [torch.randn(4, 64)], out))
    with pytest.raises(Unsupported, match=r"adding to torch\.bfloat16"):
        FewRows(Product(x, [weight_of("nf4", 4, 64)], out.bfloat16(), add=True))
    with pytest.raises(Unsupported, match="two kinds of 16 bits"):
        FewRows(Product(x.half(), [weight_of("nf4", 4, 64)], out.bfloat16()))
    with pytest.raises(BadInput, match="takes 1 to"):
        FewRows(Product(torch.randn(99, 64), [weight_of("nf4", 4, 64)], torch.empty(99, 4)))


def test_float8_codes_that_are_no_numbers_are_refused() -> None:
    weight = weight_of("float8_e4m3_row", 16, 64)
    assert isinstance(weight, Packed)
    weight.codes.view(torch.uint8)[2, 3] = 0x7F
    with pytest.raises(Unsupported, match="no numbers"):
        FewRows(Product(torch.randn(1, 64), [weight], torch.empty(1, 16)))


def test_a_cut_has_all_of_k_in_rounds() -> None:
    reading = reading_of(weight_of("nf4", 16, 704))
    assert reading is not None
    assert not cut(reading, 704, 1, 4, 2, 3, 2, 2).full and cut(reading, 704, 1, 4, 2, 11, 1, 2).full


@pytest.mark.skipif(nvrtc.missing() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles_to_machine_code(capability: int) -> None:
    for name, what in (
        ("nf4_dq", {"norm": True}),
        ("int4_g64_zp", {"activation": "silu"}),
        ("float8_e4m3", {}),
    ):
        problem = Problem(name, 1, 256, (16, 16) if what.get("activation") else (16,), **what)
        defines = dict(problem.call().defines) | {"EARLY": int(capability >= 90)}
        assert nvrtc.cubin(problem.call().source, tuple(defines.items()), capability)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize(
    ("M", "K", "N", "what"),
    [
        (1, 256, (64,), {"norm": True}),
        (4, 1024, (40, 40), {"activation": "silu", "rank": 16}),
        (3, 2176, (130,), {"add": True}),
        (1, 4096, (512, 128, 128), {"norm": True, "biases": True}),
        (1, 14336, (256,), {"add": True, "x": torch.bfloat16}),
        (16, 1024, (512,), {"norm": True}),
    ],
)
def test_on_a_gpu(name: str, M: int, K: int, N: tuple[int, ...], what: dict[str, Any]) -> None:
    if name == "float16" and what.get("x") == torch.bfloat16:
        pytest.skip("two kinds of 16 bits")
    problem = Problem(name, M, K, N, device="cuda", **what)
    before = problem.out.clone()
    first = problem.call().launch().clone()
    problem.out.copy_(before)
    assert torch.equal(problem.call().launch(), first)
    assert error(first, problem.exact) < problem.tolerance
