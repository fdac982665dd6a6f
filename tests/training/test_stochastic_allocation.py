"""The knapsack over a swap table: against all choices there are, and honest about its windows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fewbits.errors import BadInput
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.inference.stochastic.swap import Operator, Swap, SwapTable
from fewbits.recipes.stochastic_config import AttentionSetting, LinearSetting, StochasticConfig
from fewbits.training.calibration import stochastic_allocation
from fewbits.training.calibration.stochastic_allocation import Budget, allocate

LENGTHS = (16, 48, 64)
BASE = StochasticConfig(
    options=STOCHASTIC.with_length(32),
    linears=(("l.0.d", LinearSetting(runs="int8")),),
    attention=(("*", AttentionSetting(scores=32, values=32)),),
)


def table(seed: int = 0, windows: int = 8) -> SwapTable:
    """Operators a, b, c at 32 cycles, d masked, and the scores of one layer's attention."""
    draw = np.random.default_rng(seed)
    names = {"a": 0.3, "b": 0.1, "c": 0.25, "d": 0.15, "scores": 0.2}
    swaps = []
    for name, macs in names.items():
        full = (f"l.0.{name}", f"l.1.{name}") if name != "scores" else ("l.0.attn", "l.1.attn")
        operator = Operator(name, name, full)
        scale, base = draw.uniform(0.5, 3), 0 if name == "d" else 32
        for to in (*LENGTHS, *((32,) if name == "d" else ()), *(("int8",) if name in "abc" else ())):
            length = 0 if to == "int8" else to
            loss = scale * ((1 / length if length else 0) - (1 / base if base else 0))
            swaps.append(Swap(operator, to, (100 * loss,) * windows, macs * (base - length)))
    cycles = {name: 0.0 if name == "d" else 32.0 for name in names}
    return SwapTable(BASE, 2.0, (100,) * windows, names, cycles, tuple(swaps))


def every_choice(swaps: SwapTable, budget: Budget):
    """(loss, settings) of all choices within a budget, by its definition."""
    options = {name: {"base": (swaps.cycles[name], 0.0)} for name in swaps.macs}
    for swap in swaps.swaps:
        if swap.to != "int8" or budget.int8:
            length = 0 if swap.to == "int8" else swap.to
            options[swap.operator.name][swap.to] = (length, sum(swap.differences) / sum(swaps.tokens))
    for picks in itertools.product(*(o.items() for o in options.values())):
        lengths = [length for _, (length, _) in picks]
        macs = list(swaps.macs.values())
        if budget.over == "stochastic":
            running = sum(m for m, n in zip(macs, lengths, strict=True) if n)
            spent = sum(m * n for m, n in zip(macs, lengths, strict=True)) / running if running else 0
        else:
            spent = sum(m * (n or budget.int8_cycles) for m, n in zip(macs, lengths, strict=True)) / sum(macs)
        if spent <= budget.cycles + 1e-9:
            yield sum(loss for _, (_, loss) in picks), [name for name, _ in picks]


@pytest.mark.parametrize("over", ["stochastic", "all"])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("cycles", [24, 32, 41.5])
def test_no_choice_is_better(over, int8, cycles):
    for seed in range(5):
        swaps, budget = table(seed), Budget(cycles=cycles, over=over, int8=int8, int8_cycles=20, resamples=0)
        found = allocate(swaps, budget)
        best, _ = min(every_choice(swaps, budget))
        assert found.exact and found.predicted.mean == pytest.approx(best)
        assert found.cycles <= cycles + 1e-9 and found.agreement == {}


def test_the_mask_is_seen():
    """Over stochastic products a masked operator neither takes nor leaves cycles; over all it leaves them."""
    stochastic = allocate(table(), Budget(cycles=32, resamples=0))
    everything = allocate(table(), Budget(cycles=32, over="all", resamples=0))
    assert stochastic.settings["d"] == everything.settings["d"] == "base"
    assert (
        stochastic.cycles
        <= 32
        < sum(
            m * (0 if n == "d" else 32 if s == "base" else s)
            for (n, s), m in zip(everything.settings.items(), table().macs.values(), strict=True)
        )
        / (1 - 0.15)
    )


def test_the_configuration_says_what_was_chosen():
    found = allocate(table(), Budget(cycles=32, resamples=5))
    assert set(found.agreement) == set(found.settings) and set(found.agreement.values()) == {1.0}
    for name, setting in found.settings.items():
        for layer in (0, 1):
            if name == "scores":
                expected = AttentionSetting(scores=32 if setting == "base" else setting, values=32)
                assert found.config.attention_of(f"l.{layer}.attn") == expected
            elif setting != "base":
                assert found.config.linear(f"l.{layer}.{name}").lengths == ((setting,),)
    assert found.config.linear("l.0.d").runs == "int8"
    assert len({name for name, _ in found.config.linears}) == len(found.config.linears)


def test_levels_are_kept_to():
    fine = allocate(table(), Budget(cycles=40, resamples=0))
    coarse = allocate(table(), Budget(cycles=40, levels=(16, 32, 64), resamples=0))
    assert 48 in fine.settings.values() and 48 not in coarse.settings.values()
    assert coarse.predicted.mean >= fine.predicted.mean
    without = allocate(table(), Budget(cycles=40, levels=(16, 64), resamples=0))
    assert {s for n, s in without.settings.items() if n != "d"} <= {16, 64}


def test_what_chose_looks_better_than_what_did_not():
    """Pure noise: the windows that choose promise a gain that others do not see."""
    promised, kept = [], []
    for seed in range(20):
        noisy = table(seed)
        draw = np.random.default_rng(seed)
        flat = [Swap(s.operator, s.to, tuple(30 * draw.standard_normal(8)), s.freed) for s in noisy.swaps]
        found = allocate(
            SwapTable(BASE, 2.0, noisy.tokens, noisy.macs, noisy.cycles, tuple(flat)),
            Budget(cycles=32, resamples=10),
        )
        promised.append(found.predicted.mean)
        kept.append(found.held_out.mean)
        assert min(found.agreement.values()) < 1
    assert np.mean(promised) < -0.05 and abs(np.mean(kept)) < 0.5 * abs(np.mean(promised))


def test_a_longer_stream_is_taken_to_lose_no_more():
    falling = stochastic_allocation._falling
    assert falling(np.array([3.0, 1.0, 2.0, 0.5])).tolist() == [3.0, 1.5, 1.5, 0.5]
    assert falling(np.array([1.0, 2.0, 3.0])).tolist() == [2.0, 2.0, 2.0]
    assert falling(np.array([3.0, 2.0])).tolist() == [3.0, 2.0]


def test_thinned_states_stay_within_the_budget(monkeypatch):
    monkeypatch.setattr(stochastic_allocation, "STATES", 6)
    swaps, budget = table(3), Budget(cycles=33, resamples=0)
    found = allocate(swaps, budget)
    best, _ = min(every_choice(swaps, budget))
    assert not found.exact and found.cycles <= 33 + 1e-9
    assert best - 1e-9 <= found.predicted.mean <= 0.7 * best


def test_budgets_that_cannot_be():
    with pytest.raises(BadInput, match=r"a budget of 8 cycles over stochastic .* shortest stream is 16"):
        allocate(table(), Budget(cycles=8))
    with pytest.raises(BadInput, match="3 windows make no 4 folds"):
        allocate(table(windows=3), Budget(cycles=32))
    for fields in (
        {"cycles": 0},
        {"cycles": 3, "risk": -1},
        {"cycles": 3, "over": "rows"},
        {"cycles": 3, "folds": 1},
    ):
        with pytest.raises(BadInput):
            Budget(**fields)
