"""Hybrids through transformers' own layers: packed linears, what stays and why, training, generation."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn

import fewbits
from fewbits import FastLanguageModel
from fewbits.errors import SpecMismatch
from fewbits.formats import NF4
from fewbits.models.adapting.predicted_memory import predict_memory
from fewbits.nn.experts import QuantizedExperts
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import Recipe, Rule, get_recipe
from tests.models.hybrids import HYBRIDS, hybrid, save_hybrid
from tests.models.loading import logits, packed_state, perturb, same
from tests.models.tiny import tokens

PACK = Recipe(name="pack", linear=Rule(weight=NF4))
# Mamba-2's kernel is handed the weight of its output projection; Jamba's Mamba reads that of its time steps.
READ_PAST = {
    "falcon_h1": "mamba.out_proj",
    "granitemoehybrid": "mamba.out_proj",
    "jamba": "mamba.dt_proj",
    "nemotron_h": "mixer.out_proj",
}
WITH_EXPERTS = {"qwen3_next", "lfm2_moe", "granitemoehybrid", "jamba", "nemotron_h"}


def loss_and_gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_the_identity_recipe_changes_neither_loss_nor_gradients(kind: str) -> None:
    model = hybrid(kind)
    before = loss_and_gradients(model)
    fewbits.convert(model, Recipe(name="identity"), strict=True)
    after = loss_and_gradients(model)
    assert torch.equal(after[0], before[0]) and after[1].keys() == before[1].keys()
    assert all(torch.equal(after[1][name], gradient) for name, gradient in before[1].items())


@pytest.mark.parametrize("kind", HYBRIDS)
def test_packed_is_the_decoded_model_in_training_and_with_its_own_caches(kind: str) -> None:
    model = hybrid(kind)
    receipt = fewbits.convert(model, PACK, strict=True)
    packed = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)]
    assert packed and convolutions
    said = {entry.name: entry.reason for entry in receipt.left}
    assert all("no rule names: left as it is" in said[name] for name in convolutions)
    past = [name for name, reason in said.items() if "reads its weight past the module" in reason]
    assert all(name.endswith(READ_PAST.get(kind, "none")) for name in past) and bool(past) == (
        kind in READ_PAST
    )
    assert any(isinstance(m, QuantizedExperts) for m in model.modules()) == (kind in WITH_EXPERTS)
    plain = copy.deepcopy(model)
    fewbits.restore(plain)
    assert not any(isinstance(module, QuantizedLinear | QuantizedExperts) for module in plain.modules())
    torch.testing.assert_close(logits(model, tokens()), logits(plain, tokens()), rtol=0, atol=5e-6)
    ask = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(tokens(2, 6), **ask), plain.generate(tokens(2, 6), **ask))


@pytest.mark.parametrize("kind", HYBRIDS)
def test_adapters_train_and_open_again_over_plain_weights(kind: str, tmp_path: Any) -> None:
    save_hybrid(tmp_path / "base", kind)
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=True, dtype=torch.float32)
    plain = copy.deepcopy(model).dequantize()
    adapted = perturb(FastLanguageModel.get_peft_model(model, r=4)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    beside = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True).eval()
    ours, theirs = loss_and_gradients(adapted), loss_and_gradients(beside)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert ours[1] and ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_packed_folder_opens_again_and_its_bytes_were_predicted(kind: str, tmp_path: Any) -> None:
    save_hybrid(tmp_path / "base", kind)
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    predicted = predict_memory(hybrid(kind).config.to_dict(), get_recipe("qlora_nf4"), dtype_bytes=4)
    assert predicted.weights == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    model.save_pretrained(tmp_path / "packed")
    words.save_pretrained(tmp_path / "packed")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    assert same(packed_state(again), packed_state(model))
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))


@pytest.mark.parametrize("kind", ["falcon_h1", "granitemoehybrid"])
def test_an_adapter_that_the_host_would_pass_by_is_refused(kind: str) -> None:
    with pytest.raises(SpecMismatch, match=r"an adapter on out_proj would do nothing: .* leave it out"):
        fewbits.get_peft_model(hybrid(kind), target_modules=["q_proj", "out_proj"])
