"""Scales between queries and keys, chosen from text: counted attention comes nearer to the exact one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fewbits import sc_matmul
from fewbits.errors import BadInput
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.models.stochastic.query_key_scales import captured_queries_and_keys, fold_query_key_scales
from fewbits.training.calibration.query_key_scales import choose_query_key_scales
from tests.models.tiny import tiny, tokens

OPTIONS = dataclasses.replace(STOCHASTIC, stoc_len=64)


def uneven(family: str):
    """A model whose keys have channels of very different size, as those of large models have."""
    model = tiny(family)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            if family == "qwen3":
                attention.k_norm.weight[3] *= 20
                attention.k_norm.weight[11] *= 20
            else:
                attention.k_proj.weight[3] *= 20
                attention.k_proj.weight[11] *= 20
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("powers_of_two", [False, True])
def test_the_divergence_falls_and_is_that_of_the_folded_model(family: str, powers_of_two: bool) -> None:
    model, ids = uneven(family), tokens(2, 24)
    choices = choose_query_key_scales(model, [ids], OPTIONS, powers_of_two=powers_of_two)
    logits = model(ids).logits
    fold_query_key_scales(model, {name: choice.scales for name, choice in choices.items()})
    if powers_of_two:
        assert torch.equal(model(ids).logits, logits)
    folded = choose_query_key_scales(model, [ids], OPTIONS)
    for name, choice in choices.items():
        assert choice.after < 0.8 * choice.before
        assert folded[name].before == pytest.approx(choice.after, rel=0.05)


def test_the_divergence_is_that_of_the_definition() -> None:
    model, ids = uneven("llama"), tokens(1, 8)
    (operands,) = captured_queries_and_keys(model, [ids])
    choice = choose_query_key_scales(model, [ids], OPTIONS)["model.layers.0.self_attn"]
    of_layer = operands["model.layers.0.self_attn"]
    total = 0.0
    for head in range(4):
        q, k = of_layer.q[0, head], of_layer.k[0, head // 2]
        counted = sc_matmul(q, k, halve_bipolar_stoc_len=True, stoc_len=64, n_masks=64) * of_layer.factor
        exact = (q @ k.T) * of_layer.factor
        for row in range(8):
            p, r = exact[row, : row + 1].softmax(0), counted[row, : row + 1].softmax(0)
            total += float((p * (p / r).log()).sum()) / 32
    assert choice.before == pytest.approx(total, rel=1e-3)


def test_without_text_there_is_no_choice() -> None:
    with pytest.raises(BadInput, match="no tokens to choose scales by; give at least one batch"):
        choose_query_key_scales(tiny("llama"), [], OPTIONS)
