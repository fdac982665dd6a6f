"""Scales folded between queries and keys: the logits stay, in every family that has a place for them."""

from __future__ import annotations

import pytest
import torch

from fewbits.errors import BadInput, Unsupported
from fewbits.models.packing.convert import convert
from fewbits.models.stochastic.query_key_scales import (
    captured_queries_and_keys,
    fold_query_key_scales,
    query_key_places,
)
from tests.models import tiny as tiny_models
from tests.models.mixtures import mixture
from tests.models.tiny import FAMILIES, tiny, tokens

ELSEWHERE = {"phi3"}  # queries, keys and values in one linear
# Norms of the row, neighbours turned together with norms of each head's own weights, layers that do not turn.
FURTHER = {"olmo2": {}, "cohere": {"use_qk_norm": True}, "smollm3": {}}


def random_scales(model, *, powers: bool = False) -> dict[str, torch.Tensor]:
    scales = {}
    for seed, (name, place) in enumerate(query_key_places(model).items()):
        generator = torch.Generator().manual_seed(seed)
        shape = (1 if place.shared else place.heads, place.size)
        logs = torch.randint(-2, 3, shape, generator=generator).float()
        if not powers:
            logs = logs * torch.rand(shape, generator=generator, dtype=torch.float32)
        if place.pairs is not None:
            logs[:, place.pairs[1]] = logs[:, place.pairs[0]]
        scales[name] = logs.exp2().expand(place.heads, -1)
    return scales


@pytest.mark.parametrize("family", [*(f for f in FAMILIES if f not in ELSEWHERE), *FURTHER])
def test_logits_stay_and_queries_and_keys_do_not(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if family in FURTHER:
        monkeypatch.setitem(tiny_models._CHANGES, family, FURTHER[family])
    model, ids = tiny(family), tokens()
    before, (seen,) = model(ids).logits, captured_queries_and_keys(model, [ids])
    scales = random_scales(model)
    fold_query_key_scales(model, scales)
    after, (then,) = model(ids).logits, captured_queries_and_keys(model, [ids])
    assert (after - before).abs().max() < 1e-4 * before.abs().max()
    for name, s in scales.items():
        group = then[name].q.shape[1] // len(s)
        expected = seen[name].q * s.repeat_interleave(group, 0)[:, None]
        torch.testing.assert_close(then[name].q, expected, rtol=2e-3, atol=1e-3)
        torch.testing.assert_close(then[name].k, seen[name].k / s[:, None], rtol=2e-3, atol=1e-3)
    fold_query_key_scales(model, {name: 1 / s for name, s in scales.items()})
    assert (model(ids).logits - before).abs().max() < 1e-4 * before.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_powers_of_two_change_no_bit(dtype: torch.dtype) -> None:
    model, ids = tiny("qwen2", dtype=dtype), tokens()
    before = model(ids).logits
    fold_query_key_scales(model, random_scales(model, powers=True))
    assert torch.equal(model(ids).logits, before)


def test_scales_that_would_change_the_scores_are_refused_before_anything_changes() -> None:
    model = tiny("llama")
    weights = {name: p.clone() for name, p in model.named_parameters()}
    name, place = next(iter(query_key_places(model).items()))
    good = torch.ones(place.heads, place.size)
    odd = good.clone()
    odd[0, 3] = 2.0
    for scales, words in (
        ({"model.nowhere": good}, "model.nowhere is no attention module of this model; its first is"),
        ({name: good[:, :4]}, "positive, finite ones"),
        ({name: -good}, "positive, finite ones"),
        ({name: good, "model.layers.1.self_attn": odd}, "channels that rotary positions turn together"),
    ):
        with pytest.raises(BadInput, match=words):
            fold_query_key_scales(model, scales)
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


def test_heads_that_share_a_norm_share_their_scales() -> None:
    model = tiny("qwen3")
    name, place = next(iter(query_key_places(model).items()))
    assert place.shared and place.heads > 1
    scales = torch.ones(place.heads, place.size)
    scales[0] = 2.0
    with pytest.raises(BadInput, match="different scales for its heads, whose norms have one weight for all"):
        fold_query_key_scales(model, {name: scales})


def test_models_without_a_place_are_refused() -> None:
    with pytest.raises(Unsupported, match="phi3 has no queries and keys of their own linears"):
        query_key_places(tiny("phi3"))
    model = tiny("llama")
    convert(model, recipe="int8")
    with pytest.raises(Unsupported, match="converted already; fold scales into its original form"):
        fold_query_key_scales(model, {})
    model = mixture("olmoe")
    assert query_key_places(model)
    model.config.clip_qkv = 0.2  # cuts off after the norms, whose weights would be scaled
    with pytest.raises(Unsupported, match=r"cuts queries and keys off at 0.2 \(clip_qkv\)"):
        query_key_places(model)


def test_watching_leaves_nothing_behind() -> None:
    model, ids = tiny("llama"), tokens()
    attention = model.model.layers[0].self_attn
    before, names = model.config._attn_implementation, set(vars(attention))
    (seen,) = captured_queries_and_keys(model, [ids])
    assert seen["model.layers.0.self_attn"].q.shape == (2, 4, 24, 16)
    assert model.config._attn_implementation == before and set(vars(attention)) == names
