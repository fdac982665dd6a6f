"""Linear modules in few bits, as modules: parameters, casts, copies, state, representation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fewbits.formats import E4M3, E5M2, INT4_G64, INT8, NF4, NF4_DQ, Format
from fewbits.kernels.product.matmul_packed import Operands
from fewbits.nn.linear import LowPrecisionLinear, QuantizedLinear
from fewbits.recipes.recipe import Rule
from tests.every_format import every_format


@every_format
@pytest.mark.parametrize("shape", [(64, 128), (5, 7)])
def test_every_format_holds_a_linear(format: Format, shape: tuple[int, int]) -> None:
    out_features, in_features = shape
    linear = nn.Linear(in_features, out_features)
    layer = QuantizedLinear.from_linear(linear, Rule(weight=format))
    expected = format.fake_quantize(linear.weight.detach())
    assert torch.equal(layer.dequantize(), expected)
    x = torch.randn(3, in_features)
    assert torch.equal(layer(x), nn.functional.linear(x, expected, linear.bias))
    assert layer.bias is linear.bias
    layout = format.layout((out_features, in_features))
    assert [n for n, _ in layer.named_parameters()] == [f"weight_{part}" for part in layout] + ["bias"]
    assert all(p.requires_grad == (n == "bias") for n, p in layer.named_parameters())
    assert sum(
        p.numel() * p.element_size() for n, p in layer.named_parameters() if n != "bias"
    ) == format.nbytes(shape)

    empty = QuantizedLinear(in_features, out_features, format, bias=True, device="meta")
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(empty(x), layer(x))


@pytest.mark.parametrize("format", [NF4_DQ, INT8, E4M3], ids=lambda f: f.name)
def test_casts_and_moves_leave_the_stored_parts_alone(format: Format) -> None:
    layer = QuantizedLinear.from_linear(nn.Linear(64, 32), Rule(weight=format))
    before = {n: t.clone() for n, t in layer.packed.parts.items()}
    kept = dict(layer.named_parameters())
    layer.to(torch.bfloat16).half().double().bfloat16()
    assert layer.dtype == torch.bfloat16
    assert layer.bias.dtype == torch.bfloat16
    for name, part in layer.packed.parts.items():
        assert part.dtype == before[name].dtype
        assert torch.equal(part.float().nan_to_num(), before[name].float().nan_to_num())
    assert layer(torch.randn(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert layer.dequantize().dtype == torch.bfloat16
    layer.cpu()
    assert {n for n, p in layer.named_parameters() if p is kept[n]} >= {f"weight_{n}" for n in before}
    layer.to("meta")
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    layer.to_empty(device="cpu")
    assert {p.device.type for p in layer.parameters()} == {"cpu"}


def test_copies_pickles_and_representation(tmp_path) -> None:
    layer = QuantizedLinear.from_linear(nn.Linear(64, 32, bias=False), Rule(weight=NF4, activation=INT8))
    twin = copy.deepcopy(layer)
    assert torch.equal(twin.dequantize(), layer.dequantize())
    assert twin.packed.codes.data_ptr() != layer.packed.codes.data_ptr()
    torch.save(layer, tmp_path / "layer.pt")
    x = torch.randn(2, 64)
    assert torch.equal(torch.load(tmp_path / "layer.pt", weights_only=False)(x), layer(x))
    assert (
        repr(layer)
        == "QuantizedLinear(in_features=64, out_features=32, bias=False, weight=nf4, activation=int8)"
    )


def test_load_packed_takes_only_what_fits() -> None:
    layer = QuantizedLinear(64, 32, NF4)
    layer.load_packed(NF4.quantize(torch.ones(32, 64)))
    assert torch.equal(layer.dequantize(), torch.ones(32, 64))
    with pytest.raises(
        ValueError, match=r"this layer holds nf4 of \(32, 64\); it was given int4_g64 of \(32, 64\)"
    ):
        layer.load_packed(INT4_G64.quantize(torch.ones(32, 64)))
    with pytest.raises(ValueError, match=r"it was given nf4 of \(16, 64\)"):
        layer.load_packed(NF4.quantize(torch.ones(16, 64)))
    with pytest.raises(ValueError, match="use LowPrecisionLinear"):
        QuantizedLinear.from_linear(nn.Linear(2, 2), Rule())


def test_low_precision_linear_has_the_linears_own_parameters() -> None:
    linear = nn.Linear(64, 32)
    rule = Rule(activation=E4M3, weight_operand=E4M3, gradient=E5M2)
    layer = LowPrecisionLinear.from_linear(linear, rule)
    assert isinstance(layer, nn.Linear)
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert layer.operands == Operands(activation=E4M3, weight_operand=E4M3, gradient=E5M2)
    layer(torch.randn(4, 64)).sum().backward()
    assert linear.weight.grad is not None
    assert "activation=float8_e4m3, gradient=float8_e5m2, weight_operand=float8_e4m3" in repr(layer)


def test_bias_trains_and_keeps_its_gradient_through_a_cast() -> None:
    layer = QuantizedLinear.from_linear(nn.Linear(64, 32), Rule(weight=NF4))
    layer(torch.randn(4, 64)).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((32,), 4.0))
    layer.bfloat16()
    assert layer.bias.grad.dtype == torch.bfloat16
