"""Operands without rows, outputs or inputs: shapes, dtypes and gradients of plain torch, or one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbits.errors import BadInput
from fewbits.formats import FORMATS, Format
from fewbits.inference.stochastic.error import product_error
from fewbits.kernels.codec.quantize import quantize
from fewbits.kernels.codec.quantize_float8 import quantize_rows
from fewbits.kernels.decoder.gated_activation import gated_activation
from fewbits.kernels.decoder.rmsnorm import rmsnorm
from fewbits.kernels.loss.linear_cross_entropy import linear_cross_entropy
from fewbits.kernels.loss.linear_cross_entropy_float8 import head_operands, linear_cross_entropy_float8
from fewbits.kernels.loss.linear_log_probs import linear_log_probs
from fewbits.kernels.product.fake_quantize import fake_quantized_linear, lora_weight
from fewbits.kernels.product.lora_linear import lora_linear
from fewbits.kernels.product.matmul_float8 import float8_linear, float8_weight, weight_scale
from fewbits.kernels.product.matmul_operands import operand_linear
from fewbits.kernels.product.matmul_packed import packed_linear
from fewbits.kernels.stochastic.matmul import sc_matmul
from fewbits.nn.attention import attention, attention_ref
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.linear import LowPrecisionLinear, QuantizedLinear
from fewbits.nn.stochastic.linear import StochasticLinear
from fewbits.nn.stochastic.product import stochastic_product
from fewbits.training.optimizer import AdamW8bit
from tests.every_format import every_format

INT8, NF4, E4M3, STOCHASTIC = (FORMATS[name] for name in ("int8", "nf4", "float8_e4m3", "stochastic"))
ROUNDED = {"activation": INT8, "gradient": E4M3, "weight_operand": INT8}
SIZES = [  # leading axes of x, N outputs, K inputs
    ((0,), 16, 32),
    ((3,), 0, 32),
    ((3,), 16, 0),
    ((0,), 0, 0),
    ((2, 0), 16, 32),
    ((2, 3), 0, 32),
    ((2, 3), 16, 0),
    ((0, 2), 0, 32),
    ((3,), 0, 0),
]
sizes = pytest.mark.parametrize(
    "lead, N, K", SIZES, ids=[f"{math.prod(lead)}x{N}x{K}-{len(lead) + 1}d" for lead, N, K in SIZES]
)


def compare(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Shapes, dtypes, values (there are none, or a bias) and gradients; the rounding of a few is allowed."""
    mine, theirs = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    y, want = ours(*mine), plain(*theirs)
    assert (y.shape, y.dtype) == (want.shape, want.dtype)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-6)
    y.sum().backward()
    want.sum().backward()
    for tensor, other in zip(mine, theirs, strict=True):
        if other.grad is not None:
            torch.testing.assert_close(tensor.grad, other.grad, rtol=0, atol=1e-6)


def operands(lead: tuple[int, ...], N: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(*lead, K), torch.randn(N, K), torch.randn(N)


@every_format
def test_packed_and_adapted_linears(format: Format) -> None:
    for size in [] if format == STOCHASTIC else SIZES:
        packed_and_adapted(format, *size)


def packed_and_adapted(format: Format, lead: tuple[int, ...], N: int, K: int) -> None:
    x, w, bias = operands(lead, N, K)
    packed, a, b = quantize(w, format), torch.randn(2, K), torch.zeros(N, 2)
    assert packed.dequantize().shape == w.shape
    compare(lambda x, bias: packed_linear(x, packed, bias), lambda x, bias: F.linear(x, w, bias), x, bias)
    compare(
        lambda x, bias, a, b: lora_linear(x, packed, bias, a, b, scaling=2.0),
        lambda x, bias, a, b: F.linear(x, w, bias) + 2 * F.linear(F.linear(x, a), b),
        x,
        bias,
        a,
        b,
    )


@sizes
def test_linears_with_rounded_operands(lead: tuple[int, ...], N: int, K: int) -> None:
    x, w, bias = operands(lead, N, K)
    packed, a, b = quantize(w, NF4), torch.randn(2, K), torch.zeros(N, 2)
    compare(
        lambda x, bias: packed_linear(x, packed, bias, **ROUNDED),
        lambda x, bias: F.linear(x, w, bias),
        x,
        bias,
    )
    compare(partial(operand_linear, **ROUNDED), F.linear, x, w, bias)
    made = partial(fake_quantized_linear, weight_format=NF4, activation=E4M3)
    compare(made, F.linear, x, w, bias)
    compare(
        lambda x, w, bias, a, b: made(x, w, bias, adapter=(a, b, 2.0)),
        lambda x, w, bias, a, b: F.linear(x, w + 2 * b @ a, bias),
        x,
        w,
        bias,
        a,
        b,
    )
    compare(lambda w, a, b: lora_weight(w, a, b, 2.0), lambda w, a, b: w + 2 * b @ a, w, a, b)


@sizes
def test_float8_products_and_norms(lead: tuple[int, ...], N: int, K: int) -> None:
    x, w, _ = operands(lead, N, K)
    scale = weight_scale(w)
    w8 = float8_weight(w, inverse_scale=1 / scale)
    assert float8_weight(w, inverse_scale=1 / scale, transposed=True).shape == (K, N)
    y = float8_linear(*quantize_rows(x.reshape(math.prod(lead), K)), w8, scale, out_dtype=torch.float32)
    assert torch.equal(y, torch.zeros(math.prod(lead), N))
    compare(gated_activation, lambda x, u: F.silu(x) * u, x, torch.randn_like(x))
    if not x.numel():
        compare(lambda x, w: rmsnorm(x, w, 1e-6), lambda x, w: x * w, x, torch.randn(K))


@sizes
def test_layers(lead: tuple[int, ...], N: int, K: int) -> None:
    x, _, _ = operands(lead, N, K)
    linear = nn.Linear(K, N)
    plain = SimpleNamespace(weight=NF4, activation=None, gradient=None, weight_operand=None)
    rounded = SimpleNamespace(weight=None, **ROUNDED)
    made = [
        QuantizedLinear.from_linear(linear, plain),
        LowPrecisionLinear.from_linear(linear, rounded),
        FakeQuantizedLinear.from_linear(linear, NF4),
        StochasticLinear.from_linear(linear, STOCHASTIC),
        StochasticLinear.from_linear(linear, STOCHASTIC, int8=True),
        StochasticLinear.from_linear(linear, STOCHASTIC, smooth_scales=torch.ones(K)),
    ]
    for classify in ("row", "chunk"):  # two lengths of streams
        made.append(StochasticLinear.from_linear(linear, STOCHASTIC))
        made[-1].set_lengths([[64], [32]], [1.0], classify)
    for layer in made:
        layer.bias = linear.bias
        compare(layer, linear, x)
        with torch.no_grad():
            assert layer(x).shape == (*lead, N)


@sizes
def test_stochastic_products(lead: tuple[int, ...], N: int, K: int) -> None:
    x, w, _ = operands(lead, N, K)
    x = x.reshape(math.prod(lead), K)
    for granularity in ("per_row", "per_tensor"):
        assert torch.equal(sc_matmul(x, w, granularity), x @ w.T)
    compare(partial(stochastic_product, options=STOCHASTIC), lambda x, w: x @ w.T, x, w)


def test_a_pair_without_values_is_named() -> None:
    good = (torch.ones(2, 8), torch.ones(3, 8))
    for a, b in (((0, 8), (3, 8)), ((2, 8), (0, 8)), ((2, 0), (3, 0)), ((0, 2, 8), (0, 3, 8))):
        with pytest.raises(BadInput, match=r"layer\.q: .* there is nothing to multiply; leave this pair out"):
            product_error({"layer.k": good, "layer.q": (torch.ones(a), torch.ones(b))}, STOCHASTIC)


def test_losses() -> None:
    hidden, labels = torch.randn(0, 16), torch.zeros(0, dtype=torch.long)
    for reduction in ("mean", "sum", "none"):
        loss = partial(linear_cross_entropy, labels=labels, reduction=reduction)
        compare(
            lambda h, w, loss=loss: loss(h, w),
            lambda h, w, reduction=reduction: (h @ w.T).sum(1 if reduction == "none" else None),
            hidden,
            torch.randn(5, 16),
        )
    empty, ignored = torch.randn(3, 0), torch.tensor([1, 0, -100])
    compare(
        lambda h, w: linear_cross_entropy(h, w, ignored),
        lambda h, w: F.cross_entropy(h @ w.T, ignored),
        empty,
        torch.randn(5, 0),
    )
    weight = torch.randn(0, 16)
    for refused in (
        lambda h, y: linear_cross_entropy(h, weight, y),
        lambda h, y: linear_cross_entropy_float8(h, weight, y, operands=head_operands(weight)),
        lambda h, y: linear_log_probs(h, weight, y),
    ):
        with pytest.raises(BadInput, match=r"weight is \(0, 16\): without a vocabulary no label"):
            refused(torch.randn(3, 16), torch.full((3,), -100))


@pytest.mark.parametrize(
    "B, H, S, D", [(0, 2, 4, 8), (2, 0, 4, 8), (2, 2, 0, 8), (2, 2, 4, 0), (0, 0, 0, 0)], ids=str
)
def test_attention(B: int, H: int, S: int, D: int) -> None:
    compare(attention, partial(attention_ref, scale=1.0), *(torch.randn(B, H, S, D) for _ in "qkv"))
    if H and B:
        with pytest.raises(BadInput, match="K a divisor of H"):
            attention(torch.randn(B, H, S, D), *(torch.randn(B, 0, S, D) for _ in "kv"))


@pytest.mark.parametrize("shape", [(0,), (0, 16), (16, 0)], ids=str)
def test_a_step_of_the_optimizer(shape: tuple[int, ...]) -> None:
    p = nn.Parameter(torch.empty(shape))
    other = nn.Parameter(torch.ones(4))
    for rounding in (False, True):
        optimizer = AdamW8bit([p, other], lr=0.1, min_8bit_size=0, stochastic_rounding=rounding)
        p.grad, other.grad = torch.empty(shape), torch.ones(4)
        optimizer.step()
    assert p.shape == shape and bool((other < 1).all())
