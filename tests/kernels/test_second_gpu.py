"""Every kernel on the second GPU while the first is current: the same bits, and the first stays current.

The cases are those of the benchmarks, cut to small sizes, so a new op is in as soon as it has one. Products
of `sc_matmul` over all granularities and modes come besides, and layers that are made of these kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from fewbits import sc_matmul
from fewbits.bench.cases import cases
from fewbits.bench.problem import Case
from fewbits.formats import NF4, NF4_DQ
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.nn.linear import QuantizedLinear
from fewbits.nn.stochastic.attention import AttentionProducts, stochastic_attention
from fewbits.nn.stochastic.linear import StochasticLinear
from fewbits.nn.stochastic.qat import StochasticQATLinear
from fewbits.recipes.recipe import Rule
from tests.formats.generated_streams import random_case

TWICE_AND_SECOND = ("cuda:0", "cuda:0", "cuda:1")  # a kernel that differs from itself is found out first
SEEDS = range(60)
# torch's own kernels, which add these gradients up in any order.
CASES = [case for case in cases(max_size=256) if (case.op, case.part) != ("attention", "backward")]


def check(results_on: Callable[[torch.device], Sequence[Tensor]]) -> list[Tensor]:
    """The same results on both GPUs, computed where the operands are; them, on the CPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    found = []
    for name in TWICE_AND_SECOND:
        device = torch.device(name)
        torch.manual_seed(0)
        results = [x for x in results_on(device) if x is not None]
        assert results and all(x.device == device for x in results)
        assert torch.cuda.current_device() == 0
        found.append([x.detach().reshape(-1).contiguous().view(torch.uint8).cpu() for x in results])
    for first, again, second in zip(*found, strict=True):
        assert torch.equal(first, again), "not the same twice on one GPU"
        assert torch.equal(first, second), "not the same on the second GPU"
    return [x.detach().cpu() for x in results]


def test_every_kernel_has_a_case() -> None:
    # That every op has a benchmark case is in tests/test_architecture.py; here none may fall out by its size.
    assert {case.op for case in CASES} == {case.op for case in cases()}


@pytest.mark.multi
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels(case: Case) -> None:
    check(lambda device: case.build(case, device).variants["fewbits"]()())


# Stochastic products.


def test_the_seeds_have_every_granularity_and_mode() -> None:
    seen = {(options["granularity"], options["mode"]) for options in (random_case(s)[2] for s in SEEDS)}
    every = {(g, m) for g in ("per_row", "per_tensor", "per_head") for m in ("bipolar", "unipolar")}
    assert seen == every - {("per_head", "unipolar")}  # which there is not


@pytest.mark.multi
@pytest.mark.parametrize("seed", SEEDS)
def test_stochastic_products(seed: int) -> None:
    a, b, options = random_case(seed)
    a, b = torch.from_numpy(a), torch.from_numpy(b)
    (y,) = check(lambda device: [sc_matmul(a.to(device), b.to(device), **options)])
    assert torch.equal(y, sc_matmul(a, b, **options))


@pytest.mark.multi
@pytest.mark.parametrize("rows", [1, 2, 4, 9, 200, 1500])
@pytest.mark.parametrize(
    "options",
    [STOCHASTIC, Stochastic(chunk_d=128), STOCHASTIC.with_length(31), STOCHASTIC.with_length(60)],
    ids=["halve", "full", "31", "60"],
)
def test_prepared_products_of_every_plan(options: Stochastic, rows: int) -> None:
    a, b = torch.randn(rows, 600), torch.randn(300, 600)
    values = {name: getattr(options, name) for name in ("stoc_len", "halve_bipolar_stoc_len", "chunk_d")}
    values |= {"n_masks": options.n_masks}
    (y,) = check(lambda device: [sc_matmul(a.to(device), options.quantize(b.to(device)), **values)])
    assert torch.equal(y, sc_matmul(a, options.quantize(b), **values))


# Layers.


def stochastic_layer(linear: nn.Linear) -> StochasticLinear:
    scales = torch.linspace(0.5, 2, 256, device=linear.weight.device)
    layer = StochasticLinear.from_linear(linear, STOCHASTIC, smooth_scales=scales, protected=[3, 200])
    layer.set_lengths([[64, 32], [16, 0]], [1.0], classify="chunk")
    return layer


LAYERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "nf4": lambda linear: QuantizedLinear.from_linear(linear, Rule(weight=NF4)),
    "nf4_dq": lambda linear: QuantizedLinear.from_linear(linear, Rule(weight=NF4_DQ)),
    "stochastic": lambda linear: StochasticLinear.from_linear(linear, STOCHASTIC),
    "stochastic, int8": lambda linear: StochasticLinear.from_linear(linear, STOCHASTIC, int8=True),
    "stochastic, lengths": stochastic_layer,
    "stochastic, trained": lambda linear: StochasticQATLinear.from_linear(linear, STOCHASTIC),
}


def layer_results(kind: str, rows: int, device: torch.device) -> Sequence[Tensor]:
    """Output and gradients of a layer that was made on the device."""
    linear = nn.Linear(256, 384)
    x = torch.randn(rows, 256)
    layer = LAYERS[kind](linear.to(device, torch.bfloat16))
    x = x.to(device, torch.bfloat16).requires_grad_()
    y = layer(x)
    y.float().square().sum().backward()
    return [y, x.grad, *(p.grad for p in layer.parameters() if p.requires_grad)]


@pytest.mark.multi
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind: str, rows: int) -> None:
    check(lambda device: layer_results(kind, rows, device))


@pytest.mark.multi
@pytest.mark.parametrize("rows", [1, 40])
def test_stochastic_attention(rows: int) -> None:
    q, k, v = torch.randn(2, 8, rows, 64), torch.randn(2, 2, 300, 64), torch.randn(2, 2, 300, 64)
    products = AttentionProducts(STOCHASTIC, STOCHASTIC)

    def run(device: torch.device) -> Sequence[Tensor]:
        on = (x.to(device, torch.bfloat16) for x in (q, k, v))
        return stochastic_attention(*on, None, products, scale=0.125)

    check(run)
