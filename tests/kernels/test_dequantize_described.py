"""The CUDA kernel that is generated from a format's description: its own source on a CPU; on a GPU too."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits.formats import FORMATS
from fewbits.formats.base import Format, Packed
from fewbits.formats.description import Description
from fewbits.formats.trellis import Trellis
from fewbits.kernels.codec import dequantize_described as described
from fewbits.kernels.codec.dequantize import dequantize_ref, has_kernel, launch_named
from fewbits.kernels.codec.dequantize_triton import has_triton_kernel
from fewbits.kernels.launch import nvrtc
from tests.kernels import emulated

SMALL = [
    Trellis(name=f"mine{bits}", code_bits=bits, state_bits=3 * bits, block=(1, 64)) for bits in (1, 2, 3, 4)
]


def of_kernel(format: Format) -> bool:
    return described.description_of(format) is not None and not has_triton_kernel(format, (64, 256))


NAMES = [name for name, format in FORMATS.items() if of_kernel(format) and not name.startswith("trellis")]
EVERY = [FORMATS[name] for name in NAMES] + SMALL
TYPICAL = ("int3_g128_zp", "mxfp6_e3m2", "nvfp4", "gguf_q5_k", "gguf_tq1_0", "mine2")


def marked(format: Format) -> Any:
    """Of each kind one always; widths and groups of whole numbers every night, others among slow tests."""
    is_variant = format.name.startswith("int") and not format.name.endswith(("_g128", "_zp"))
    kinds = () if format.name in TYPICAL else pytest.mark.nightly if is_variant else pytest.mark.slow
    return pytest.param(format, marks=kinds, id=format.name)


def problem(format: Format, N: int, K: int, seed: int = 0) -> Packed:
    """A weight whose every part holds all bytes there are, whether a rounding would give them or not."""
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for name, spec in format.layout((N, K)).items():
        if name == "codes" or spec.dtype.itemsize == 1:
            raw = torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=generator)
            if name == "codes" and format.name.startswith("ternary"):
                raw &= ~(raw >> 1 & 0x55)  # two bits are 0, 1 or 2
            parts[name] = raw.view(spec.dtype)
        else:
            parts[name] = torch.randn(spec.shape, generator=generator, dtype=torch.float32).to(spec.dtype)
    return Packed(format, (N, K), torch.float32, parts)


def decoded(folder: Path, packed: Packed, dtype: torch.dtype, room: int) -> Tensor:
    N, K = packed.shape
    out = torch.full((N, K + room), 7.0, dtype=dtype)[:, :K]
    call = described.call_of(packed.format, packed.parts, packed.shape, out)
    library = emulated.build(folder, described.SOURCE, "described_emulation.cpp", call.defines)
    library.run(ctypes.byref(call.argument), call.grid[0])
    return out


def same(found: Tensor, wanted: Tensor) -> bool:
    """Equal bits, whichever NaN it is."""
    kind = torch.int32 if found.dtype == torch.float32 else torch.int16
    nan = wanted.isnan()
    bits = [x.contiguous().view(kind).masked_fill(nan, 0) for x in (found, wanted)]
    return torch.equal(found.isnan(), nan) and torch.equal(*bits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("built")


def shapes(format: Format) -> list[tuple[int, int]]:
    """A whole number of blocks, rows that end inside one, and more than one block of threads."""
    columns = format.contract.block[1]
    unit = columns if columns else 64
    rest = 8 if format in SMALL else 13
    return [(5, 2 * unit), (33, unit + rest if columns else 77), (37, 256)]


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("format", map(marked, EVERY))
def test_the_source_gives_the_definition(folder: Path, format: Format) -> None:
    for number, (N, K) in enumerate(shapes(format)):
        assert described.is_described(format, (N, K))
        packed = problem(format, N, K, number)
        for dtype in (torch.float32, torch.bfloat16) if format.name in TYPICAL[:2] else (torch.float32,):
            found = decoded(folder, packed, dtype, 8 * number + 3 * (number > 1))
            assert same(found, packed.dequantize(dtype)), (N, K, dtype)


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("name", ["int3_g64_zp", "gguf_q4_k", "mxfp4"])
def test_float16_and_rows_apart(folder: Path, name: str) -> None:
    packed = problem(FORMATS[name], 9, 256, 3)
    for room in (0, 5, 16):
        assert same(decoded(folder, packed, torch.float16, room), packed.dequantize(torch.float16))


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("name", ["int3_g128_zp", "mxfp8_e4m3", "gguf_q5_k", "gguf_q4_0"])
def test_parts_may_begin_anywhere(folder: Path, name: str) -> None:
    """As those of one expert of many do, or a part of a larger output: loads are as wide as that allows."""
    format = FORMATS[name]
    three = problem(format, 3 * 7, 256, 4)
    for number in range(3):
        parts = {n: part.view(3, 7, -1)[number] for n, part in three.parts.items()}
        moved = torch.zeros(parts["codes"].numel() + 1, dtype=torch.uint8)[1:]
        parts["codes"] = moved.copy_(parts["codes"].reshape(-1).view(torch.uint8)).view(parts["codes"].shape)
        out = torch.full((7 * 256 + 1,), 7.0)[1:].view(7, 256)
        call = described.call_of(format, parts, (7, 256), out)
        assert dict(call.defines)["CODES_AT"] == 1 and dict(call.defines)["OUT_AT"] == 4
        emulated.build(folder, described.SOURCE, "described_emulation.cpp", call.defines).run(
            ctypes.byref(call.argument), call.grid[0]
        )
        assert same(out, three.dequantize(torch.float32)[7 * number : 7 * number + 7])


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
def test_rows_are_found_by_a_product(folder: Path) -> None:
    """The number that stands for a row's length, and beyond 2**31 eights a division."""
    for K in (8, 16, 24, 4096, 11008, 14336, 151936, 2**31 - 8):
        out = torch.empty(1, dtype=torch.bfloat16).expand(2, K)
        one = FORMATS["int3"]
        parts = {"codes": torch.empty(0, dtype=torch.uint8), "scales": torch.empty(2, 1)}
        call = described.call_of(one, parts, (2, K), out)
        multiplier, shift, eights = call.argument.multiplier, call.argument.shift, K // 8
        if eights == 1:
            assert dict(call.defines)["IS_LARGE"]
            continue
        limit = 2**31 // eights * eights
        near = {
            0,
            1,
            *(n * eights + d for n in (1, 2, 3, 1000) for d in (-1, 0, 1)),
            *range(limit - 2, limit + 1),
        }
        assert all((x * multiplier >> 32) >> shift == x // eights for x in near if 0 <= x < 2**31)
    packed = problem(one, 5, 40, 2)
    out = torch.empty(5, 40)
    call = described.call_of(one, packed.parts, (5, 40), out)
    for is_large in (0, 1):
        defines = tuple({**dict(call.defines), "IS_LARGE": is_large}.items())
        emulated.build(folder, described.SOURCE, "described_emulation.cpp", defines).run(
            ctypes.byref(call.argument), call.grid[0]
        )
        assert same(out, packed.dequantize(torch.float32))


def test_every_format_with_a_decoded_product_has_a_kernel() -> None:
    """But whole numbers whose columns look up their group, which the product sorts first, and HQQ's."""
    without = [
        name for name, format in FORMATS.items()
        if format.contract.product == "decoded"
        and not has_triton_kernel(format, (256, 256)) and not described.is_described(format, (256, 256))
    ]  # fmt: skip
    assert without == [name for name in FORMATS if name.endswith("_indexed") or name.startswith("hqq")]


def test_what_it_does_not_decode_is_left_to_the_definition() -> None:
    odd = FORMATS["mxfp4"]
    assert isinstance(described.description_of(odd), Description)
    assert not described.is_described(replace(odd, block=(1, 12)), (4, 48))  # eight values under two scales
    assert not described.is_described(
        replace(odd, block=(16, 32)), (3, 24, 64)
    )  # tiles that end with a matrix
    assert not described.is_described(FORMATS["trellis2"], (4, 100))


@pytest.mark.skipif(nvrtc.missing() is not None, reason="needs NVRTC")
@pytest.mark.parametrize(
    "name", ["int3_g128_zp", "mxfp6_e2m3", "nvfp4", "trellis3", "gguf_q6_k", "gguf_tq1_0"]
)
def test_compiles_to_machine_code(name: str) -> None:
    for capability, dtype in ((80, torch.float32), (90, torch.bfloat16), (120, torch.float16)):
        out = torch.empty(8, 256, dtype=dtype)
        defines = described.call_of(
            FORMATS[name], problem(FORMATS[name], 8, 256).parts, (8, 256), out
        ).defines
        assert nvrtc.cubin(described.SOURCE, defines, capability)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("format", EVERY, ids=lambda f: f.name)
def test_cuda_equals_the_definition(format: Format) -> None:
    """Every format, every result's dtype, rows that end in a block, and outputs with room between rows."""
    for N, K in (*shapes(format), (512, 1024)):
        packed = problem(format, N, K, 1)
        parts = {name: part.cuda() for name, part in packed.parts.items()}
        for dtype in described.DTYPES:
            out = torch.full((N, K + 16), 7.0, dtype=dtype, device="cuda")[:, :K]
            described.launch(format, parts, (N, K), out)
            assert same(out.cpu(), packed.dequantize(dtype)), (N, K, dtype)


def test_the_receipt_knows_which_formats_have_a_kernel() -> None:
    assert has_kernel(FORMATS["gguf_q4_k"], (64, 256)) and not has_kernel(FORMATS["int3_indexed"], (64, 256))


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
def test_dequantize_finishes_what_the_kernel_decodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is taken: rows apart, transposed, under inverse scales, in 8 bits; the source emulated."""
    packed = problem(FORMATS["mxfp6_e3m2"], 16, 64, 5)
    packed = Packed(
        packed.format, (16, 64), torch.float32, {**packed.parts, "scales": packed.scales % 20 + 110}
    )
    launched = []

    def launch(format: Format, parts: Any, shape: tuple[int, ...], out: Tensor) -> None:
        call = described.call_of(format, parts, shape, out)
        library = emulated.build(folder, described.SOURCE, "described_emulation.cpp", call.defines)
        library.run(ctypes.byref(call.argument), call.grid[0])
        launched.append(out.dtype)

    monkeypatch.setattr(described, "can_launch", lambda out, dtype: True)
    monkeypatch.setattr(described, "launch", launch)
    tiles = torch.tensor([[0.5, 2.0], [1.0, 4.0]])
    for dtype, transposed, inverse in (
        (torch.bfloat16, False, None),
        (torch.float32, True, None),
        (torch.bfloat16, True, tiles),
        (torch.float8_e4m3fn, False, torch.full((1, 1), 3.0)),
    ):
        shape = (64, 16) if transposed else (16, 64)
        out = torch.zeros(shape[0], shape[1] + 8, dtype=torch.float32).to(dtype)[:, : shape[1]]
        launch_named(packed.parts, packed.format, (16, 64), inverse, out, transposed)
        wanted = dequantize_ref(packed, dtype, transposed, inverse)
        assert torch.equal(out.float().nan_to_num(9.0), wanted.float().nan_to_num(9.0))
    assert launched == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
