"""Rows by their place in a call, and products of whole numbers, against plain loops."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fewbits import sc_matmul
from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.kernels.stochastic.integer_product import integer_product
from fewbits.nn.row_plan import RowPlan, call_groups
from fewbits.nn.stochastic.attention import AttentionProducts, stochastic_attention
from fewbits.nn.stochastic.linear import StochasticLinear
from fewbits.nn.stochastic.product import stochastic_product

OPTIONS = dataclasses.replace(STOCHASTIC, chunk_d=16, stoc_len=64)
WORDS = {"halve_bipolar_stoc_len": True, "chunk_d": 16, "n_masks": 64}


def group(row: torch.Tensor, rows: torch.Tensor, thresholds) -> int:
    """By the definition: the first threshold that a row's place reaches."""
    sizes = rows.float().abs().amax(-1)
    low, high = sizes.min(), sizes.max()
    if (high - low).item() < 1e-8:
        return 0
    place = (row.float().abs().max() - low) / (high - low)
    for number, threshold in enumerate(thresholds):
        if place >= torch.tensor(threshold):
            return number
    return len(thresholds)


def test_groups_are_by_place_among_the_rows_of_a_call():
    torch.manual_seed(0)
    thresholds = (0.9, 0.5, 0.25)
    x = torch.randn(3, 2, 40, 8) * torch.rand(3, 2, 40, 1)
    found = call_groups(x, torch.tensor(thresholds))
    expected = [[[group(row, rows, thresholds) for row in rows] for rows in heads] for heads in x]
    assert found.tolist() == expected and set(found.flatten().tolist()) == {0, 1, 2, 3}


def test_edges_of_a_call():
    thresholds = torch.tensor([0.75, 0.5])
    assert call_groups(torch.full((4, 3), -2.0), thresholds).tolist() == [0, 0, 0, 0]
    assert call_groups(torch.ones(1, 3), thresholds).tolist() == [0]
    assert call_groups(torch.ones(0, 3), thresholds).shape == (0,)
    places = torch.tensor([[0.0], [0.5], [0.75], [0.7499], [1.0]])
    assert call_groups(places, thresholds).tolist() == [2, 1, 0, 1, 0]  # at a threshold: reached


def test_a_linear_by_call_is_one_product_for_each_group():
    torch.manual_seed(0)
    linear = torch.nn.Linear(40, 6)
    smooth = torch.rand(40) + 0.5
    layer = StochasticLinear.from_linear(linear, OPTIONS, smooth_scales=smooth)
    layer.set_lengths([[96], [32], [0]], [0.6, 0.2], classify="call")
    x = torch.randn(30, 40) * torch.rand(30, 1)
    groups = [group(row, x, (0.6, 0.2)) for row in x]
    assert set(groups) == {0, 1, 2}
    with torch.no_grad():
        y = layer(x)
        for row, (number, out) in enumerate(zip(groups, y, strict=True)):
            length = (96, 32, 0)[number]
            expected = torch.zeros(1, 6)
            if length:
                expected = sc_matmul(
                    x[row : row + 1], linear.weight, stoc_len=length, smooth_scales=smooth, **WORDS
                )
            assert torch.equal(out, expected[0] + linear.bias)
    assert layer.lengths_of(x).flatten().tolist() == [(96, 32, 0)[g] for g in groups]


def test_by_call_is_saved_with_the_layer():
    layer = StochasticLinear.from_linear(torch.nn.Linear(40, 6), OPTIONS)
    layer.set_lengths([[96], [32]], [0.6], classify="call")
    other = StochasticLinear.from_linear(torch.nn.Linear(40, 6), OPTIONS)
    other.set_lengths([[16], [16]], [0.1], classify="call")
    other.load_state_dict(layer.state_dict())
    x = torch.randn(9, 40)
    assert other.by_call and torch.equal(layer(x), other(x))
    layer.set_lengths([[96], [32]], [0.6], classify="row")
    assert not layer.by_call


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_attention_by_call_takes_all_heads_together(heads):
    torch.manual_seed(0)
    (H, K), S, D = heads, 11, 16
    q, k, v = torch.randn(2, H, S, D), torch.randn(2, K, S, D), torch.randn(2, K, S, D)
    q = q * torch.rand(2, H, S, 1)
    scores_plan, values_plan = RowPlan((96, 16), (0.4,)), RowPlan((64, 32, 8), (0.7, 0.3))
    products = AttentionProducts(OPTIONS, OPTIONS, scores_plan, values_plan)
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    out, weights = stochastic_attention(q, k, v, mask, products, scale=0.25)
    for b in range(2):
        for h in range(H):
            keys, values = k[b, h * K // H], v[b, h * K // H]
            scores = _by_row(q[b, h], keys, scores_plan, q)
            expected = (scores * 0.25).masked_fill(~mask, -torch.inf).softmax(-1)
            assert torch.equal(weights[b, h], expected)
            assert torch.equal(out[b, :, h], _by_row(expected, values.T, values_plan, weights))


def _by_row(a: torch.Tensor, b: torch.Tensor, plan: RowPlan, call: torch.Tensor) -> torch.Tensor:
    rows = call.reshape(-1, call.shape[-1])
    groups = [group(row, rows, plan.thresholds) for row in a]
    return torch.cat(
        [
            sc_matmul(a[i : i + 1], b.contiguous(), stoc_len=plan.lengths[g], **WORDS)
            for i, g in enumerate(groups)
        ]
    )


@pytest.mark.parametrize("bits", [2, 4, 7, 8])
def test_whole_numbers_are_the_exact_product_of_codes(bits):
    torch.manual_seed(0)
    options = Stochastic(sc_prec=bits, chunk_d=16)
    a, b = torch.randn(3, 5, 40), torch.randn(3, 7, 40)
    y = stochastic_product(a, b, options, plan=RowPlan(integer=True))
    qa, qb = options.fake_quantize(a), options.fake_quantize(b)
    torch.testing.assert_close(y, qa @ qb.mT, rtol=1e-5, atol=1e-5)
    pa, pb = options.quantize(a), options.quantize(b)
    apart = integer_product(pa.codes[1], pa.scales[1], pb.codes[1], pb.scales[1], options)
    assert torch.equal(y[1], apart)


def test_gradients_pass_as_through_the_exact_product():
    a, b = torch.randn(5, 20, requires_grad=True), torch.randn(4, 20, requires_grad=True)
    dy = torch.randn(5, 4)
    plan = RowPlan((64, 16), (0.5,))
    stochastic_product(a, b, OPTIONS, plan=plan, groups=plan.groups(a)).backward(dy)
    torch.testing.assert_close(a.grad, dy @ b.detach())
    torch.testing.assert_close(b.grad, dy.T @ a.detach())


def test_plans_that_cannot_be():
    with pytest.raises(BadInput, match="3 groups of rows need 2 thresholds, not 1"):
        RowPlan((64, 32, 16), (0.5,))
    with pytest.raises(Unsupported, match="for options whose operands can be prepared"):
        stochastic_product(
            torch.randn(2, 8), torch.randn(2, 8), Stochastic(mode="unipolar"), plan=RowPlan(integer=True)
        )
