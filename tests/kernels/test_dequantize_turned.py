"""The CUDA kernel for 4-bit codes to transposed float8: its own source, run on a CPU; on a GPU too."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fewbits.formats import FORMATS, NF4_DQ
from fewbits.formats.base import Format, Packed
from fewbits.kernels.codec import dequantize_cuda as turned
from fewbits.kernels.codec.dequantize import dequantize_ref
from fewbits.kernels.launch import nvrtc
from tests.kernels import emulated

E4 = torch.float8_e4m3fn


def problem(format: Format, N: int, K: int, device: str = "cpu") -> tuple[Packed, Tensor, Tensor]:
    """A weight with a block that is not finite, one of zeros and large values; where its transpose goes."""
    w = torch.randn(N, K) * 0.02
    w[3, 5], w[2], w[1, :64] = torch.nan, 0.0, 1e4
    packed = format.quantize(w.to(device))
    buffer = torch.full((K, N + 8), torch.nan, device=device).to(E4)
    return packed, torch.full((1, 1), 1000.0, device=device), buffer[:, 4 : 4 + N]


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(("name", "N", "K"), [("nf4_dq", 132, 640), ("nf4", 260, 128), ("fp4", 128, 64)])
def test_the_source_gives_the_definition(tmp_path: Path, name: str, N: int, K: int) -> None:
    packed, inverse, out = problem(FORMATS[name], N, K)
    parts = dict(packed.parts)
    assert turned.fits(packed.format, parts, N, K, inverse, out)
    call = turned.call_of(packed.format, parts, N, K, inverse, out)
    library = emulated.build(tmp_path, turned.SOURCE, "turned_emulation.cpp", call.defines)
    library.run(ctypes.byref(call.argument), *call.grid[:2])
    need = dequantize_ref(packed, E4, True, inverse)
    assert torch.equal(out.view(torch.uint8), need.view(torch.uint8))


def test_what_the_kernel_does_not_write_is_left_to_triton() -> None:
    packed, inverse, out = problem(NF4_DQ, 128, 128)
    parts = dict(packed.parts)
    assert turned.fits(packed.format, parts, 128, 128, inverse, out)
    assert not turned.fits(packed.format, parts, 128, 128, None, out)
    assert not turned.fits(packed.format, parts, 128, 128, torch.ones(2, 1), out)
    assert not turned.fits(FORMATS["int4"], parts, 128, 128, inverse, out)
    assert not turned.fits(packed.format, parts, 128, 128, inverse, out.to(torch.bfloat16))
    assert not turned.fits(packed.format, parts, 126, 128, inverse, out)


@pytest.mark.skipif(nvrtc.missing() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_compiles_to_machine_code(capability: int) -> None:
    for scale_block in (0, 256):
        defines = (("SCALE_BLOCK", scale_block),)
        assert nvrtc.cubin(turned.SOURCE, defines, capability)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "K"), [(1024, 4096), (132, 640), (14336, 1088)])
def test_cuda_equals_the_definition(N: int, K: int) -> None:
    if torch.cuda.get_device_capability() < (8, 9) or nvrtc.missing():
        pytest.skip("needs a GPU that converts to float8, and NVRTC")
    packed, inverse, out = problem(NF4_DQ, N, K, "cuda")
    turned.launch(packed.format, dict(packed.parts), N, K, inverse, out)
    need = dequantize_ref(packed, E4, True, inverse)
    assert torch.equal(out.view(torch.uint8), need.view(torch.uint8))
