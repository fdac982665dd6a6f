"""What a model goes through before it is written: merges, edits, further adapters, added tokens."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fewbits import FastLanguageModel
from tests.models.loading import logits, perturb, save_tiny, tokenizer
from tests.models.mixtures import mixture, save_mixture
from tests.models.tiny import tokens
from tests.models.unwritten import unwritten


def adapted(folder: Path, packed: bool, family: str = "llama"):
    save_tiny(folder)
    if family == "gpt2":
        unwritten("gpt2").save_pretrained(folder)
    model, tokenizer = FastLanguageModel.from_pretrained(folder, load_in_4bit=packed)
    return perturb(FastLanguageModel.get_peft_model(model, r=4)), tokenizer


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def written(model, tokenizer, folder: Path) -> torch.Tensor:
    """The logits of what is written, in float32 so that only the packing could make a difference."""
    receipt = model.save_pretrained_merged(folder, tokenizer, dtype=torch.float32)
    written.receipt = str(receipt)
    return logits(AutoModelForCausalLM.from_pretrained(folder), tokens())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_merged_before_is_not_lost(packed, family, tmp_path):
    """It was: each linear was taken from the original checkpoint again, and the proof compared with that."""
    model, tokenizer = adapted(tmp_path / "base", packed, family)
    base = model.merge_and_unload()
    expected = logits(base.eval(), tokens())
    assert off(written(base, tokenizer, tmp_path / "one"), expected) < 1e-5
    second = perturb(FastLanguageModel.get_peft_model(base, r=2))
    expected = logits(second.eval(), tokens())
    assert off(written(second, tokenizer, tmp_path / "two"), expected) < 1e-5
    assert "that were changed in this model" in written.receipt


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_a_mixture_that_was_merged_before_is_written_and_stays(kind, tmp_path):
    """Unpacked experts were written under two names, and a live weight got the adapter in place."""
    save_mixture(tmp_path / "base", kind)
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False, dtype=torch.float32)
    first = perturb(FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj", "o_proj"]))
    second = perturb(
        FastLanguageModel.get_peft_model(first.merge_and_unload(), r=2, target_modules=["q_proj"])
    )
    expected = logits(second.eval(), tokens())
    assert off(written(second, None, tmp_path / "merged"), expected) < 1e-5
    assert "that were changed in this model" in written.receipt
    assert torch.equal(logits(second.eval(), tokens()), expected)
    names = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("base", "merged")]
    assert names[0] == names[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapter", [True, False])
def test_what_trained_through_rounding_is_packed_to_the_bit(adapter, tmp_path):
    """The codes were those of weights that had been rounded to bfloat16 on the way."""
    save_tiny(tmp_path / "base")
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "base", recipe="nf4_qat")
    if adapter:
        model = perturb(FastLanguageModel.get_peft_model(model, r=4))
    model.save_pretrained_merged(tmp_path / "packed", save_method="merged_4bit")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "packed")
    assert off(logits(again.eval(), tokens()), logits(model.eval(), tokens())) < 1e-6


ON_ENDS = {
    "adapter on the head": {"target_modules": ["q_proj", "lm_head"]},
    "single tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]},
    "adapter on the embedding": {"target_modules": ["q_proj", "embed_tokens"], "adapt_embeddings": True},
    "trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trained embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}
TIED = {way: () if number < 2 else pytest.mark.slow for number, way in enumerate(ON_ENDS)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [pytest.param(way, marks=marks) for way, marks in TIED.items()])
def test_a_mixture_whose_head_is_the_embedding(way, tmp_path):
    """What had trained on one of the two was lost, or refused: the file had one tensor, the embedding's."""
    config = mixture("qwen3_moe").config
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    model = perturb(FastLanguageModel.get_peft_model(model, r=4, **ON_ENDS[way]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    expected = logits(model.eval(), tokens())
    with model.disable_adapter():
        assert off(logits(model, tokens()), expected) > 1e-2
    assert off(written(model, words, tmp_path / "merged"), expected) < 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packed", [True, False])
def test_an_edited_weight_under_an_adapter_is_not_lost(packed, tmp_path):
    model, tokenizer = adapted(tmp_path / "base", packed)
    for layer in model.base_model.model.model.layers:
        linear = layer.mlp.up_proj.base_layer
        linear.weight.data = linear.weight.data * 1.5
    plain, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=packed)
    edited = model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    assert off(edited.weight * 1.0, plain.model.layers[0].mlp.up_proj.weight * 1.5) < 0.1
    found = written(model, tokenizer, tmp_path / "merged")
    if not packed:
        assert off(found, logits(model.eval(), tokens())) < 1e-5
    assert "and 2 that were changed in this model" in written.receipt


@pytest.mark.filterwarnings("ignore")
def test_what_is_as_it_was_comes_from_the_original(tmp_path):
    model, tokenizer = adapted(tmp_path / "base", True)
    written(model, tokenizer, tmp_path / "first")
    model.merge_adapter()
    model.unmerge_adapter()
    state = model.base_model.model.state_dict()
    model.base_model.model.load_state_dict(state)
    found = written(model, tokenizer, tmp_path / "second")
    assert "changed in this model" not in written.receipt
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert torch.equal(found, logits(first, tokens()))
    other = {k: torch.flip(t, (0,)) if k.endswith("weight_codes") else t for k, t in state.items()}
    model.base_model.model.load_state_dict(other)
    written(model, tokenizer, tmp_path / "third")
    assert "that were changed in this model" in written.receipt


@pytest.mark.parametrize("packed", [True, False])
def test_tokens_added_before_the_adapter_come_back_with_it(packed, tmp_path):
    """PEFT saves the copies of a resized embedding under two more names, and the base has fewer rows."""
    save_tiny(tmp_path / "base")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=packed)
    tokenizer.add_tokens(["<a>", "<b>"])
    rows = model.get_input_embeddings().weight.shape[0] + 2
    model.resize_token_embeddings(rows)
    model = FastLanguageModel.get_peft_model(model, r=2, modules_to_save=["embed_tokens", "lm_head"])
    perturb(model)
    expected = logits(model.eval(), tokens())
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again, _ = FastLanguageModel.from_pretrained(tmp_path / "adapter", load_in_4bit=packed)
    assert torch.equal(logits(again.eval(), tokens()), expected)
    assert any(f"the embedding has {rows} rows" in note for note in again.base_model.model.fewbits_notes)
    merged = written(again, tokenizer, tmp_path / "merged")
    assert merged.shape == expected.shape and (packed or off(merged, expected) < 1e-5)
