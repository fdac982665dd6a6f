"""Plans fit their budgets, cost no more than needed, and predict peaks that were measured elsewhere."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from fewbits.decoder.keep import KEEP_ACTIVATIONS, KEEP_NONE, KEEP_ON_HOST, Keep
from fewbits.errors import BadInput
from fewbits.families.shapes import linear_shapes
from fewbits.models.plan.layer_cost import machine_of
from fewbits.models.plan.memory_plan import GIB, Planner, plan, planner, static_of
from fewbits.recipes import get_recipe, qlora_nf4

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def of_8b(**options) -> Planner:
    return planner(LLAMA_8B, qlora_nf4(), num_tokens=8192, sequence_length=2048, **options)


def test_bytes_of_the_known_shape() -> None:
    """64 MiB an input, 96 for q, k and v, 64 for the attention's output, 448 for gate_up."""
    layer = of_8b().layer
    assert layer.inputs == 2 * 64 << 20
    assert layer.attention == (96 + 64 << 20) + 8192 * 32 * 4
    assert layer.mlp == 448 << 20
    assert layer.normed == 0  # adapters' gradients are made from the norms' inputs
    whole = planner(LLAMA_8B, replace(qlora_nf4(), lora=None), num_tokens=8192, sequence_length=2048).layer
    assert whole.normed == of_8b(dtype_bytes=4).layer.normed // 2 == 2 * 64 << 20
    assert layer.weights == sum(n * k for n, k in linear_shapes(LLAMA_8B).values()) * 2


def test_peaks_that_were_measured() -> None:
    """One H200, 8B, 4 x 2048: fused layers took 29.46 GiB, HF + PEFT 62.4 and recomputing 19.5."""
    kept = of_8b(can_keep_weights=False).plan(139 * GIB)
    assert kept.predicted.total / GIB == pytest.approx(29.46, rel=0.05)
    plain = of_8b(is_fused=False)
    assert plain.plan(139 * GIB).predicted.total / GIB == pytest.approx(62.4, rel=0.05)
    assert plain.plan(30 * GIB).predicted.total / GIB == pytest.approx(19.5, rel=0.1)


def test_what_the_last_layer_frees() -> None:
    """While it is at work all others hold what they keep: one product given up is there again at the peak."""
    sums = replace(of_8b(can_keep_weights=False), head=0)
    everything = [Keep()] * 32

    def total(last: Keep) -> int:
        return sums.price([*everything[:-1], last]).predicted.total

    whole, layer = total(Keep()), sums.layer
    assert total(Keep(mlp=False)) == total(Keep(attention=False)) == whole
    assert total(KEEP_NONE) == whole - min(layer.attention, layer.mlp)
    head_first = replace(sums, head=64 * GIB)  # the peak lies before its backward pass
    after = head_first.price([*everything[:-1], Keep(mlp=False)]).predicted.total
    assert after == head_first.price(everything).predicted.total - layer.mlp
    last = sums.plan(0).keeps[-1]
    assert not (last.attention or last.mlp)


def test_plenty_keeps_everything() -> None:
    chosen = of_8b().plan(139 * GIB)
    assert chosen.keeps == (Keep(weights=True),) * 32 and chosen.seconds == 0 and chosen.fits
    sharded = of_8b(can_keep_weights=False).plan(139 * GIB)
    assert sharded.keeps == (Keep(),) * 32 and sharded.seconds > 0
    whole = planner(LLAMA_8B, get_recipe("float8_full"), num_tokens=8192).plan(999 * GIB)
    assert whole.keeps == (KEEP_ACTIVATIONS,) * 32 and whole.seconds == 0  # there is nothing frozen


def test_less_memory_never_costs_fewer_seconds() -> None:
    plans = [of_8b().plan(int(gib * GIB)) for gib in (40, 34, 30, 24, 20, 16, 12, 10, 8.1)]
    assert all(p.fits for p in plans)
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)
    some = plans[3]  # 24 GiB: attention again in some layers only
    assert 0 < sum(not keep.attention for keep in some.keeps) < 32 and all(keep.mlp for keep in some.keeps)
    assert plans[-1].offloads
    alone = of_8b(can_offload=False).plan(24 * GIB)  # and the MLP in some, without the host's help
    assert alone.fits and 0 < sum(not keep.mlp for keep in alone.keeps) < 8 and alone.seconds > some.seconds


def test_what_never_fits_is_said() -> None:
    chosen = of_8b().plan(7 * GIB)
    assert not chosen.fits and set(chosen.keeps) <= {KEEP_ON_HOST, KEEP_NONE}
    assert not of_8b(can_offload=False).plan(8 * GIB).offloads


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_near_the_best_of_all_choices(share: float) -> None:
    """Two layers, every choice tried: greedy is at most one item of one layer worse than the best."""
    small = of_8b(num_layers=2)
    most = small.plan(1 << 50).predicted.total
    least = small.plan(0).predicted.total
    budget = int(least + share * (most - least))
    chosen = small.plan(budget)
    every = [Keep(*bits) for bits in product((False, True), repeat=5)]
    priced = [small.price(keeps, budget) for keeps in product(every, repeat=2)]
    best = min(p.seconds for p in priced if p.fits)
    largest = max(small.layer.mlp_s, small.layer.offload_s)
    assert chosen.fits and chosen.seconds <= best + largest


def test_smaller_and_smaller_until_nothing_is_left() -> None:
    finder = of_8b()
    chosen, sizes = finder.plan(139 * GIB), []
    while chosen is not None:
        sizes.append(chosen.predicted.total)
        chosen = finder.smaller(chosen)
    assert sizes == sorted(set(sizes), reverse=True) and 5 < len(sizes) < 30
    assert sizes[-1] <= 1.05 * finder.plan(0).predicted.total
    plain = of_8b(is_fused=False)
    second = plain.smaller(plain.plan(139 * GIB))
    assert second is not None and second.checkpointing and plain.smaller(second) is None


def test_a_measured_step_corrects_the_next_plan() -> None:
    finder = of_8b()
    first = finder.plan(24 * GIB)
    after = finder.corrected(first, int(1.3 * first.predicted.dynamic))
    assert after.price(first.keeps).predicted.dynamic == pytest.approx(
        1.3 * first.predicted.dynamic, rel=1e-3
    )
    second = after.plan(24 * GIB)
    assert second.fits and second.seconds > first.seconds


def test_one_line_says_it_all() -> None:
    text = str(plan(LLAMA_8B, qlora_nf4(), budget_bytes=24 * GIB, num_tokens=8192, sequence_length=2048))
    assert "of 32 layers keep" in text and "GiB predicted of 24.00 GiB" in text and "ms a step" in text
    assert "not fused" in str(of_8b(is_fused=False).plan(30 * GIB))


def test_other_shapes_and_recipes() -> None:
    phi = {**LLAMA_8B, "model_type": "phi3"}
    assert planner(phi, qlora_nf4(), num_tokens=64).layer.attention == of_8b().layer.attention // 128
    qwen, gemma = ({**LLAMA_8B, "model_type": name} for name in ("qwen3", "gemma2"))
    more = planner(qwen, qlora_nf4(), num_tokens=8192).layer.attention - of_8b().layer.attention
    assert more == 8192 * (4096 + 1024) * 2, "normed q and k beside the product"
    more = planner(gemma, qlora_nf4(), num_tokens=8192).layer.always - of_8b().layer.always
    assert more == 2 * 64 << 20, "what the norms after each half read"
    full = planner(LLAMA_8B, get_recipe("float8_full"), num_tokens=1).plan(1 << 50)
    assert full.predicted.static.optimizer == 4 * full.predicted.static.gradients
    with pytest.raises(BadInput, match="at least one token"):
        planner(LLAMA_8B, qlora_nf4(), num_tokens=0)


def test_machines_by_age() -> None:
    assert machine_of((9, 0)).flops > machine_of((8, 0)).flops > machine_of((8, 6)).flops
    assert machine_of((10, 3)) == machine_of((10, 0))
    assert machine_of((7, 5)) == machine_of(None)


def test_static_bytes_of_a_model() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4, bias=False)).to(torch.bfloat16)
    model[1].weight = nn.Parameter(model[1].weight.detach(), requires_grad=False)
    static = static_of(model)
    assert static.weights == (8 * 4 + 4 + 16) * 2
    assert static.gradients == 36 * 2 and static.optimizer == 36 * 8
