"""Prompts on disk: the same continuation, whole files or none, no other model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import fewbits
from fewbits.errors import BadCheckpoint, BadInput, SpecMismatch
from fewbits.formats.kv_cache import KVCache
from fewbits.models.generation.packed_cache import PackedCache
from fewbits.models.generation.saved_prompts import load_prompt, save_prompt
from tests.models.tiny import tiny, tokens

SMALL = KVCache(keys="int8", newest=8, first=2)


def read(model: Any, ids: torch.Tensor) -> PackedCache:
    cache = PackedCache(model.config, SMALL)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_saved_prompt_goes_on_as_if_it_had_just_been_read(family: str, tmp_path: Path) -> None:
    model, ids, more = tiny(family), tokens(1, 40), tokens(1, 3, seed=9)
    model.generation_config.eos_token_id = None
    path = tmp_path / "prompt.safetensors"
    save_prompt(path, model, read(model, ids), ids)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    cache, saved = load_prompt(path, model)
    assert torch.equal(saved, ids) and cache.kind == SMALL
    text = torch.cat([saved, more], dim=1)
    common: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    out = model.generate(text, past_key_values=cache, **common)
    need = model.generate(text, past_key_values=read(model, ids), **common)
    assert torch.equal(out, need) and out.shape[1] == 55
    shared = load_prompt(path, model)[0].for_batch(3)
    assert model.generate(text.repeat(3, 1), past_key_values=shared, **common).shape == (3, 55)


def test_what_is_refused(tmp_path: Path) -> None:
    model, ids, path = tiny("llama"), tokens(1, 30), tmp_path / "prompt.safetensors"
    cache = read(model, ids)
    with pytest.raises(BadInput, match="the cache holds 30 tokens and the prompt has 29"):
        save_prompt(path, model, cache, ids[:, 1:])
    save_prompt(path, model, cache, ids)
    with pytest.raises(SpecMismatch, match="was read by another model, or with other adapters"):
        load_prompt(path, tiny("llama", seed=1))
    adapted = fewbits.get_peft_model(tiny("llama"), r=2)
    with pytest.raises(SpecMismatch, match="or with other adapters"):
        load_prompt(path, adapted)
    with pytest.raises(BadCheckpoint, match="cannot be read as a saved prompt"):
        load_prompt(tmp_path / "none.safetensors", model)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadCheckpoint, match="cannot be read as a saved prompt"):
        load_prompt(path, model)
    with pytest.raises(BadInput, match="cannot be written to"):
        save_prompt(tmp_path / "no" / "place", model, cache, ids)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_transformers_own_cache_is_saved_as_well(family: str, tmp_path: Path) -> None:
    model, ids, path = tiny(family), tokens(1, 40), tmp_path / "prompt.safetensors"
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    save_prompt(path, model, cache, ids)
    again, saved = load_prompt(path, model)
    assert type(again) is DynamicCache and torch.equal(saved, ids)
    text = torch.cat([ids, tokens(1, 3, seed=9)], dim=1)
    words: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(text, past_key_values=cache, **words)
    assert torch.equal(model.generate(text, past_key_values=again, **words), wanted)


@pytest.mark.parametrize("with_config", [True, False])
def test_layers_come_back_as_they_were_beside_a_window(with_config: bool, tmp_path: Path) -> None:
    """Without a configuration transformers' cache keeps all tokens of layers that see a window of them."""
    model, ids, more = tiny("mistral"), tokens(1, 40), tokens(1, 12, seed=5)
    cache = DynamicCache(config=model.config) if with_config else DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
        save_prompt(tmp_path / "prompt", model, cache, ids)
        loaded, _ = load_prompt(tmp_path / "prompt", model)
        assert [type(a) for a in loaded.layers] == [type(a) for a in cache.layers]
        whole = model(torch.cat([ids, more], dim=1)).logits[:, 40:]
        torch.testing.assert_close(model(more, past_key_values=loaded).logits, whole, rtol=1e-4, atol=1e-4)
