"""``generate`` over packed keys and values: the kernels by their definitions on a CPU, and the calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fewbits
from fewbits.errors import BadInput, Unsupported
from fewbits.formats.kv_cache import KVCache
from fewbits.models.fast import with_methods
from fewbits.models.generation import loop as decode_generate
from fewbits.models.generation import step as decode_step
from fewbits.models.generation.loop import decoding_of
from fewbits.models.generation.packed_cache import PackedCache
from fewbits.models.generation.products import products_in_16_bits
from fewbits.models.generation.prompt import HowToRead, left_padding, read_prompt
from tests.models.tiny import tiny, tokens

BF16 = torch.bfloat16
SMALL = {"keys": "int8", "values": "int4", "newest": 16, "first": 2}


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the question whether there is a GPU."""
    real = decode_step.why_not

    def without_the_gpu(model: Any) -> str:
        reason = real(model)
        return "" if reason == "the model is not on one GPU" else reason

    monkeypatch.setattr(decode_generate, "why_not", without_the_gpu)


def model_of(family: str = "llama", recipe: Any = "qlora_nf4", **changes: Any) -> Any:
    model = tiny(family, dtype=BF16, head_dim=64, **changes)
    if recipe:
        fewbits.convert(model, recipe)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return with_methods(model)


def padded(length: int = 40) -> dict[str, Tensor]:
    """Three prompts, two of them padded on the left."""
    ids = tokens(3, length)
    mask = torch.ones_like(ids)
    mask[0, :7], mask[2, : length - 1] = 0, 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_step_gives_the_logits_of_the_definition(family: str) -> None:
    """Forced along one text, padding in front, long after the ring has turned."""
    model, prompt = model_of(family), padded()
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    text = torch.cat([ids, tokens(3, 30, seed=5)], dim=1)
    kind = KVCache(**SMALL)
    with torch.no_grad(), products_in_16_bits(model):
        padding = left_padding(ids, mask)
        state = decoding_of(model)
        read = read_prompt(model, ids, mask, padding, HowToRead(kind))
        step = decode_generate._ready(state, model, ids, read, padding, mask, text.shape[1])
        assert state.proved and not state.refused_caches and set(step.packed) == {0, 1}
        for n in range(ids.shape[1], text.shape[1] - 1):
            mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
            own = model(
                input_ids=text[:, n : n + 1],
                attention_mask=mask,
                position_ids=(n - padding)[:, None],
                past_key_values=read.cache,
            ).logits[:, -1]
            step.tokens.copy_(text[:, n])
            logits = step.advance()
            assert float((logits - own).norm() / own.norm()) < 0.02 * 2**0.5


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_cpu")
def test_the_call_says_it_or_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = decode_step.DecodeStep.advance

    def advance(self: Any) -> Tensor:
        made.append(self.kv_cache)
        return real(self)

    monkeypatch.setattr(decode_step.DecodeStep, "advance", advance)
    common = {**padded(), "max_new_tokens": 30, "do_sample": False}
    plain = model_of()
    whole = plain.generate(**common, kv_cache={"keys": "int4", "newest": 100})
    assert torch.equal(whole, plain.generate(**common))  # nothing was packed yet
    assert {None if kind is None else kind.name for kind in made} == {"int4", None}
    made.clear()
    said = plain.generate(**common, kv_cache=SMALL)
    assert len(made) == 29 and made[0] == KVCache(**SMALL)
    asked = model_of(recipe={"name": "qlora_nf4", "kv_cache": SMALL})
    assert torch.equal(asked.generate(**common), said)
    alone = asked.generate(common["input_ids"][:1, 7:], max_new_tokens=30, do_sample=False)
    assert torch.equal(alone[0, 33:], said[0, 40:])  # padding changes nothing
    made.clear()
    assert torch.equal(asked.generate(**common, kv_cache="bfloat16"), plain.generate(**common))
    assert set(made) == {None}


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_cpu")
def test_other_ways_have_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams, a head size and a format that no kernel reads, guesses: transformers' loop, the same formats."""
    made: list[PackedCache] = []
    real = PackedCache.__init__

    def noted(self: Any, *args: Any, **keywords: Any) -> None:
        made.append(self)
        real(self, *args, **keywords)

    monkeypatch.setattr(PackedCache, "__init__", noted)
    model = model_of()
    for more in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        made.clear()
        out = model.generate(**padded(), max_new_tokens=30, kv_cache=SMALL, **more)
        assert out.shape[1] == 70 and len(made) == 1
    made.clear()
    mixed = {**SMALL, "keys": "bfloat16"}
    model.generate(**padded(), max_new_tokens=30, do_sample=False, kv_cache=mixed)
    assert made[0].get_seq_length() == 69 and decoding_of(model).step is not None
    made.clear()
    guessed = model.generate(
        tokens(1, 40), max_new_tokens=12, do_sample=False, kv_cache=SMALL, prompt_lookup_num_tokens=3
    )
    assert torch.equal(
        guessed, model.generate(tokens(1, 40), max_new_tokens=12, do_sample=False, kv_cache=SMALL)
    )
    assert any("in 16 bits, not in int8/int4" in line for line in decoding_of(model).said)


@pytest.mark.usefixtures("on_a_cpu")
def test_a_step_that_is_refused_for_one_cache_serves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    common = {**padded(), "max_new_tokens": 4, "do_sample": False}
    real = decode_step.DecodeStep.difference

    def apart(self: Any, *args: Any) -> float:
        return 3.0 if self.kv_cache is not None else real(self, *args)

    monkeypatch.setattr(decode_step.DecodeStep, "difference", apart)
    model.generate(**common, kv_cache=SMALL)
    state = decoding_of(model)
    assert not state.refused and "logits 3 apart" in state.refused_caches[KVCache(**SMALL)]
    model.generate(**common)
    assert state.step is not None and state.proved


def test_without_a_gpu_the_definition_is_taken() -> None:
    model = model_of(recipe={"name": "qlora_nf4", "kv_cache": "int4"})
    out = model.generate(tokens(2, 90), max_new_tokens=5, do_sample=False)
    own = PackedCache(model.config, "int4")
    need = model.generate(tokens(2, 90), max_new_tokens=5, do_sample=False, past_key_values=own)
    assert torch.equal(out, need) and own.get_seq_length() == 94


def test_a_cache_that_the_generation_config_names_wins_over_the_recipes() -> None:
    model = model_of(recipe={"name": "qlora_nf4", "kv_cache": "int4"})
    common = {"max_new_tokens": 5, "do_sample": False, "disable_compile": True}
    need = model.generate(tokens(2, 90), **common, kv_cache="bfloat16")
    model.generation_config.cache_implementation = "static"
    assert torch.equal(model.generate(tokens(2, 90), **common), need)
    with pytest.raises(BadInput, match="passes kv_cache and cache_implementation; pass one of them"):
        model.generate(tokens(), kv_cache="int4")


def test_what_is_refused() -> None:
    model = model_of()
    with pytest.raises(BadInput, match="no key/value cache in 'q4_0'"):
        model.generate(tokens(), kv_cache="q4_0")
    with pytest.raises(BadInput, match="passes kv_cache and use_cache=False; pass one of them"):
        model.generate(tokens(), kv_cache="int4", use_cache=False)
    with pytest.raises(Unsupported, match="no layer of mistral attends to all that came before"):
        model_of("mistral").generate(tokens(), kv_cache="int4")
