"""Fake quantisation: one pass equals packing and decoding, bit for bit; gradients against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats import (
    INT4,
    INT4_G32,
    INT4_G64_ZP,
    INT8,
    INT8_TENSOR,
    INT8_ZP,
    NF4,
    NF4_DQ,
    Format,
)
from fewbits.formats.codebook import FP4
from fewbits.formats.float8 import E4M3_ROW
from fewbits.kernels.product import fake_quantize as module
from fewbits.kernels.product.fake_quantize import (
    fake_quantize,
    fake_quantize_lora,
    fake_quantize_lora_ref,
    fake_quantize_ref,
    fake_quantized_linear,
    launch,
    lora_weight,
    lora_weight_ref,
)
from fewbits.kernels.product.fake_quantize_triton import WeightTile, launch_lora, rounds_in_tile, takes_lora
from tests.every_format import every_format

SCALING = 0.5


def launch_effective(
    w: Tensor, a: Tensor, b: Tensor, scaling: float, format: Format | None, dtype: torch.dtype
) -> Tensor:
    """The kernel into the left part of a wider buffer, nothing beside it touched."""
    wide = torch.full((w.shape[0], w.shape[1] + 16), 3.0, dtype=dtype, device=w.device)
    out = wide[:, : w.shape[1]]
    out.fill_(torch.nan)
    module.launch_effective(w, a, b, scaling, format, out)
    assert wide[:, w.shape[1] :].eq(3).all()
    return out.contiguous()


def names_of(value: object) -> str:
    return f"{value.name}-{value.contract.block}" if isinstance(value, Format) else str(value)


def operands(N: int, K: int, r: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """W (N, K), A (r, K) and B (N, r)."""
    generator = torch.Generator().manual_seed(N + K)
    made = (torch.randn(shape, generator=generator) for shape in ((N, K), (r, K), (N, r)))
    return tuple(t.to(dtype) for t in made)


# The definitions.


@every_format
def test_effective_weight_is_what_is_packed_and_decoded(format: Format) -> None:
    w, a, b = operands(24, 128, 4)
    for base in (w, w.bfloat16()):
        effective = lora_weight(base, a, b, SCALING)
        assert torch.equal(effective, (base + (b @ a) * SCALING).to(base.dtype))
        packed = format.quantize(effective)
        for dtype in (torch.float32, torch.bfloat16):
            rounded = fake_quantize_lora(base, a, b, SCALING, format, dtype)
            assert torch.equal(rounded, packed.dequantize(dtype))


def test_sum_is_rounded_once() -> None:
    w, a, b = operands(8, 64, 4, torch.bfloat16)
    exact = w.double() + (b.double() @ a.double()) * SCALING
    assert torch.equal(lora_weight(w, a, b, SCALING), exact.float().bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lora_weight_ref(w, a, b, SCALING), exact.float().bfloat16())


def test_gradients_of_the_weight() -> None:
    w, a, b = (t.double().requires_grad_() for t in operands(6, 8, 2))
    assert torch.autograd.gradcheck(lambda w, a, b: lora_weight(w, a, b, SCALING), (w, a, b))


@pytest.mark.parametrize("activation", [None, INT8], ids=["plain", "int8"])
@pytest.mark.parametrize("with_adapter", [False, True])
def test_linear_and_its_gradients(activation: Format | None, with_adapter: bool) -> None:
    w, a, b = (t.requires_grad_() for t in operands(24, 64, 4))
    bias, x = torch.randn(24, requires_grad=True), torch.randn(2, 5, 64, requires_grad=True)
    dy = torch.randn(2, 5, 24)
    adapter = (a, b, SCALING) if with_adapter else None
    y = fake_quantized_linear(x, w, bias, weight_format=INT4_G32, activation=activation, adapter=adapter)
    leaves = (x, w, bias, a, b) if with_adapter else (x, w, bias)
    found = torch.autograd.grad(y, leaves, dy)
    effective = w + (b @ a) * SCALING if with_adapter else w
    rounded = effective + (INT4_G32.fake_quantize(effective.detach()) - effective).detach()
    x_rounded = x
    if activation is not None:
        x_rounded = x + (activation.fake_quantize(x.detach().view(-1, 64)).view(x.shape) - x).detach()
    need = F.linear(x_rounded, rounded, bias)
    torch.testing.assert_close(y, need, rtol=1e-5, atol=1e-4)
    for one, other in zip(found, torch.autograd.grad(need, leaves, dy), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_linear_needs_no_gradient_of_the_weight() -> None:
    """A frozen weight: no tensor of its size is made in the backward pass but the rounded weight."""
    w, a, b = operands(32, 64, 4)
    a.requires_grad_(), b.requires_grad_()
    x = torch.randn(3, 64)
    y = fake_quantized_linear(x, w, weight_format=NF4, adapter=(a, b, SCALING))
    made: list[tuple[int, ...]] = []

    class Shapes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.append(tuple(out.shape) if isinstance(out, Tensor) else ())
            return out

    with Shapes():
        y.sum().backward()
    assert (32, 64) not in made and a.grad is not None and b.grad is not None


def test_mixed_types_and_autocast() -> None:
    w, a, b = operands(16, 64, 4)
    a, b = (t.detach().requires_grad_() for t in (a, b))
    x = torch.randn(3, 64)
    for base, data in ((w, x.bfloat16()), (w.bfloat16(), x.bfloat16()), (w.bfloat16(), x)):
        y = fake_quantized_linear(data, base, weight_format=NF4, adapter=(a, b, SCALING))
        need = F.linear(data, fake_quantize_lora_ref(base, a, b, SCALING, NF4, data.dtype))
        assert y.dtype == data.dtype and torch.equal(y, need)
        y.float().sum().backward()
        assert a.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fake_quantized_linear(x, w, weight_format=NF4, adapter=(a, b, SCALING))
    assert torch.equal(
        y, F.linear(x.bfloat16(), fake_quantize_lora_ref(w, a, b, SCALING, NF4, torch.bfloat16))
    )


def test_into_a_buffer() -> None:
    w, a, b = operands(8, 64, 4)
    buffer = torch.zeros(12, 64, dtype=torch.bfloat16)
    out = fake_quantize_lora(w, a, b, SCALING, NF4, out=buffer[2:10])
    assert out.data_ptr() == buffer[2].data_ptr() and buffer[:2].eq(0).all() and buffer[10:].eq(0).all()
    assert torch.equal(buffer[2:10], fake_quantize_lora(w, a, b, SCALING, NF4, torch.bfloat16))
    for wrong in (torch.empty(64, 8).t(), torch.empty(8, 65)):
        with pytest.raises(BadInput, match="contiguous rows"):
            fake_quantize_lora(w, a, b, SCALING, NF4, out=wrong)


def test_opcheck() -> None:
    w, a, b = operands(8, 64, 4)
    text = module.text_of_format(INT4_G32)
    torch.library.opcheck(module._fake_quantize, (w, text, torch.bfloat16))
    for format in (None, text):
        torch.library.opcheck(module._fake_quantize_lora, (w, a, b, SCALING, format, torch.float32))
        torch.library.opcheck(module._fake_quantize_lora_into, (w, a, b, SCALING, format, torch.empty(8, 64)))


def test_compiles_without_a_break() -> None:
    w, a, b = operands(16, 64, 4)
    x = torch.randn(3, 64, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return fake_quantized_linear(x, w, weight_format=NF4, activation=INT8, adapter=(a, b, SCALING))

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-6, atol=1e-5)
    (found,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(layer(x).sum(), x)[0], rtol=1e-6, atol=1e-5)


# The kernels, on a GPU or under the interpreter, which cuts bfloat16 off: exact in float32 and float16.


@pytest.mark.parametrize(
    "format",
    [NF4, FP4, INT4_G32, INT4_G64_ZP, INT4, INT8, INT8_ZP, INT8_TENSOR, NF4_DQ, E4M3_ROW],
    ids=names_of,
)
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.gpu
@pytest.mark.interpret
def test_rounding_kernel_equals_the_definition(format: Format, kernel_device: str) -> None:
    for i, shape in enumerate([(3, 128), (2, 3, 64), (5, 33), (131,)]):
        if format == NF4_DQ and kernel_device == "cpu":
            continue  # two ops, each tested in its own file
        dtype = (torch.float32, torch.float16)[i % 2]
        x = operands(*(max(1, s) for s in (shape[0], 1)), 1)[0].new_empty(shape).normal_().to(dtype)
        x = x.to(kernel_device)
        for out in (torch.float32, torch.float16):
            assert torch.equal(launch(x, format, out), fake_quantize_ref(x, format, out))
    x = torch.randn(4, 64, device=kernel_device)
    x[1, 2] = torch.nan
    found, need = launch(x, format, x.dtype), fake_quantize_ref(x, format, x.dtype)
    torch.testing.assert_close(found, need, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(48, 128, 4), (70, 192, 16), (33, 96, 100), (5, 37, 3)], ids=str)
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.gpu
@pytest.mark.interpret
def test_weight_kernel(shape: tuple[int, int, int], dtype: torch.dtype, kernel_device: str) -> None:
    """The effective weight is within a rounding of the definition; rounded at once, it is the same."""
    w, a, b = (t.to(kernel_device) for t in operands(*shape, dtype))
    effective = launch_effective(w, a, b, SCALING, None, dtype)
    exact = w.double() + (b.double() @ a.double()) * SCALING
    eps = torch.finfo(dtype).eps
    bound = eps * exact.abs() + 2.0**-21 * (1 + shape[2]) * (b.double().abs() @ a.double().abs() + w.abs())
    assert effective.dtype == dtype and ((effective - exact).abs() <= bound).all()
    for format in (NF4, INT4_G32, INT4_G64_ZP, INT8, replace(INT4_G32, block=(1, 8))):
        out = torch.float16 if shape[0] % 2 else torch.float32
        rounded = launch_effective(w, a, b, SCALING, format, out)
        assert torch.equal(rounded, fake_quantize_ref(effective, format, out))


@pytest.mark.gpu
@pytest.mark.interpret
def test_weight_kernel_takes_strides_nan_and_refuses_nothing(kernel_device: str) -> None:
    w, a, b = (t.to(kernel_device) for t in operands(32, 128, 16))
    wide = torch.cat([w, w], 1)[:, :128]
    need = launch_effective(w, a, b, SCALING, INT4_G32, w.dtype)
    assert torch.equal(launch_effective(wide, a, b, SCALING, INT4_G32, w.dtype), need)
    assert not takes_lora(w, a.t().contiguous().t(), b) and not takes_lora(w.double(), a, b)
    transposed = launch_effective(w, a.t().contiguous().t(), b, SCALING, INT4_G32, w.dtype)
    assert transposed.shape == w.shape
    w[3, 5] = torch.nan
    for format in (NF4, INT4_G32):
        found = launch_effective(w, a, b, SCALING, format, w.dtype)
        assert found[3].isnan().sum() == (64 if format == NF4 else 32)
    assert rounds_in_tile(NF4, 128, w.dtype) and not rounds_in_tile(NF4_DQ, 128, w.dtype)


# On a GPU.


@pytest.mark.parametrize("format", [INT4_G32, INT4_G64_ZP, NF4, INT8, NF4_DQ], ids=names_of)
@pytest.mark.parametrize("adapters", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.gpu
def test_cuda_in_bfloat16_training_equals_packing(format: Format, adapters: torch.dtype) -> None:
    for N, K, r in ((1024, 4096, 16), (1000, 4128, 8), (256, 1024, 64)):
        w, a, b = (t.cuda() for t in operands(N, K, r))
        w, a, b = (w * 0.02).bfloat16(), a.to(adapters), (b * 0.01).to(adapters)
        effective = lora_weight(w, a, b, SCALING)
        need = lora_weight_ref(w, a, b, SCALING)
        assert (effective != need).float().mean() < 1e-3  # another order of the float32 sum
        torch.testing.assert_close(effective, need, rtol=2**-7, atol=1e-6)
        rounded = fake_quantize_lora(w, a, b, SCALING, format)
        assert torch.equal(rounded, format.fake_quantize(effective))
        assert torch.equal(fake_quantize(effective, format), rounded)


@pytest.mark.gpu
def test_cuda_every_tile_gives_the_same_rounding() -> None:
    w, a, b = (t.cuda().bfloat16() for t in operands(256, 512, 16))
    for tile in (WeightTile(32, 128, 4), WeightTile(128, 128, 8), WeightTile(64, 256, 4)):
        out = torch.empty_like(w)
        launch_lora(w, a, b, SCALING, out, INT4_G32, tile)
        effective = torch.empty_like(w)
        launch_lora(w, a, b, SCALING, effective, None, tile)
        assert torch.equal(out, INT4_G32.fake_quantize(effective))


@pytest.mark.multi
def test_cuda_second_device() -> None:
    w, a, b = (t.to("cuda:1") for t in operands(32, 128, 16))
    assert torch.cuda.current_device() == 0
    need = fake_quantize_ref(lora_weight(w, a, b, SCALING), NF4, w.dtype)
    assert torch.equal(fake_quantize_lora(w, a, b, SCALING, NF4), need)
