"""A frozen linear with its low-rank branch, against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from fewbits.formats import FORMATS, INT4_G64, NF4, Format
from fewbits.kernels.product.lora_linear import lora_linear, lora_linear_ref
from fewbits.kernels.product.matmul_packed import packed_linear


def packed_weight(format: Format, shape: tuple[int, int] = (24, 64), dtype: torch.dtype = torch.float32):
    return format.quantize(torch.randn(shape, dtype=dtype))


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


@pytest.mark.parametrize("dropout", [False, True])
def test_nothing_decoded_is_kept_for_the_backward_pass(dropout: bool) -> None:
    weight = packed_weight(INT4_G64, (256, 256))
    saved: list[Tensor] = []
    x, a, b = torch.randn(2, 256, requires_grad=True), torch.randn(4, 256), torch.randn(256, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        lora_linear(x, weight, None, a, b, scaling=1.0, dropped=x * 0.5 if dropout else None)
    assert not any(t.is_floating_point() and t.numel() >= 256 * 256 for t in saved)


@pytest.mark.parametrize(
    "format", [NF4, INT4_G64, FORMATS["nf4_dq"], FORMATS["float8_e4m3_row"]], ids=lambda f: f.name
)
def test_compiles_to_one_graph(format: Format) -> None:
    packed = packed_weight(format)
    x, a, b, bias, _ = lora_case(False, torch.float32)

    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return lora_linear(x, packed, bias, a, b, scaling=0.5)

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        for t in (x, a, b):
            t.grad = None
        y = function(x, a, b)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, a.grad, b.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-5)
