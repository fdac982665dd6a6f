"""Prompts through fused layers: a cache begun by the nodes is the one that the layer's own forward makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from transformers import DynamicCache, StaticCache

import fewbits
from fewbits import FastLanguageModel
from fewbits.decoder import parts as decoder_parts
from fewbits.decoder.both_halves import records_nothing
from fewbits.decoder.fuse import fusion_of
from fewbits.models import fast
from fewbits.models.generation.packed_cache import PackedCache
from tests.models.tiny import tiny, tokens


def nodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list of one number: the layers that the nodes computed from now on."""
    count = [0]
    real = decoder_parts.fused_attention

    def counted(*args: Any) -> Tensor:
        count[0] += 1
        return real(*args)

    monkeypatch.setattr(decoder_parts, "fused_attention", counted)
    return count


def padded() -> dict[str, Tensor]:
    ids = tokens(2, 24)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


@torch.no_grad()
def read(model: Any, given: dict[str, Tensor], cache: Any) -> tuple[Tensor, Tensor]:
    """Logits of a prompt and of the token behind it."""
    first = model(**given, past_key_values=cache, use_cache=True).logits
    mask = torch.cat([given["attention_mask"], torch.ones(2, 1, dtype=torch.long)], dim=1)
    behind = {"input_ids": tokens(2, 1, seed=9), "position_ids": given["position_ids"][:, -1:] + 1}
    return first, model(**behind, attention_mask=mask, past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "phi3"])
def test_the_cache_and_the_logits_are_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny(family), padded()
    own_cache = DynamicCache(config=model.config)
    own, own_next = read(model, given, own_cache)
    fewbits.fuse(model)
    count = nodes(monkeypatch)
    cache = DynamicCache(config=model.config)
    logits, behind = read(model, given, cache)
    assert (
        count[0] == model.config.num_hidden_layers
    )  # the prompt's; the token behind it takes the layer's own
    seen = given["attention_mask"].bool()
    torch.testing.assert_close(logits[seen], own[seen], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(behind, own_next, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(cache.layers, own_cache.layers, strict=True):
        assert ours.get_seq_length() == theirs.get_seq_length() == 25
        last = ours.keys.shape[2] - 9  # of the padded row, and within a window
        torch.testing.assert_close(ours.keys[:, :, -last:], theirs.keys[:, :, -last:], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            ours.values[:, :, -last:], theirs.values[:, :, -last:], rtol=1e-4, atol=1e-4
        )
    assert not fusion_of(model).fallbacks


def test_other_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """In few bits, with buffers of a fixed length, and one that is continued by several tokens."""
    model, given = tiny("llama"), padded()
    makers = {
        "packed": lambda: PackedCache(model.config, "int8"),
        "static": lambda: StaticCache(config=model.config, max_cache_len=40),
    }
    own = {name: read(model, given, make()) for name, make in makers.items()}
    ids = given["input_ids"]
    with torch.no_grad():
        whole = model(ids).logits
    fewbits.fuse(model)
    count = nodes(monkeypatch)
    for name, make in makers.items():
        for ours, theirs in zip(read(model, given, make()), own[name], strict=True):
            torch.testing.assert_close(ours[:, -1], theirs[:, -1], rtol=1e-3, atol=1e-3)
    assert count[0] >= model.config.num_hidden_layers
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache)
        rest = model(ids[:, 10:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 10:], rtol=1e-4, atol=1e-4)


def test_float8_products_are_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt takes the products that training takes; without a GPU by their definition."""
    model, given = tiny("llama", dtype=torch.bfloat16), padded()
    fewbits.convert(model, "qlora_nf4_fp8")
    own, _ = read(model, given, DynamicCache(config=model.config))
    fewbits.fuse(model)
    count = nodes(monkeypatch)
    logits, _ = read(model, given, DynamicCache(config=model.config))
    assert count[0] == model.config.num_hidden_layers
    seen = given["attention_mask"].bool()
    assert float((logits - own)[seen].float().norm() / own[seen].float().norm()) < 0.1


def test_a_model_made_ready_to_generate_is_fused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CPU that passes for a GPU; once, and without saying the same again."""
    monkeypatch.setattr(fast, "_is_on_gpu", lambda model: True)
    model, given = tiny("llama"), padded()
    own, _ = read(model, given, DynamicCache(config=model.config))
    for _ in range(2):
        FastLanguageModel.for_inference(model)
    count = nodes(monkeypatch)
    logits, _ = read(model, given, DynamicCache(config=model.config))
    assert count[0] == model.config.num_hidden_layers
    seen = given["attention_mask"].bool()
    torch.testing.assert_close(logits[seen], own[seen], rtol=1e-4, atol=1e-4)
    assert len(set(model.fewbits_notes)) == len(model.fewbits_notes)
    fewbits.restore(model)
    assert fusion_of(model) is None


def test_a_loop_of_ones_own_goes_on_behind_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """After for_inference, with gradients left on: the cache is there, as the configuration says."""
    monkeypatch.setattr(fast, "_is_on_gpu", lambda model: True)
    model, ids, more = tiny("llama"), tokens(1, 12), tokens(1, 2, seed=4)
    whole = model(torch.cat([ids, more], dim=1)).logits[:, -2:]
    FastLanguageModel.for_inference(model)
    assert fusion_of(model) is not None
    cache = model(ids).past_key_values
    torch.testing.assert_close(model(more, past_key_values=cache).logits, whole, rtol=1e-5, atol=1e-5)
    FastLanguageModel.for_training(model)
    assert model.eval()(ids).past_key_values is None


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_text_of_one_token(family: str) -> None:
    model, ids = tiny(family), tokens(1, 1)
    need = model(ids).logits
    fewbits.fuse(model)
    torch.testing.assert_close(model(ids).logits, need, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_without_gradients_there_are_no_nodes_and_the_same_numbers(family: str) -> None:
    """Beside a pass whose gradients are on, where nodes compute; and under forward-mode derivatives."""
    model, ids = tiny(family), tokens(2, 24)
    fewbits.fuse(model)
    need = model(ids, use_cache=False).logits
    assert need.grad_fn is not None
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        assert torch.equal(logits, need.detach())
        assert records_nothing()
        with forward_ad.dual_level():
            assert not records_nothing()
        assert torch.func.vmap(lambda x: x + (not records_nothing()))(torch.zeros(2)).all()
    assert not records_nothing()
    assert not fusion_of(model).fallbacks
