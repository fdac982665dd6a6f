"""A cache that the caller brings to ``generate``: what transformers gives, through decoding's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from fewbits.errors import BadInput
from fewbits.models.generation import loop
from fewbits.models.generation.loop import decoding_of
from fewbits.models.generation.packed_cache import PackedCache
from tests.models.emulated import count_steps, on_a_cpu
from tests.models.test_decode_generate import model_of
from tests.models.test_model_step import ready
from tests.models.test_model_step import steps as steps_of_modules
from tests.models.tiny import tiny, tokens

GREEDY = {"do_sample": False, "max_new_tokens": 9}


of_modules = pytest.fixture(name="of_modules")(steps_of_modules.__wrapped__)  # type: ignore[attr-defined]


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
    recording = DynamicCache(config=model.config)
    recording.layers[0].record_past = True  # as speculation of transformers has it
    assert torch.equal(ours(model, ids, past_key_values=recording), wanted) and not steps[0]

    def no_step(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(loop, "DecodeStep", no_step)
    for cache in (
        DynamicCache(config=model.config),
        StaticCache(config=model.config, max_cache_len=40),
        StaticCache(config=model.config, max_cache_len=20),
    ):
        with torch.no_grad():
            model(ids[:, :6], past_key_values=cache)
        assert torch.equal(ours(model, ids, past_key_values=cache), wanted) and not steps[0]
        assert int(cache.get_seq_length()) == wanted.shape[1] - 1


def caches(model: Any, kind: str) -> Any:
    """Two equal caches: for a step, and to see what is right."""
    makers = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=90),
        "packed": lambda: PackedCache(
            model.config, {"keys": "int8", "values": "int8", "newest": 6, "first": 2}
        ),
    }
    return makers[kind](), makers[kind]()


@pytest.mark.parametrize(
    ("family", "kind", "first"),
    [
        ("llama", "static", 7),
        ("mistral", "dynamic", 25),
        ("mistral", "static", 25),
        ("llama", "packed", 7),
    ],
)
def test_caches_of_every_kind_turn_after_turn(family: str, kind: str, first: int, steps: list[int]) -> None:
    """Windows of 16 tokens, static tensors, few bits: each turn's tokens, and what the cache then holds."""
    model, text = model_of(family, **({"head_dim": 64} if kind == "packed" else {})), tokens(2, first)
    cache, right = caches(model, kind)
    for turn in range(4):
        steps[0], before = 0, text
        text = ours(model, text, past_key_values=cache)
        assert steps[0] == 8 and not decoding_of(model).said
        follow(model, right, before, text)
        compare(cache, right)
        text = torch.cat([text, tokens(2, 4 + turn, seed=turn)], dim=1)


@pytest.mark.parametrize("first", [7, 25])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_layers_of_two_kinds_through_the_models_own_modules(
    kind: str, first: int, of_modules: list[int]
) -> None:
    """A step of a family that is not fused takes them over, and gives them back, as one of kernels does."""
    model, text = ready(tiny("gemma2")), tokens(2, first)
    cache, right = caches(model, kind)
    for turn in range(3):
        of_modules.clear()
        before = text
        text = ours(model, text, past_key_values=cache)
        assert len(of_modules) == 8, decoding_of(model).said
        follow(model, right, before, text)
        compare(cache, right)
        text = torch.cat([text, tokens(2, 4 + turn, seed=turn)], dim=1)


@torch.no_grad()
def follow(model: Any, cache: Any, before: Tensor, text: Tensor) -> None:
    """Feed a cache what a turn has read and made; each new token is the likeliest one, up to rounding."""
    length, read = before.shape[1], int(cache.get_seq_length())
    pieces = [text[:, read:length], *text[:, length:-1].split(1, dim=1)]
    for piece, new in zip(pieces, text[:, length:].split(1, dim=1), strict=True):
        logits = model(piece, past_key_values=cache).logits[:, -1].float()
        chosen = logits.gather(-1, new)[:, 0]
        assert bool(((logits.amax(-1) - chosen) < 0.1 * logits.std(-1)).all())


def compare(cache: Any, right: Any) -> None:
    assert int(cache.get_seq_length()) == int(right.get_seq_length())
    for mine, other in zip(cache.layers, right.layers, strict=True):
        pairs = [(mine.keys, other.keys), (mine.values, other.values)]
        if hasattr(mine, "heads"):
            assert {
                name: [t.shape for t in heads.tensors().values()] for name, heads in mine.heads.items()
            } == {name: [t.shape for t in heads.tensors().values()] for name, heads in other.heads.items()}
            pairs = [(mine.heads[name].read(None), heads.read(None)) for name, heads in other.heads.items()]
            pairs += [(mine.heads[name].newest, heads.newest) for name, heads in other.heads.items()]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.1)


def test_a_packed_prefix_for_padded_prompts(steps: list[int]) -> None:
    """A cache that knows of the padding goes on; one that does not goes to transformers' loop."""
    model, ids = model_of("llama", head_dim=64), tokens(2, 24)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    padding, places = torch.tensor([5, 0]), (mask[:, :15].cumsum(-1) - 1).clamp(min=0)

    def made(**how: Any) -> Any:
        cache = PackedCache(model.config, {"keys": "int8", "values": "int8", "newest": 6, "first": 2}, **how)
        with torch.no_grad():
            model(ids[:, :15], attention_mask=mask[:, :15], position_ids=places, past_key_values=cache)
        return cache

    def run(cache: Any) -> Tensor:
        steps[0] = 0
        out: Tensor = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
        return out

    known, right = made(padding=padding), made(padding=padding)
    found = run(known)
    assert steps[0] == 8
    wanted = type(model).generate(model, ids, attention_mask=mask, past_key_values=right, **GREEDY)
    assert torch.equal(found[:, :26], wanted[:, :26])
    assert known.get_seq_length() == right.get_seq_length() == 32
    for mine, other in zip(known.layers, right.layers, strict=True):
        torch.testing.assert_close(mine.heads["keys"].first, other.heads["keys"].first, rtol=0.05, atol=0.1)
    run(made())
    assert not steps[0] and any("not made for the padding" in line for line in decoding_of(model).said)
    cropped = made(padding=padding)
    cropped.crop(-1)
    with torch.no_grad():
        run(cropped)
    assert steps[0] == 8  # nine more tokens fill what was cropped away


@torch.no_grad()
def test_caches_that_no_call_can_go_on_from(steps: list[int]) -> None:
    """One sentence before the model runs; new tokens alone, with the mask of all, are as in transformers."""
    model, ids = model_of("llama"), tokens(1, 6)

    def filled(kind: Any = DynamicCache) -> Any:
        cache = DynamicCache(config=model.config) if kind is DynamicCache else kind(model.config, "int8")
        model(ids, past_key_values=cache, use_cache=True)
        return cache

    for kind in (DynamicCache, PackedCache):
        with pytest.raises(
            BadInput, match="the cache holds 6 tokens and the prompt has 6; pass the whole text"
        ):
            ours(model, ids, past_key_values=filled(kind))
        with pytest.raises(BadInput, match="the cache is of 1 texts and the call of 2"):
            ours(model, tokens(2, 9), past_key_values=filled(kind))
    asked = {**GREEDY, "do_sample": True, "num_return_sequences": 2}
    whole, cache = torch.cat([ids, tokens(1, 4, seed=3)], 1), filled()
    with pytest.raises(BadInput, match="the cache is of 1 texts and the call of 2"):
        model.generate(whole, past_key_values=cache, **asked)
    cache.batch_repeat_interleave(2)
    assert model.generate(whole, past_key_values=cache, **asked).shape == (2, 19)
    other = DynamicCache()
    other.update(torch.zeros(1, 3, 4, 16), torch.zeros(1, 3, 4, 16), 0)
    with pytest.raises(BadInput, match="1 layers of 3 heads of 16 values and the model 2 of 2 of 16: it was"):
        ours(model, ids, past_key_values=other)
    for piece in (0, -3):
        with pytest.raises(BadInput, match="is no number of tokens; give 1 or more"):
            ours(model, ids, prefill_chunk_size=piece)
    more = tokens(1, 4, seed=3)
    whole = torch.cat([ids, more], 1)
    need = ours(model, whole, past_key_values=filled())[:, 10:]
    given = {"attention_mask": torch.ones_like(whole), "past_key_values": filled(), **GREEDY}
    assert torch.equal(model.generate(more, **given)[:, 4:], need)
    empty = DynamicCache(config=model.config)
    assert torch.equal(ours(model, whole, past_key_values=empty)[:, 10:], need)
