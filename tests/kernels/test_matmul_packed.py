"""Products with packed weights against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from fewbits.formats import E4M3, E4M3_1X128, E5M2, FORMATS, INT4_G64, INT8, NF4, Format
from fewbits.kernels.lora_linear import lora_linear, lora_linear_ref
from fewbits.kernels.matmul_packed import Operands, packed_linear, packed_linear_ref

EVERY = pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)


def packed_weight(format: Format, shape: tuple[int, int] = (24, 64), dtype: torch.dtype = torch.float32):
    return format.quantize(torch.randn(shape, dtype=dtype))


@EVERY
def test_decode_is_exact(format: Format) -> None:
    """With x = I each sum has one term, so the product is the decoded weight itself."""
    weight = packed_weight(format)
    assert torch.equal(packed_linear(torch.eye(64), weight), weight.dequantize().T)


@EVERY
def test_gradients_equal_the_definition(format: Format) -> None:
    weight = packed_weight(format)
    bias = torch.randn(24)
    results = []
    for function in (packed_linear, packed_linear_ref):
        x, b = (
            torch.linspace(-2, 2, 3 * 5 * 64).view(3, 5, 64).requires_grad_(),
            bias.clone().requires_grad_(),
        )
        y = function(x, weight, b)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
        results.append((y, x.grad, b.grad))
    (y, dx, db), (y_ref, dx_ref, db_ref) = results
    assert torch.equal(y, y_ref)
    torch.testing.assert_close(dx, dx_ref, rtol=24**0.5 * 2**-23, atol=24 * 2**-23)  # 24 terms, another order
    torch.testing.assert_close(db, db_ref, rtol=15**0.5 * 2**-23, atol=15 * 2**-23)


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (2, 0, 64), (7, 64), (64,)])
def test_odd_input_shapes(shape: tuple[int, ...]) -> None:
    weight = packed_weight(NF4)
    x = torch.randn(shape, requires_grad=True)
    y = packed_linear(x, weight)
    assert y.shape == (*shape[:-1], 24)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


@pytest.mark.parametrize("activation", [None, INT8, E4M3, E4M3_1X128])
@pytest.mark.parametrize("gradient", [None, E5M2])
def test_operands_are_rounded_along_the_sum(activation: Format | None, gradient: Format | None) -> None:
    weight = packed_weight(NF4)
    x = torch.randn(2, 6, 64, requires_grad=True)
    y = packed_linear(x, weight, activation=activation, gradient=gradient, weight_operand=E4M3)
    decoded, rows = weight.dequantize(), x.detach().reshape(12, 64)
    rounded = activation.fake_quantize(rows) if activation else rows
    assert torch.equal(y.reshape(12, 24), rounded @ E4M3.fake_quantize(decoded).T)
    dy = torch.randn_like(y)
    y.backward(dy)
    dy_rows = dy.reshape(12, 24)
    dy_rows = gradient.fake_quantize(dy_rows) if gradient else dy_rows
    torch.testing.assert_close(
        x.grad.reshape(12, 64), dy_rows @ E4M3.fake_quantize(decoded), rtol=1e-6, atol=1e-5
    )


def test_nothing_decoded_is_kept_for_the_backward_pass() -> None:
    weight = packed_weight(INT4_G64, (256, 256))
    saved: list[Tensor] = []
    x = torch.randn(2, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        packed_linear(x, weight).sum()
    assert sum(t.numel() * t.element_size() for t in saved) <= weight.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_low_precision_models_compute_in_that_dtype(dtype: torch.dtype) -> None:
    weight = packed_weight(NF4)
    x = torch.randn(4, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y = packed_linear(x, weight, torch.randn(24))
    assert y.dtype == dtype
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    assert packed_linear(x.to(dtype), weight).dtype == dtype


def lora_case(dropout: bool, dtype: torch.dtype = torch.float64):
    x = torch.randn(2, 3, 64, dtype=dtype, requires_grad=True)
    a, b = (torch.randn(s, dtype=dtype, requires_grad=True) for s in ((4, 64), (24, 4)))
    bias = torch.randn(24, dtype=dtype, requires_grad=True)
    mask = (torch.rand(2, 3, 64) > 0.5).to(dtype) * 2
    return x, a, b, bias, (lambda t: t * mask) if dropout else None


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_lora_linear_equals_its_definition_and_gradcheck(dropout: bool, plain: bool) -> None:
    x, a, b, bias, drop = lora_case(dropout)
    packed = packed_weight(NF4, dtype=torch.float64)
    decoded = packed.dequantize()

    def ours(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        dropped = drop(x) if drop else None
        return lora_linear(x, decoded if plain else packed, bias, a, b, scaling=0.7, dropped=dropped)

    expected = lora_linear_ref(x, decoded, bias, a, b, scaling=0.7, dropped=drop(x) if drop else None)
    torch.testing.assert_close(ours(x, a, b, bias), expected, rtol=1e-12, atol=1e-12)
    assert gradcheck(ours, (x, a, b, bias))


def test_lora_branch_keeps_the_precision_of_its_weights() -> None:
    """Adapters in float32 over a bfloat16 model: the branch is float32 and rounded once, in the sum."""
    x, a, b, bias, _ = lora_case(False, torch.float32)
    packed = packed_weight(NF4, dtype=torch.bfloat16)
    xb = x.detach().bfloat16().requires_grad_()
    y = lora_linear(xb, packed, bias, a, b, scaling=0.5)
    base = packed_linear(xb, packed, bias)
    branch = 0.5 * (xb.float() @ a.T) @ b.T
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, (base.float() + branch).bfloat16(), rtol=2**-7, atol=0)
    y.sum().backward()
    assert (xb.grad.dtype, a.grad.dtype, b.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = lora_linear(x, packed, bias, a, b, scaling=0.5)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "format", [NF4, INT4_G64, FORMATS["nf4_dq"], FORMATS["float8_e4m3_row"]], ids=lambda f: f.name
)
def test_compiles_to_one_graph(format: Format) -> None:
    packed = packed_weight(format)
    x, a, b, bias, _ = lora_case(False, torch.float32)

    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return lora_linear(x, packed, bias, a, b, scaling=0.5) + packed_linear(x, packed, activation=INT8)

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        for t in (x, a, b):
            t.grad = None
        y = function(x, a, b)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, a.grad, b.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-5)


def test_operands_are_a_value() -> None:
    assert Operands(activation=INT8) == Operands(activation=INT8) != Operands()
