"""Dense to packed: the kernels against the formats' own definitions, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats import Format
from fewbits.formats.codebook import FP4, FP4_DQ, NF4, NF4_DQ
from fewbits.formats.float8 import E4M3_ROW
from fewbits.formats.integer import (
    INT4,
    INT4_G32,
    INT4_G64_ZP,
    INT4_TENSOR_ZP,
    INT4_ZP,
    INT8,
    INT8_G128,
    INT8_TENSOR,
    INT8_ZP,
)
from fewbits.kernels.codec import quantize as module
from fewbits.kernels.codec.quantize import launch, quantize, quantize_ref
from fewbits.kernels.codec.quantize_triton import RoundTile, takes
from tests.every_format import every_format

SMALL = RoundTile(256, 4)


def values(*shape: int, seed: int = 0) -> Tensor:
    """Blocks of unlike size, zeros, denormal and large numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).exp()
    x.view(-1)[::7] = 0.0
    rows = x.view(-1, shape[-1])
    rows[rows.shape[0] // 2] *= 1e-30
    rows[rows.shape[0] // 3] *= 1e-41
    return x


def assert_same_parts(found: list[Tensor], format: Format, x: Tensor) -> None:
    need = quantize_ref(x, format).parts
    assert len(found) == len(need)
    for part, (name, wanted) in zip(found, need.items(), strict=True):
        assert part.dtype == wanted.dtype and part.shape == wanted.shape, name
        torch.testing.assert_close(part, wanted, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: n + m)


# The op.


@every_format
def test_on_a_cpu_it_is_the_formats_own(format: Format) -> None:
    x = values(6, 130).bfloat16().t()
    packed = quantize(x, format)
    assert packed.format == format and packed.dtype == torch.bfloat16
    assert_same_parts(list(packed.parts.values()), format, x)


def test_integers_are_refused() -> None:
    with pytest.raises(BadInput, match="floating-point"):
        quantize(torch.ones(4, dtype=torch.int32), NF4)


@pytest.mark.parametrize("format", [NF4_DQ, INT4_G64_ZP], ids=lambda f: f.name)
def test_opcheck(format: Format) -> None:
    torch.library.opcheck(module._quantize, (values(4, 64), module.text_of_format(format)))


def test_compiles_without_a_break() -> None:
    def decoded(x: Tensor) -> Tensor:
        return quantize(x, INT8).parts["codes"] * 2

    x = values(4, 64)
    assert torch.equal(torch.compile(decoded, backend="aot_eager", fullgraph=True)(x), decoded(x))


def test_formats_that_the_kernels_know() -> None:
    for format in (NF4, NF4_DQ, FP4, INT8, INT8_TENSOR, INT4_G32, INT4_G64_ZP):
        assert takes(format, (4, 128), torch.bfloat16)
    for format in (
        E4M3_ROW,
        replace(NF4, block=48),
        replace(INT4, block=(2, 16)),
        replace(INT8, block=(1, 33)),
    ):
        assert not takes(format, (4, 128), torch.bfloat16)
    assert not takes(NF4, (4, 128), torch.float64) and not takes(NF4, (), torch.float32)


# The kernels, on a GPU or under the interpreter.

KERNEL_FORMATS = [
    NF4,
    NF4_DQ,
    replace(FP4_DQ, block=32, scale_block=3),
    INT4,
    INT4_ZP,
    INT4_G32,
    INT4_G64_ZP,
    INT8,
    INT8_ZP,
    INT8_G128,
    INT8_TENSOR,
    INT4_TENSOR_ZP,
]


def names_of(value: object) -> str:
    return f"{value.name}-{value.contract.block}" if isinstance(value, Format) else str(value)


@pytest.mark.parametrize("format", KERNEL_FORMATS, ids=names_of)
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(format: Format, kernel_device: str) -> None:
    for i, shape in enumerate([(3, 128), (2, 3, 64), (5, 33), (7, 1), (131,), (2, 330)]):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[i % 3]
        x = values(*shape, seed=i).to(dtype).to(kernel_device)
        assert_same_parts(launch(x, format, SMALL), format, x)


@pytest.mark.parametrize("format", [NF4, NF4_DQ, FP4, INT4_G32, INT4_G64_ZP, INT8, INT8_TENSOR], ids=names_of)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_takes_what_is_not_finite(format: Format, kernel_device: str) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = values(4, 128).to(kernel_device)
        x[1, 3] = bad
        assert_same_parts(launch(x, format, SMALL), format, x)
    x = torch.full((2, 64), -3e38, device=kernel_device)
    x[:, ::2] = 3e38
    assert_same_parts(launch(x, format, SMALL), format, x)


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_rounds_ties_as_the_format_says(kernel_device: str) -> None:
    """Every threshold of a table, and every half of an integer grid, from both sides."""
    edges = torch.tensor(sorted(NF4.values))
    middles = (edges[:-1] + edges[1:]) / 2
    around = [torch.nextafter(middles, torch.tensor(s)) for s in (-2.0, 2.0)]
    x = torch.cat([middles, *around, torch.tensor([1.0]), torch.zeros(18)]).view(1, 64).to(kernel_device)
    assert_same_parts(launch(x, NF4, SMALL), NF4, x)
    halves = torch.cat([torch.arange(-6.5, 7.0, 1.0), torch.tensor([7.0, -7.0]), torch.zeros(16)])
    x = halves.view(1, 32).to(kernel_device)
    assert_same_parts(launch(x, INT4_G32, SMALL), INT4_G32, x)


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_takes_strides_and_nothing(kernel_device: str) -> None:
    x = values(64, 24).to(kernel_device).t()
    for format in (NF4, INT4_G32, INT8):
        assert_same_parts(launch(x, format), format, x)
        assert_same_parts(launch(x[:0], format), format, x[:0])
    assert_same_parts(launch(x.double(), NF4), NF4, x.double())


# On a GPU.


@pytest.mark.gpu
def test_cuda_real_shapes() -> None:
    x = (torch.randn(4096, 1024, device="cuda") * 0.02).bfloat16()
    for format in (NF4, NF4_DQ, FP4_DQ, INT4_G32, INT4_G64_ZP, INT8, INT8_TENSOR, INT8_ZP):
        assert_same_parts(list(quantize(x, format).parts.values()), format, x)


@pytest.mark.gpu
def test_cuda_more_than_2_31_values() -> None:
    x = torch.zeros(2**17 + 3, 2**14, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3.0
    for format in (NF4, INT8):
        packed = quantize(x, format)
        assert packed.scales.view(-1)[-1] > 0 and packed.codes[-1].ne(packed.codes[0]).all()


@pytest.mark.multi
def test_cuda_second_device() -> None:
    x = values(8, 128).to("cuda:1")
    assert torch.cuda.current_device() == 0
    assert_same_parts(list(quantize(x, NF4_DQ).parts.values()), NF4_DQ, x)
