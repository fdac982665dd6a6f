"""Stochastic attention in a model: the products it computes, masks, caches, nothing goes past it."""

from __future__ import annotations

import pytest
import torch

from fewbits import sc_matmul
from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import Stochastic
from fewbits.host.attention import use_attention, used_attention
from fewbits.models.stochastic.attention import (
    attention_products,
    restore_stochastic_attention,
    stochastic_attention_of,
    use_stochastic_attention,
)
from fewbits.nn.row_plan import RowPlan
from fewbits.nn.stochastic.attention import AttentionProducts, stochastic_attention
from fewbits.nn.stochastic.product import stochastic_product
from tests.models.tiny import FAMILIES, tiny, tokens

OPTIONS = Stochastic(halve_bipolar_stoc_len=True, chunk_d=8)
FINE = Stochastic(sc_prec=12, chunk_d=16)
BOTH = AttentionProducts(OPTIONS, OPTIONS)


def _heads(seed=0, *, B=2, H=4, K=2, S=5, T=11, D=16):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, h, n, D, generator=generator) for h, n in ((H, S), (K, T), (K, T)))


def test_each_product_is_sc_matmul_of_one_head():
    q, k, v = _heads()
    mask = torch.zeros(2, 1, 5, 11)
    mask[..., 7:] = torch.finfo(torch.float32).min
    out, weights = stochastic_attention(q, k, v, mask, BOTH, scale=0.3)
    for b in range(2):
        for h in range(4):
            kb, vb = k[b, h // 2], v[b, h // 2]
            scores = sc_matmul(q[b, h], kb, halve_bipolar_stoc_len=True, chunk_d=8) * 0.3
            p = (scores + mask[b, 0]).softmax(-1)
            assert torch.equal(weights[b, h], p)
            assert torch.equal(out[b, :, h], sc_matmul(p, vb.T, halve_bipolar_stoc_len=True, chunk_d=8))


def test_one_product_alone_and_a_bool_mask():
    q, k, v = _heads(1)
    seen = torch.rand(2, 1, 5, 11) > 0.3
    seen[..., 0] = True
    exact = stochastic_attention(q, k, v, seen, AttentionProducts(), scale=0.25)
    k4, v4 = (t.repeat_interleave(2, 1) for t in (k, v))
    p = (q @ k4.mT * 0.25).masked_fill(~seen, -torch.inf).softmax(-1)
    torch.testing.assert_close(exact[0], (p @ v4).transpose(1, 2))
    only = stochastic_attention(q, k, v, seen, AttentionProducts(values=OPTIONS), scale=0.25)
    assert torch.equal(only[1], exact[1])
    assert not torch.equal(only[0], exact[0])


def test_gradient_is_that_of_the_exact_product():
    a, b = (torch.randn(3, n, 20, requires_grad=True) for n in (4, 6))
    dy = torch.randn(3, 4, 6)
    stochastic_product(a, b, OPTIONS).backward(dy)
    torch.testing.assert_close(a.grad, dy @ b)
    torch.testing.assert_close(b.grad, dy.mT @ a)


@pytest.mark.parametrize("family", FAMILIES)
def test_fine_products_come_close_to_exact_attention(family):
    """With 12 bits and 4096 cycles little is left of the error, so masks, windows and heads are right."""
    model = tiny(family)
    ids = tokens(2, 24)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        before = model(ids, attention_mask=mask).logits
        lines = use_stochastic_attention(model, AttentionProducts(FINE, FINE)).notes
        fine = model(ids, attention_mask=mask).logits
        restore_stochastic_attention(model)
        after = model(ids, attention_mask=mask).logits
    assert any("x2" in line and "4096 cycles" in line for line in lines)
    assert torch.equal(before, after)
    seen = mask.bool()
    error = (fine - before)[seen].norm() / before[seen].norm()
    assert 0 < error < 0.03


def test_a_cache_gives_what_one_pass_gives():
    """Chunks of keys are quantised apart, so QK^T has the same rows with a cache."""
    model = tiny("llama")
    products = AttentionProducts(scores=OPTIONS)
    use_stochastic_attention(model, products)
    ids = tokens(1, 12)
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :9], use_cache=True)
        rest = model(ids[:, 9:], past_key_values=first.past_key_values, use_cache=True).logits
    torch.testing.assert_close(whole[:, 9:], rest, rtol=1e-4, atol=1e-4)


def test_two_products_over_a_cache_run_and_differ_from_exact_ones():
    model = tiny("qwen3")
    ids = tokens(1, 12)
    how = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        exact = model.generate(ids, **how)
        use_stochastic_attention(model, BOTH)
        ours = model.generate(ids, **how)
    assert ours.sequences.shape == exact.sequences.shape
    assert not torch.equal(ours.logits[0], exact.logits[0])


def test_only_the_named_layers():
    model = tiny("llama")
    name = "model.layers.1.self_attn"
    lines = use_stochastic_attention(model, {name: BOTH}).notes
    assert attention_products(model) == {name: BOTH}
    assert lines[-1] == "attention x1: exact"
    with torch.no_grad():
        model(tokens())
    assert stochastic_attention_of(model).ran == {name}


def test_use_attention_comes_back_with_restore():
    model = tiny("llama")
    use_attention(model)
    use_stochastic_attention(model, BOTH)
    assert used_attention(model) is None
    restore_stochastic_attention(model)
    assert used_attention(model) is not None
    assert stochastic_attention_of(model) is None


def test_it_trains():
    model = tiny("llama").train()
    use_stochastic_attention(model, BOTH)
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad
    assert gradient.isfinite().all() and gradient.any()


def test_another_attention_set_later_is_refused():
    model = tiny("llama")
    use_stochastic_attention(model, BOTH)
    model.set_attn_implementation("sdpa")
    with pytest.raises(Unsupported, match="set to 'sdpa' after"):
        model(tokens())


def test_a_layer_that_goes_past_is_refused():
    model = tiny("llama")
    use_stochastic_attention(model, BOTH)
    attention = model.model.layers[0].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(Unsupported, match=r"model\.layers\.0\.self_attn was computed elsewhere"):
        model(tokens())


def test_refusals():
    model = tiny("llama")
    with pytest.raises(BadInput, match=r"no attention module of this model; its first is model\.layers\.0"):
        use_stochastic_attention(model, {"model.layers.7.self_attn": BOTH})
    with pytest.raises(Unsupported, match='both products are "per_row"'):
        AttentionProducts(scores=Stochastic(granularity="per_head"))
    grouped = Stochastic(or_group=4)
    with pytest.raises(Unsupported, match="attention values with or_group=4: their inner dimensions are the"):
        AttentionProducts(scores=grouped, values=grouped)
    assert AttentionProducts(values=grouped, values_plan=RowPlan(integer=True)).scores is None
    use_stochastic_attention(model, BOTH)
    with pytest.raises(Unsupported, match="stochastic already"):
        use_stochastic_attention(model, BOTH)
