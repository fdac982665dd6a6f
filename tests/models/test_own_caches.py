"""A cache that the caller brings to ``generate``: what transformers gives, through decoding's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from fewbits.models.generation import loop
from fewbits.models.generation.loop import decoding_of
from tests.models.emulated import count_steps, on_a_cpu
from tests.models.test_decode_generate import model_of
from tests.models.tiny import tokens

GREEDY = {"do_sample": False, "max_new_tokens": 9}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    on_a_cpu(monkeypatch)
    return count_steps(monkeypatch)


def own(model: Any, ids: Tensor, **words: Any) -> Any:
    """Through transformers' loop."""
    return type(model).generate(model, ids, attention_mask=torch.ones_like(ids), **GREEDY, **words)


def ours(model: Any, ids: Tensor, **words: Any) -> Any:
    return model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY, **words)


@torch.no_grad()
def check(model: Any, text: Tensor, count: int, cache: Any) -> None:
    """The last tokens are the likeliest of the model, up to rounding, and the cache is the text's."""
    fresh = DynamicCache(config=model.config)
    logits = model(text[:, :-1], past_key_values=fresh).logits[:, -count:].float()
    chosen = logits.gather(-1, text[:, -count:, None])[..., 0]
    assert bool(((logits.amax(-1) - chosen) < 0.1 * logits.std(-1)).all())
    assert cache.get_seq_length() == text.shape[1] - 1
    for mine, other in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, rtol=0.05, atol=0.1)
        torch.testing.assert_close(mine.values, other.values, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_turn_after_turn(family: str, steps: list[int]) -> None:
    """Three turns of two conversations over one cache, and what it holds after each."""
    model, text = model_of(family), tokens(2, 7)
    cache = DynamicCache(config=model.config)
    for turn in range(3):
        steps[0] = 0
        text = ours(model, text, past_key_values=cache)
        assert steps[0] == 8 and not decoding_of(model).said
        check(model, text, 9, cache)
        text = torch.cat([text, tokens(2, 4 + turn, seed=turn)], dim=1)


def test_a_prefix_read_before(steps: list[int]) -> None:
    """With padding in front of one text, guesses, and an output that holds the cache."""
    model, ids = model_of("llama"), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    whole = model.generate(ids, attention_mask=mask, **GREEDY)
    cache = DynamicCache()
    with torch.no_grad():
        places = (mask[:, :12].cumsum(-1) - 1).clamp(min=0)
        model(ids[:, :12], attention_mask=mask[:, :12], position_ids=places, past_key_values=cache)
    steps[0] = 0
    out = model.generate(
        ids, attention_mask=mask, past_key_values=cache, return_dict_in_generate=True, **GREEDY
    )
    assert (
        torch.equal(out.sequences[:, :22], whole[:, :22]) and steps[0] == 8 and out.past_key_values is cache
    )
    one = ids[1:].repeat(1, 2)
    cache = DynamicCache()
    with torch.no_grad():
        model(one[:, :30], past_key_values=cache)
    guessed = ours(model, one, past_key_values=cache, prompt_lookup_num_tokens=3)
    check(model, guessed, 9, cache)
    text = ours(model, torch.cat([guessed, ids[:1]], dim=1), past_key_values=cache)
    check(model, text, 9, cache)


def test_what_goes_to_transformers_finds_the_cache_as_it_was(
    steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = model_of("llama"), tokens(1, 12)
    wanted = own(model, ids)
    static = StaticCache(config=model.config, max_cache_len=40)
    assert torch.equal(ours(model, ids, past_key_values=static), wanted) and not steps[0]

    def no_step(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(loop, "DecodeStep", no_step)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache)
    assert torch.equal(ours(model, ids, past_key_values=cache), wanted) and not steps[0]
    assert cache.get_seq_length() == wanted.shape[1] - 1
