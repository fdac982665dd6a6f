"""Products of rounded operands with a trained weight."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from fewbits.formats import E4M3, E4M3_1X128, E4M3_ROW, E5M2, E5M2_ROW, INT8, Format
from fewbits.kernels.product.matmul_operands import operand_linear, operand_linear_ref
from fewbits.kernels.product.matmul_packed import Operands


def case(dtype: torch.dtype = torch.float32):
    return (
        torch.randn(2, 6, 32, dtype=dtype, requires_grad=True),
        torch.randn(16, 32, dtype=dtype, requires_grad=True),
        torch.randn(16, dtype=dtype, requires_grad=True),
    )


def test_without_formats_it_is_linear() -> None:
    x, w, b = case(torch.float64)
    assert torch.equal(operand_linear(x, w, b), torch.nn.functional.linear(x, w, b))
    assert gradcheck(operand_linear, (x, w, b))


@pytest.mark.parametrize("forward", [INT8, E4M3, E4M3_ROW, E4M3_1X128], ids=lambda f: f.name)
@pytest.mark.parametrize("backward", [None, E5M2, E5M2_ROW], ids=lambda f: f.name if f else "plain")
def test_each_product_sees_operands_rounded_along_its_sum(forward: Format, backward: Format | None) -> None:
    x, w, b = case()
    y = operand_linear(x, w, b, weight_operand=forward, activation=forward, gradient=backward)
    rows, wd = x.detach().reshape(12, 32), w.detach()

    def q(t: torch.Tensor, format: Format | None) -> torch.Tensor:
        return t if format is None else format.fake_quantize(t.contiguous())

    near = {"rtol": 1e-6, "atol": 1e-5}  # the same products, summed in another order
    torch.testing.assert_close(y.reshape(12, 16), q(rows, forward) @ q(wd, forward).T + b, **near)
    dy = torch.randn_like(y)
    y.backward(dy)
    dy_rows = dy.reshape(12, 16)
    torch.testing.assert_close(x.grad.reshape(12, 32), q(dy_rows, backward) @ q(wd.T, forward).T, **near)
    torch.testing.assert_close(w.grad, q(dy_rows.T, backward) @ q(rows.T, forward).T, **near)
    torch.testing.assert_close(b.grad, dy_rows.sum(0), **near)


def test_forward_equals_the_definition() -> None:
    x, w, b = case()
    operands = Operands(activation=E4M3_ROW, weight_operand=E4M3_ROW)
    expected = operand_linear_ref(x, w, b, operands=operands)
    y = operand_linear(x, w, b, activation=E4M3_ROW, weight_operand=E4M3_ROW)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-5)


def test_master_weight_in_float32_under_autocast() -> None:
    x, w, b = case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = operand_linear(x, w, b, activation=E4M3)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert w.grad.dtype == torch.float32


def test_compiles_to_one_graph() -> None:
    x, w, b = case()

    def step(x: torch.Tensor) -> torch.Tensor:
        return operand_linear(x, w, b, activation=E4M3_ROW, weight_operand=E4M3, gradient=E5M2)

    y = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, step(x), rtol=1e-6, atol=1e-5)
    y.sum().backward()
    assert w.grad is not None
