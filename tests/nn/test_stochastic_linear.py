"""`StochasticLinear`: its product, its extras, its gradient, its lengths, what it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fewbits import sc_matmul
from fewbits.errors import BadInput, Unsupported
from fewbits.formats import INT8, STOCHASTIC
from fewbits.formats.stochastic import Stochastic
from fewbits.nn.packed_layers import fake_layer, packed_layer
from fewbits.nn.stochastic.linear import StochasticLinear
from fewbits.recipes import Rule

POINT = {"halve_bipolar_stoc_len": True, "chunk_d": 128, "n_masks": 64}


def linear(K: int = 300, N: int = 17, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    made = nn.Linear(K, N, bias=bias, dtype=dtype)
    return made.requires_grad_(False)


def by_sc(x: Tensor, layer: nn.Linear, **options: object) -> Tensor:
    y = sc_matmul(x.reshape(-1, x.shape[-1]), layer.weight, **{**POINT, **options})
    return y.view(*x.shape[:-1], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K", [40, 128, 300])
def test_forward_is_exactly_stochastic(K: int, dtype: torch.dtype) -> None:
    source = linear(K, dtype=dtype)
    layer = StochasticLinear.from_linear(source, STOCHASTIC)
    x = torch.randn(2, 5, K, dtype=dtype)
    assert torch.equal(layer(x), (by_sc(x, source) + source.bias.float()).to(dtype))
    assert layer(x[:0]).shape == (0, 5, 17) and layer(x[0, 0]).shape == (17,)


def test_bytes_are_about_half_of_16_bits() -> None:
    source = linear(1024, 512, bias=False, dtype=torch.bfloat16)
    layer = StochasticLinear.from_linear(source, STOCHASTIC)
    assert layer.packed.nbytes / source.weight.nbytes == pytest.approx(0.5 + 4 / 128 / 2)


def test_smooth_scales_and_protected_channels() -> None:
    source, scales = linear(), torch.rand(300) + 0.5
    chosen = [7, 130, 299]
    layer = StochasticLinear.from_linear(source, STOCHASTIC, smooth_scales=scales, protected=chosen)
    x = torch.randn(4, 300)
    x[:, 130] *= 100
    rest = copy.deepcopy(source)
    rest.weight[:, chosen] = 0
    inside = x.index_fill(1, torch.tensor(chosen), 0.0)
    expected = by_sc(inside, rest, smooth_scales=scales) + (x[:, chosen] @ source.weight[:, chosen].T)
    assert torch.equal(layer(x), expected + source.bias)
    plain = StochasticLinear.from_linear(source, STOCHASTIC)
    exact = source(x)
    assert (layer(x) - exact).norm() < 0.2 * (plain(x) - exact).norm()
    assert (layer.dequantize() - source.weight).abs().max() < 0.002
    assert torch.equal(layer.dequantize()[:, chosen], source.weight[:, chosen])


def test_integers_in_place_of_streams() -> None:
    source = linear()
    layer = StochasticLinear.from_linear(source, STOCHASTIC, int8=True)
    x = torch.randn(6, 300)
    x_q, w_q = STOCHASTIC.quantize(x).dequantize().double(), layer.packed.dequantize().double()
    expected = x_q @ w_q.T + source.bias
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-6, atol=1e-6)
    counted = StochasticLinear.from_linear(source, STOCHASTIC)(x)
    assert (layer(x) - source(x)).norm() < (counted - source(x)).norm() / 2
    layer.use_int8(False)
    assert torch.equal(layer(x), counted)


def test_the_gradient_passes_straight_through() -> None:
    source, scales = linear(dtype=torch.float32), torch.rand(300) + 0.5
    layer = StochasticLinear.from_linear(source, STOCHASTIC, smooth_scales=scales, protected=[3])
    layer.bias = nn.Parameter(layer.bias.detach().clone())
    x = torch.randn(2, 4, 300, requires_grad=True)
    dy = torch.randn(2, 4, 17)
    layer(x).backward(dy)
    torch.testing.assert_close(x.grad, dy @ layer.dequantize(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.bias.grad, dy.sum((0, 1)))
    assert all(p.grad is None for n, p in layer.named_parameters() if n != "bias")


def test_gradients_under_an_adapter() -> None:
    """PEFT's LoRA over the layer: the adapter's gradients are those of the branch alone."""
    from peft import LoraConfig

    from fewbits.models.adapting.adapters import get_peft_model
    from tests.models.tiny import tiny, tokens

    model = tiny("llama")
    from fewbits.models.packing.convert import convert
    from fewbits.recipes import LoRA, get_recipe

    convert(model, get_recipe("stochastic"))
    adapted = get_peft_model(model, LoRA(r=4))
    assert isinstance(adapted.peft_config["default"], LoraConfig)
    ids = tokens()
    adapted(ids, labels=ids).loss.backward()
    grads = {n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}
    assert grads and all(g is not None and g.isfinite().all() for g in grads.values())
    assert all(g.abs().sum() > 0 for n, g in grads.items() if "lora_B" in n)
    name = "base_model.model.model.layers.1.mlp.down_proj"
    layer = adapted.get_submodule(name)
    seen = {}
    layer.register_forward_hook(lambda _, args, out: seen.update(x=args[0].detach(), y=out))
    adapted.zero_grad()
    loss = adapted(ids, labels=ids).loss
    (dy,) = torch.autograd.grad(loss, seen["y"], retain_graph=True)
    loss.backward()
    A = layer.lora_A["default"].weight
    branch = layer.scaling["default"] * dy.flatten(0, 1).T @ (seen["x"].flatten(0, 1) @ A.T)
    torch.testing.assert_close(layer.lora_B["default"].weight.grad, branch, rtol=1e-4, atol=1e-7)


def test_merging_prepares_again_and_unmerging_gives_the_bits_back() -> None:
    from fewbits.models.adapting.adapters import get_peft_model
    from fewbits.models.packing.convert import convert
    from fewbits.recipes import LoRA, get_recipe
    from tests.models.tiny import tiny

    model = tiny("llama")
    chosen = {"smooth_scales": torch.rand(64) + 0.5, "protected": [1, 5]}

    def build(name: str, source: nn.Linear, rule: Rule) -> nn.Module | None:
        if source.in_features != 64:
            return None
        return StochasticLinear.from_linear(source, rule, **chosen)  # type: ignore[arg-type]

    receipt = convert(model, get_recipe("stochastic"), build=build)
    assert len([c for c in receipt.changes if c.after.startswith("StochasticLinear")]) == 14
    adapted = get_peft_model(model, LoRA(r=4))
    layer = adapted.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    assert layer.base_layer.smooth_scales is not None
    nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    before = {name: t.clone() for name, t in layer.base_layer.state_dict().items()}
    wanted = layer.base_layer.dequantize() + layer.get_delta_weight("default")
    with pytest.warns(UserWarning, match="rounds them again"):
        layer.merge()
    merged = layer.base_layer.dequantize()
    assert (merged - wanted).abs().max() < wanted.abs().max() / 60
    assert torch.equal(merged[:, [1, 5]], wanted[:, [1, 5]])
    layer.unmerge()
    assert all(torch.equal(t, before[name]) for name, t in layer.base_layer.state_dict().items())


# Stream lengths.


def test_one_length_for_all() -> None:
    source, x = linear(), torch.randn(4, 300)
    layer = StochasticLinear.from_linear(source, STOCHASTIC.with_length(32))
    assert torch.equal(layer(x), by_sc(x, source, stoc_len=32) + source.bias)
    assert layer.lengths_of(x).tolist() == [[32]]


def test_a_length_for_each_chunk() -> None:
    source, x = linear(), torch.randn(4, 300)
    layer = StochasticLinear.from_linear(source, STOCHASTIC)
    layer.set_lengths([[128, 0, 48]])
    table = torch.tensor([[128, 0, 48]])
    assert torch.equal(layer(x), by_sc(x, source, stoc_len=table) + source.bias)
    assert torch.equal(layer.lengths_of(x), table)
    layer.set_lengths(None)
    assert torch.equal(layer(x), by_sc(x, source) + source.bias)


@pytest.mark.parametrize("smoothed", [False, True])
def test_rows_by_their_largest_magnitude(smoothed: bool) -> None:
    source, scales = linear(), torch.full((300,), 2.0) if smoothed else None
    x = torch.randn(6, 300).clamp(-1, 1) * torch.tensor([1.0, 9, 3, 0.1, 30, 3])[:, None]
    x[:, 0] = torch.tensor([1.0, 9, 3, 0.1, 30, 3])
    layer = StochasticLinear.from_linear(source, STOCHASTIC, smooth_scales=scales)
    factor = 2 if smoothed else 1
    layer.set_lengths([[128], [64], [16]], [8.0 / factor, 2.0 / factor])
    rows = torch.tensor([16, 128, 64, 16, 128, 64])
    table = torch.tensor([[128], [64], [16]])[[2, 0, 1, 2, 0, 1]]
    assert torch.equal(layer.lengths_of(x), table)
    assert torch.equal(layer(x), by_sc(x, source, stoc_len=rows, smooth_scales=scales) + source.bias)


def test_chunks_of_rows_by_their_largest_magnitude() -> None:
    source, x = linear(), torch.randn(5, 300).clamp(-1, 1)
    x[1, :128] *= 5
    x[3, 128:256] *= 5
    layer = StochasticLinear.from_linear(source, STOCHASTIC)
    layer.set_lengths([[128, 100, 64], [32, 31, 30]], [2.5], "chunk")
    table = torch.tensor([32, 31, 30]).repeat(5, 1)
    table[1, 0], table[3, 1] = 128, 100
    assert torch.equal(layer.lengths_of(x), table)
    assert torch.equal(layer(x), by_sc(x, source, stoc_len=table) + source.bias)
    layer.set_lengths([[128, 100, 64], [32, 31, 30]], [2.5], "row")
    table = torch.tensor([[128, 100, 64], [32, 31, 30]])[[1, 0, 1, 0, 1]]
    assert torch.equal(layer(x), by_sc(x, source, stoc_len=table) + source.bias)


@pytest.mark.parametrize(
    ("table", "thresholds", "classify", "words"),
    [
        ([[128, 64]], None, "row", "has 3 chunks; give whole numbers of shape"),
        ([[128.0, 64.0, 3.0]], None, "row", "give whole numbers"),
        ([128], None, "row", "give whole numbers of shape"),
        ([[300]], None, "row", "holds numbers from 0 to 256"),
        ([[-1]], None, "row", "holds numbers from 0 to 256"),
        ([[128], [64]], None, "row", "2 groups of rows need 1 thresholds in descending order"),
        ([[128], [64], [1]], [1.0, 2.0], "row", "in descending order"),
        ([[128]], None, "token", "classify='token' is unknown; choose one of row, chunk"),
    ],
)
def test_tables_that_do_not_fit_are_refused(table, thresholds, classify: str, words: str) -> None:
    layer = StochasticLinear.from_linear(linear(), STOCHASTIC)
    with pytest.raises(BadInput, match=words) as caught:
        layer.set_lengths(table, thresholds, classify)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert layer.length_table is None


# State.


def everything(source: nn.Linear, protected: tuple[int, ...] = (2, 9)) -> StochasticLinear:
    layer = StochasticLinear.from_linear(
        source, STOCHASTIC, smooth_scales=torch.rand(300) + 0.5, protected=protected
    )
    layer.set_lengths([[128, 100, 64], [32, 31, 30]], [2.5], "chunk")
    return layer


def test_casting_leaves_the_definition_alone() -> None:
    layer = everything(linear())
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    layer.bfloat16()
    for name, tensor in layer.state_dict().items():
        if name not in ("bias", "weight_protected"):
            assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name
    assert layer.bias.dtype == layer.weight_protected.dtype == layer.dtype == torch.bfloat16
    x = torch.randn(3, 300, dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16


def test_state_goes_both_ways() -> None:
    source = linear()
    layer, x = everything(source), torch.randn(4, 300) * 3
    layer.use_int8(True)
    other = everything(linear())
    other.load_state_dict(layer.state_dict())
    assert other.int8
    layer.use_int8(False)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)) and other.levels == layer.levels


def test_deep_copies_and_printing() -> None:
    layer = everything(linear())
    x = torch.randn(3, 300)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert "cycles=30/31/32/64/100/128, smoothed, protected=2" in repr(layer)


def test_rows_that_are_not_finite_become_nan_alone() -> None:
    layer, x = StochasticLinear.from_linear(linear(), STOCHASTIC), torch.randn(3, 300)
    clean = layer(x)
    x[1, 200] = torch.inf
    y = layer(x)
    assert y[1].isnan().all() and torch.equal(y[[0, 2]], clean[[0, 2]])


def test_compiles_to_one_graph() -> None:
    layer, x = StochasticLinear.from_linear(linear(), STOCHASTIC), torch.randn(3, 300)
    explained = torch.compile(layer.product, backend="eager", fullgraph=True)(x)
    assert torch.equal(explained, layer.product(x))


# Refusals.


def test_refusals() -> None:
    source = linear()
    for options, words in (
        (Stochastic(mode="unipolar"), 'not for mode "unipolar"'),
        (Stochastic(sc_prec=9), "sc_prec=9"),
        (Stochastic(granularity="per_tensor"), 'granularity "per_tensor"'),
        (Stochastic(group_b=2), "groups of 1 and 2 rows"),
    ):
        with pytest.raises(Unsupported, match=words):
            packed_layer(source, Rule(weight=options))
    with pytest.raises(Unsupported, match="quantises its input itself"):
        packed_layer(source, Rule(weight=STOCHASTIC, activation=INT8))
    with pytest.raises(Unsupported, match="'int8' has no stochastic product; give"):
        StochasticLinear.from_linear(source, Rule(weight=INT8))
    with pytest.raises(BadInput, match=r"smooth_scales has shape \(3,\); give 300 positive, finite numbers"):
        StochasticLinear.from_linear(source, STOCHASTIC, smooth_scales=torch.ones(3))
    with pytest.raises(BadInput, match="give 300 positive"):
        StochasticLinear.from_linear(source, STOCHASTIC, smooth_scales=torch.zeros(300))
    with pytest.raises(BadInput, match="outside of 0 to 299"):
        StochasticLinear.from_linear(source, STOCHASTIC, protected=[300])


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    layer = StochasticLinear.from_linear(linear(), STOCHASTIC)
    x = torch.randn(4, 300)
    gradients = []
    for run in (layer, lambda rows: checkpoint(layer, rows, use_reentrant=False)):
        rows = x.clone().requires_grad_()
        run(rows).sum().backward()
        gradients.append(rows.grad)
    assert torch.equal(*gradients)


def test_what_trains_becomes_what_is_packed() -> None:
    source = linear(dtype=torch.bfloat16)
    rule = Rule(weight=replace(STOCHASTIC, stoc_len=64))
    trained = fake_layer(source, rule)
    trained.smooth_scales = torch.rand(300) + 0.5
    packed = packed_layer(trained, rule)
    x = torch.randn(4, 300, dtype=torch.bfloat16)
    assert isinstance(packed, StochasticLinear) and torch.equal(packed(x), trained(x))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits() -> None:
    layer = everything(linear(), protected=(9,))  # a second channel's product may be added in another order
    x = torch.randn(33, 300)
    expected = layer(x)
    assert torch.equal(layer.cuda()(x.cuda()).cpu(), expected)


@pytest.mark.parametrize(
    "fields", [{"gate": "and"}, {"signs": "twos_complement"}, {"or_group": 8}, {"flip_rate": 0.05}]
)
def test_every_arithmetic_runs_in_a_layer_and_its_gradient_passes_straight_through(fields) -> None:
    dense, options = linear(32, 8), replace(STOCHASTIC, chunk_d=16, stoc_len=64, **fields)
    layer = StochasticLinear.from_linear(dense, options)
    x = torch.randn(5, 32, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, by_sc(x.detach(), dense, chunk_d=16, stoc_len=64, **fields) + dense.bias)
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    y.sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, layer.dequantize().sum(0).expand(5, -1), atol=1e-5)
    layer.set_lengths([[16, 64]])
    again = StochasticLinear.from_linear(dense, options)
    again.set_lengths([[64, 16]])
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x)) and not torch.equal(layer(x), y)


def test_arithmetics_that_do_not_fit_a_layer_are_refused() -> None:
    dense = linear(32, 8)
    with pytest.raises(Unsupported, match="protected channels stay in the streams as zeros, which count"):
        StochasticLinear.from_linear(dense, replace(STOCHASTIC, signs="twos_complement"), protected=[3])
    layer = StochasticLinear.from_linear(dense, replace(STOCHASTIC, planned_len=64))
    with pytest.raises(BadInput, match="holds numbers from 0 to 64"):
        layer.set_lengths([[65]])
    with pytest.raises(BadInput, match="or_group=5 does not divide the 32 inner dimensions"):
        StochasticLinear.from_linear(dense, replace(STOCHASTIC, or_group=5))(torch.ones(1, 32))
