"""Products with packed weights against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbits.formats import E4M3, E4M3_1X128, E5M2, FORMATS, INT4_G64, INT8, NF4, Format
from fewbits.kernels.product.matmul_packed import Operands, packed_linear, packed_linear_ref
from tests.every_format import every_format


def packed_weight(format: Format, shape: tuple[int, int] = (24, 64), dtype: torch.dtype = torch.float32):
    return format.quantize(torch.randn(shape, dtype=dtype))


@every_format
def test_decode_is_exact(format: Format) -> None:
    """With x = I each sum has one term, so the product is the decoded weight itself."""
    weight = packed_weight(format)
    assert torch.equal(packed_linear(torch.eye(64), weight), weight.dequantize().T)


@every_format
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


@pytest.mark.parametrize(
    "format", [NF4, INT4_G64, FORMATS["nf4_dq"], FORMATS["float8_e4m3_row"]], ids=lambda f: f.name
)
def test_compiles_to_one_graph(format: Format) -> None:
    packed = packed_weight(format)
    x = torch.randn(3, 64, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return packed_linear(x, packed, activation=INT8)

    y = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, step(x), rtol=1e-6, atol=1e-5)
    y.sum().backward()
    assert x.grad is not None


def test_operands_are_a_value() -> None:
    assert Operands(activation=INT8) == Operands(activation=INT8) != Operands()
