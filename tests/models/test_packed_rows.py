"""Packed rows are what each would be alone, in fused layers, unfused ones and the host's, cache or not."""

from __future__ import annotations

import copy

import pytest
import torch

import fewbits
from fewbits import FastLanguageModel
from fewbits.errors import Unsupported
from tests.models.loading import save_tiny
from tests.models.tiny import tiny
from tests.models.unwritten import unwritten

KINDS = {"fused": "llama", "unfused": "qwen3", "without a spec": "stablelm"}


def made(kind: str):
    torch.manual_seed(3)
    model = unwritten("stablelm") if KINDS[kind] == "stablelm" else tiny(KINDS[kind])
    fewbits.convert(model, "qlora_nf4")
    model = fewbits.get_peft_model(model, r=4)
    if kind == "fused":
        fewbits.fuse(model)
    return model


def rows(model, lengths=(5, 11, 8)):
    parts = [torch.randint(1, model.config.vocab_size, (1, n)) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return parts, torch.cat(parts, 1), positions


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_see_each_other_whatever_is_said_of_a_cache(kind):
    model = made(kind)
    parts, ids, positions = rows(model)
    for mode in ("train", "eval", "for_inference"):
        model.train(mode == "train")
        if mode == "for_inference":
            FastLanguageModel.for_inference(model)
        for said in ({}, {"use_cache": True}, {"use_cache": False}):
            for config in (True, False):
                model.config.use_cache = config
                with torch.no_grad():
                    alone = torch.cat([model(input_ids=p, use_cache=False).logits for p in parts], 1)
                    told = model(input_ids=ids, position_ids=positions, **said)
                torch.testing.assert_close(told.logits, alone, rtol=1e-4, atol=1e-4)
                assert told.get("past_key_values") is None


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_sum_of_the_rows(kind):
    model = made(kind).train()
    model.config.use_cache = True
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05)
    parts, ids, positions = rows(model)
    weights = [p for p in model.parameters() if p.requires_grad]
    (model(input_ids=ids, position_ids=positions).logits ** 2).sum().backward()
    packed = [p.grad.clone() for p in weights]
    model.zero_grad()
    for part in parts:
        (model(input_ids=part).logits ** 2).sum().backward()
    for one, other in zip(packed, (p.grad for p in weights), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_packed_row_fills_a_cache_as_ever(kind):
    model = made(kind).eval()
    FastLanguageModel.for_inference(model)
    _, ids, _ = rows(model)
    model.config.use_cache = True
    with torch.no_grad():
        first = model(input_ids=ids[:, :10], position_ids=torch.arange(10)[None])
        assert first.past_key_values.get_seq_length() == 10
        rest = model(
            input_ids=ids[:, 10:],
            position_ids=torch.arange(10, 24)[None],
            past_key_values=first.past_key_values,
        )
        whole = model(input_ids=ids).logits
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, rtol=1e-3, atol=1e-3)


def test_a_copy_keeps_rows_apart_and_a_restored_model_is_the_hosts():
    model = tiny("qwen3").eval()
    fewbits.convert(model, "qlora_nf4", keep_original=True)
    twin = copy.deepcopy(model)
    parts, ids, positions = rows(model)
    fewbits.restore(model)
    with torch.no_grad():
        alone = torch.cat([twin(input_ids=p).logits for p in parts], 1)
        told = twin(input_ids=ids, position_ids=positions, use_cache=True)
        torch.testing.assert_close(told.logits, alone, rtol=1e-4, atol=1e-4)
        theirs = model(input_ids=ids, position_ids=positions, use_cache=True)
    assert theirs.past_key_values is not None  # transformers' own way again
    fewbits.restore(twin)
    assert not twin.model._forward_pre_hooks


def test_rows_stay_apart_in_a_model_that_was_loaded_unpacked(tmp_path):
    """Its layers are transformers' own, which tell rows apart only where no cache is filled."""
    save_tiny(tmp_path / "base")
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False)
    model.config.use_cache = True
    parts, ids, positions = rows(model)
    for one in (model, copy.deepcopy(model)):
        for mode in (True, False):
            one.train(mode)
            alone = torch.cat([one(input_ids=part).logits for part in parts], 1)
            told = one(input_ids=ids, position_ids=positions)
            torch.testing.assert_close(told.logits, alone, rtol=1e-4, atol=1e-4)
    with pytest.raises(Unsupported, match="nothing to restore"):
        fewbits.restore(model.unload())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_stay_apart_in_a_compiled_model(kind):
    """No value of positions is known there; without a word of a cache, none is filled."""
    model = made(kind).eval()
    parts, ids, positions = rows(model)
    model.config.use_cache = True
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        alone = torch.cat([model(input_ids=p, use_cache=False).logits for p in parts], 1)
        torch.testing.assert_close(
            compiled(input_ids=ids, position_ids=positions).logits, alone, rtol=1e-4, atol=1e-4
        )
        asked = compiled(input_ids=ids, position_ids=torch.arange(24)[None], use_cache=True)
    assert asked.past_key_values.get_seq_length() == 24
