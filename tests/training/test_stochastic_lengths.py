"""Captures, smoothing, error tables and the budget: against plain computations of the same."""

from __future__ import annotations

import itertools

import pytest
import torch

from fewbits import sc_matmul
from fewbits.errors import BadInput
from fewbits.formats.stochastic import Stochastic
from fewbits.training.calibration.calibrate import awq_scales, capture, protected_channels, smoothquant_scales
from fewbits.training.calibration.stochastic_lengths import (
    ErrorTable,
    choose_lengths,
    chunk_errors,
    error_table,
)
from tests.models.tiny import tiny, tokens

OPTIONS = Stochastic(halve_bipolar_stoc_len=True, chunk_d=16, n_masks=8)
WORDS = {"halve_bipolar_stoc_len": True, "n_masks": 8}
NAME = "model.layers.1.mlp.down_proj"


def test_capture_sees_what_the_linear_sees():
    model, ids = tiny("llama"), tokens(2, 12)
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        handle = model.get_submodule(NAME).register_forward_hook(lambda m, a, y: seen.append(a[0]))
        model(ids)
        handle.remove()
    x = seen[0].flatten(0, 1)
    found = capture(model, [ids], [NAME], rows=10)[NAME]
    assert found.num_rows == 24 and found.rows.shape == (10, 128)
    torch.testing.assert_close(found.absmax, x.abs().amax(0))
    torch.testing.assert_close(found.mean_abs, x.abs().mean(0))
    assert all((x - row).abs().sum(-1).min() < 1e-4 for row in found.rows)
    assert all(p.requires_grad for p in model.parameters())


def test_importance_is_the_squared_gradient_of_the_summed_loss():
    model, ids = tiny("llama"), tokens(2, 12)
    outputs: list[torch.Tensor] = []

    def keep(module, args, y):
        y.retain_grad()
        outputs.append(y)

    handle = model.get_submodule(NAME).register_forward_hook(keep)
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum").backward()
    handle.remove()
    expected = outputs[0].grad.flatten(0, 1).square().mean(0)
    torch.testing.assert_close(capture(model, [ids], [NAME])[NAME].importance, expected, rtol=1e-4, atol=1e-7)
    y = outputs[0].detach().flatten(0, 1)
    plain = capture(model, [ids], [NAME], gradients=False)[NAME].importance
    torch.testing.assert_close(
        plain, torch.full((64,), float(1 / y.square().sum(-1).mean())), rtol=1e-4, atol=0
    )


def test_smoothquant_evens_both_operands_out():
    x = torch.randn(50, 8) * torch.tensor([1.0, 1, 1, 100, 1, 1, 1, 0])
    w = torch.randn(6, 8)
    scales = smoothquant_scales(x.abs().amax(0), w, 0.5)
    largest_x, largest_w = (x / scales).abs().amax(0), (w * scales).abs().amax(0)
    torch.testing.assert_close(largest_x[:-1], largest_w[:-1])
    assert scales[-1] == 1 and scales.isfinite().all()
    with pytest.raises(BadInput, match="from 0 to 1"):
        smoothquant_scales(x.abs().amax(0), w, 1.5)


def test_awq_takes_the_best_of_its_grid_and_ones_if_none_helps():
    captured = capture(tiny("llama"), [tokens()], [NAME])[NAME]
    scales, beta = awq_scales(captured, lambda s: 1.0 if s is None else float((s.log().std() - 0.1).abs()))
    tried = [captured.mean_abs ** (b / 10) for b in range(1, 11)]
    errors = [float(((t / (t.max() * t.min()).sqrt()).log().std() - 0.1).abs()) for t in tried]
    assert beta == pytest.approx((errors.index(min(errors)) + 1) / 10)
    assert scales.max() * scales.min() == pytest.approx(1, rel=1e-4)
    assert awq_scales(captured, lambda s: 0.0 if s is None else 1.0)[1] == 0.0


def test_protected_channels_are_the_largest_products():
    captured = capture(tiny("llama"), [tokens()], [NAME])[NAME]
    captured.absmax[[5, 90]] = 1e4
    weight = torch.randn(64, 128)
    assert protected_channels(captured, weight, 2) == (5, 90)
    with pytest.raises(BadInput, match="128 protected channels of 128"):
        protected_channels(captured, weight, 128)


def test_chunk_errors_are_those_of_sc_matmul_on_the_chunk():
    x, w, importance = torch.randn(9, 40), torch.randn(5, 40), torch.rand(5)
    scales = torch.rand(40) + 0.5
    found = chunk_errors(x, w, importance, OPTIONS, (16, 100), scales)
    assert found.shape == (9, 3, 2)
    for (i, c), (j, level) in itertools.product(
        enumerate((slice(0, 16), slice(16, 32), slice(32, 40))), enumerate((16, 100))
    ):
        part = sc_matmul(
            x[:, c], w[:, c], smooth_scales=scales[c], stoc_len=level, chunk_d=0, **WORDS
        )  # one chunk divides where several multiply by the inverse: a code may differ
        expected = ((part - x[:, c] @ w[:, c].T).square() * importance).sum(-1)
        torch.testing.assert_close(found[:, i, j], expected, rtol=0.1, atol=0.02)
    assert found[..., 1].sum() < found[..., 0].sum()


def test_groups_split_rows_by_their_largest_magnitude():
    x = torch.randn(40, 20) * torch.arange(1, 41)[:, None]
    table = error_table(x, torch.randn(6, 20), torch.ones(6), OPTIONS, (16, 64), groups=4)
    assert table.errors.shape == (4, 2, 2) and len(table.thresholds) == 3
    assert list(table.thresholds) == sorted(table.thresholds, reverse=True)
    torch.testing.assert_close(table.macs.sum(0), torch.tensor([16.0 * 6, 4.0 * 6]))
    assert (table.errors[0] > table.errors[3]).all()


def _tables(seed, items, levels):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(items):
        falling = torch.rand(1, 1, len(levels), generator=generator).cumsum(-1).flip(-1)
        made.append(ErrorTable(falling, torch.randint(1, 5, (1, 1), generator=generator).float(), ()))
    return made


@pytest.mark.parametrize("seed", range(8))
def test_lengths_are_close_to_the_best_of_all(seed):
    levels, items, budget = (16, 32, 64), 5, 36.0
    tables = _tables(seed, items, levels)
    lengths, mean = choose_lengths(tables, levels, budget)
    macs = torch.tensor([float(t.macs) for t in tables])
    picked = torch.tensor([int(n) for n in lengths])
    assert mean <= budget + 1e-9 and mean == pytest.approx(float((macs * picked).sum() / macs.sum()))

    def error(choice):
        return sum(float(t.errors[0, 0, i]) for t, i in zip(tables, choice, strict=True))

    def cost(choice):
        return sum(float(m) * levels[i] for m, i in zip(macs, choice, strict=True)) / float(macs.sum())

    every = [c for c in itertools.product(range(3), repeat=items) if cost(c) <= budget]
    ours = error([levels.index(int(n)) for n in picked])
    uniform = error([1] * items)
    assert ours <= uniform + 1e-9
    assert ours <= 1.15 * min(map(error, every))


def test_budgets_at_the_ends():
    levels = (16, 32, 64)
    tables = _tables(0, 4, levels)
    assert {int(n) for n in choose_lengths(tables, levels, 16)[0]} == {16}
    assert {int(n) for n in choose_lengths(tables, levels, 1000)[0]} == {64}
    with pytest.raises(BadInput, match="below the shortest stream length, 16"):
        choose_lengths(tables, levels, 15)
    with pytest.raises(BadInput, match="must ascend"):
        choose_lengths(tables, (32, 16), 20)
    with pytest.raises(BadInput, match="at least one batch"):
        capture(tiny("llama"), [], [NAME])
