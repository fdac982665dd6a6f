"""A packed layer's weight as other libraries see it: read decoded, assigned packed, never changed in vain."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fewbits.errors import Unsupported
from fewbits.formats import INT8, NF4
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import Rule


def layer(format=NF4) -> QuantizedLinear:
    torch.manual_seed(0)
    return QuantizedLinear.from_linear(nn.Linear(64, 32), Rule(weight=format))


def test_it_reads_as_the_decoded_weight():
    linear = layer()
    weight = linear.weight
    assert isinstance(linear, nn.Linear) and not isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == ((32, 64), torch.float32, "cpu")
    dense, x = linear.dequantize(), torch.randn(3, 64, requires_grad=True)
    assert torch.equal(weight.detach().clone(), dense) and torch.equal(weight.t() + 0, dense.t())
    nn.functional.linear(x, weight, linear.bias).sum().backward()
    torch.testing.assert_close(x.grad, dense.sum(0).expand(3, 64))
    torch.testing.assert_close(nn.functional.linear(x, weight, linear.bias), linear(x))
    assert set(linear.state_dict()) == {*linear.stored(), "bias"} and "NF4" in repr(weight).upper()


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.mul_(2),
        lambda w: w.data.add_(1),
        lambda w: w.copy_(torch.zeros(32, 64)),
        nn.init.zeros_,
        lambda w: w.__setitem__(0, 1.0),
        lambda w: torch.add(torch.ones(32, 64), 1, out=w),
        lambda w: w.data.fill_(0),
    ],
)
def test_what_would_be_lost_is_refused(change):
    linear = layer()
    before = linear.dequantize()
    try:
        with torch.no_grad():
            change(linear.weight)
    except Unsupported as error:
        assert "layer.pack(new_weight)" in str(error)
    else:
        pytest.fail("a change of decoded numbers was lost in silence")
    finally:
        assert torch.equal(linear.dequantize(), before)


def test_assigning_packs_and_subtracting_what_was_added_brings_the_bits_back():
    linear = layer()
    stored, deltas = linear.stored(), [torch.randn(32, 64) for _ in range(2)]
    for delta in deltas:
        wanted = QuantizedLinear.from_linear(nn.Linear(64, 32), Rule(weight=NF4))
        wanted.pack(linear.dequantize() + delta)
        with pytest.warns(UserWarning, match="rounded to it again"):
            linear.weight.data += delta
        assert torch.equal(linear.dequantize(), wanted.dequantize())
    for delta in reversed(deltas):
        linear.weight.data -= delta
    assert all(torch.equal(part, stored[name]) for name, part in linear.stored().items())
    with pytest.warns(UserWarning):  # nothing was added: an ordinary difference, rounded
        linear.weight.data -= deltas[0]
    wanted.load_stored(stored)
    wanted.pack(wanted.dequantize() - deltas[0])
    assert torch.equal(linear.dequantize(), wanted.dequantize())


def test_the_attribute_itself_cannot_be_replaced():
    linear = layer(INT8)
    for value in (nn.Parameter(torch.zeros(32, 64)), torch.zeros(32, 64)):
        with pytest.raises((KeyError, AttributeError)):
            linear.weight = value


@pytest.mark.parametrize("bias", [True, False])
def test_the_output_may_be_written_into(bias):
    """PEFT's aLoRA adds to some rows of it, in place, while training."""
    torch.manual_seed(0)
    linear = QuantizedLinear.from_linear(nn.Linear(64, 32, bias=bias), Rule(weight=NF4))
    x = torch.randn(2, 3, 64, requires_grad=True)
    y = linear(x)
    y.view(-1, 32)[torch.tensor([0, 1, 0, 1, 0, 0]).bool()] *= 2
    y.sum().backward()
    rows = torch.tensor([[1.0, 2.0, 1.0], [2.0, 1.0, 1.0]])[..., None]
    torch.testing.assert_close(x.grad, rows * linear.dequantize().sum(0))


@pytest.mark.parametrize("kind", ["packed", "few bits", "fake quantised", "packed with an adapter"])
def test_a_host_may_add_to_the_output_of_any_layer_in_place(kind):
    """Falcon's layers add attention to the MLP's output that way; a view from a Function refuses it."""
    from fewbits.formats import E4M3
    from fewbits.kernels.product.lora_linear import lora_linear
    from fewbits.nn.linear import LowPrecisionLinear

    torch.manual_seed(0)
    plain = nn.Linear(64, 32)
    x = torch.randn(2, 3, 64, requires_grad=True)
    a, b = torch.randn(4, 64), torch.randn(32, 4)
    packed = QuantizedLinear.from_linear(plain, Rule(weight=NF4))
    layer = {
        "packed": packed,
        "few bits": LowPrecisionLinear.from_linear(plain, Rule(activation=E4M3)),
        "fake quantised": FakeQuantizedLinear.from_linear(plain, NF4),
        "packed with an adapter": lambda x: lora_linear(x, packed.packed, plain.bias, a, b, scaling=1.0),
    }[kind]
    expected = layer(x) + x.sum(-1, keepdim=True)
    y = layer(x)
    y += x.sum(-1, keepdim=True)
    assert torch.equal(y, expected)
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (y, expected)]
    assert torch.equal(*grads)
