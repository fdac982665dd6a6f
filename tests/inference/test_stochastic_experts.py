"""Experts in streams: what the receipt counts, what a token costs, screens and swap tables."""

from __future__ import annotations

import pytest
import torch

from fewbits.errors import Unsupported
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.inference.decode import Decoding
from fewbits.inference.evaluate import TextWindows, plan_windows
from fewbits.inference.stochastic.energy import energy_of
from fewbits.inference.stochastic.receipt import products_counted
from fewbits.inference.stochastic.swap import operators, swap_table
from fewbits.inference.stochastic.work import count_work
from fewbits.models.loading.in_memory import apply_stochastic, restore
from fewbits.recipes.energy_prices import read_prices
from fewbits.recipes.stochastic_config import AttentionSetting, StochasticConfig
from tests.models.mixtures import mixture
from tests.models.tiny import tokens

CONFIG = StochasticConfig(
    options=STOCHASTIC.with_length(32), attention=(("*", AttentionSetting(scores=32, values=32)),)
)


def test_a_receipt_expects_an_expert_only_where_rows_came():
    model = mixture("qwen3_moe")
    apply_stochastic(model, CONFIG)
    with products_counted(model) as counted, torch.no_grad():
        model(tokens(1, 2))  # at most 4 of 8 experts
        model(tokens(2, 8))
    assert "56 linears and 2 attentions" in counted.sentence()
    assert len(counted.experts) == 16 and {*counted.experts.values()} <= {0, 1, 2}
    assert min(counted.experts.values()) < 2
    for name, times in counted.experts.items():
        assert counted.linears[f"{name}.down_proj"] == times


def test_an_expert_that_is_computed_elsewhere_is_found_out():
    model = mixture("mixtral")
    apply_stochastic(model, CONFIG)
    experts = model.model.layers[1].mlp.experts
    experts.forward = lambda hidden, chosen, weights: hidden  # reads no layer
    sentence = r"experts\.\d\.gate_proj ran 0 times in 1 passes"
    with pytest.raises(Unsupported, match=sentence), products_counted(model), torch.no_grad():
        model(tokens())


def test_what_a_token_of_a_mixture_costs():
    model, ids = mixture("mixtral"), tokens(1, 24)
    plain = count_work(model, ids)
    of_experts = [p for p in plain.products if ".experts." in p.layer]
    assert sum(p.rows for p in of_experts if p.layer.endswith("down_proj")) == 2 * 24 * 2
    assert sum(p.sharing for p in of_experts if "0.mlp" in p.layer and "up_proj" in p.layer) == pytest.approx(
        2
    )
    prices = read_prices("jouppi-7nm")
    alone, together = (energy_of(plain, prices, tokens_per_pass=n).parts["far"] for n in (1, 10**6))
    assert together < alone / 100
    apply_stochastic(model, CONFIG)
    work = count_work(model, ids)
    assert work.mean_cycles == pytest.approx(32)
    assert sum(p.macs for p in work.products) == sum(p.macs for p in plain.products)
    restore(model)


def test_a_swap_table_has_all_experts_as_one_operator():
    model = mixture("mixtral")
    ids = torch.randint(3, 96, (26,), generator=torch.Generator().manual_seed(0))
    text = TextWindows(ids, list(plan_windows(26, 13, 13)), 1, 26, 14, 13)
    chosen = operators(model, CONFIG)
    down = next(o for o in chosen if o.op == "down_proj")
    assert len(down.names) == 8 and all(".experts." in name for name in down.names)
    table = swap_table(model, text, CONFIG, [64], [down])
    assert table.swaps[0].freed < 0 and table.macs["down_proj"] > 0.1


def test_decoding_runs_experts_without_a_graph_and_says_why():
    model = mixture("mixtral")
    apply_stochastic(model, CONFIG)
    decoding = Decoding(model, batch_size=1, max_tokens=16)
    assert decoding.without_graph == "the host asks which experts have rows"
    decoding.prefill(tokens(1, 5))
    assert decoding.decode(3).shape == (1, 3)
