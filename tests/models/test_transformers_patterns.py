"""What people do with a model of transformers: each works over plain, NF4 and INT8 weights, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache, pipeline

from fewbits import FastLanguageModel
from fewbits.models.hf_quantizer import FewbitsConfig
from fewbits.recipes import get_recipe
from tests.models.loading import logits, packed_state, save_tiny, tokenizer
from tests.models.tiny import VOCAB, tokens

RECIPES = {"plain": None, "nf4": "qlora_nf4", "int8": "int8"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("patterns") / "plain"
    save_tiny(made)
    return made


@pytest.fixture(params=list(RECIPES))
def recipe(request) -> str | None:
    return RECIPES[request.param]


def load(folder: Path, recipe: str | None, **options: Any) -> Any:
    if recipe is not None:
        options["quantization_config"] = FewbitsConfig(recipe=get_recipe(recipe))
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saved_in_pieces_and_read_again(folder, recipe, dtype, tmp_path):
    model = load(folder, recipe, dtype=dtype)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    assert again.dtype == dtype
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))


def test_state_dict_goes_there_and_back(folder, recipe):
    model, other = load(folder, recipe), load(folder, recipe)
    for tensor in other.state_dict().values():
        tensor.zero_()
    missing, unexpected = other.load_state_dict(model.state_dict())
    assert not missing and not unexpected
    assert torch.equal(logits(other, tokens()), logits(model, tokens()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_casts_leave_what_is_packed(folder, recipe, dtype):
    model = load(folder, recipe)
    before = {name: part.clone() for name, part in packed_state(model).items()}
    model = model.to(dtype)
    assert {p.dtype for p in model.parameters() if p.requires_grad} <= {dtype}
    assert model.get_input_embeddings().weight.dtype == dtype
    assert model(tokens()).logits.dtype == dtype
    after = packed_state(model)
    assert all(torch.equal(part, after[name]) for name, part in before.items())
    assert bool(before) == (recipe is not None)


@pytest.mark.parametrize("name", ["half", "float"])
def test_transformers_refuses_two_casts_of_what_is_quantised(folder, recipe, name):
    model = load(folder, recipe)
    if recipe is None:
        assert getattr(model, name)().dtype in (torch.float16, torch.float32)
        return
    with pytest.raises(ValueError, match=rf"`\.{name}\(\)` is not supported for quantized model"):
        getattr(model, name)()


def test_generate_with_every_cache(folder, recipe):
    model = load(folder, recipe)
    model.generation_config.eos_token_id = None
    prompt = tokens(rows=2, length=6)
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(prompt, use_cache=False, **options)
    caches = {
        "default": {},
        "dynamic": {"past_key_values": DynamicCache(config=model.config)},
        "static": {"past_key_values": StaticCache(config=model.config, max_cache_len=16)},
        "named": {"cache_implementation": "static"},
        "offloaded": {"cache_implementation": "dynamic"},
    }
    for name, cache in caches.items():
        assert torch.equal(model.generate(prompt, **cache, **options), expected), name
    beams = model.generate(prompt, num_beams=2, **options)
    assert beams.shape == expected.shape


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_resized_embeddings(tmp_path, recipe, tied):
    save_tiny(tmp_path / "plain", tie_word_embeddings=tied)
    model = load(tmp_path / "plain", recipe)
    before = logits(model, tokens())
    model.tie_weights()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.resize_token_embeddings(VOCAB + 7)
    assert logits(model, tokens()).shape[-1] == VOCAB + 7
    torch.testing.assert_close(logits(model, tokens())[..., :VOCAB], before)
    model.save_pretrained(tmp_path / "larger")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "larger").eval()
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))


def test_gradient_checkpointing_on_and_off(folder, recipe):
    model = load(folder, recipe).train()
    ids = tokens()

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return model.get_input_embeddings().weight.grad.clone()

    model.get_input_embeddings().weight.requires_grad_(True)
    expected = gradient()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert model.is_gradient_checkpointing
        torch.testing.assert_close(gradient(), expected)
        model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    torch.testing.assert_close(gradient(), expected)


def test_memory_footprint_counts_the_stored_bytes(folder, recipe):
    model = load(folder, recipe)
    stored = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert model.get_memory_footprint() == sum(stored.values()) + buffers
    if recipe is not None:
        assert model.get_memory_footprint() < 0.6 * load(folder, None).get_memory_footprint()


def test_a_pipeline_generates(folder, recipe):
    model = load(folder, recipe)
    made = pipeline("text-generation", model=model, tokenizer=tokenizer())
    text = made("abc", max_new_tokens=4, do_sample=False, return_full_text=False)[0]["generated_text"]
    ids = tokenizer()("abc", return_tensors="pt").input_ids
    said = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    assert text == tokenizer().decode(said, skip_special_tokens=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_peft_prepares_it_for_training_in_few_bits(folder, recipe, dtype):
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model = load(folder, recipe, dtype=dtype)
    before = {name: part.clone() for name, part in packed_state(model).items()}
    model = prepare_model_for_kbit_training(model)
    after = packed_state(model)
    assert all(part.dtype == after[n].dtype and torch.equal(part, after[n]) for n, part in before.items())
    assert model.get_input_embeddings().weight.dtype == torch.float32
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).train()
    adapted(tokens(), labels=tokens()).loss.backward()
    grads = [p.grad for p in adapted.parameters() if p.requires_grad]
    assert grads and all(g is not None and torch.isfinite(g).all() for g in grads)


def test_the_librarys_own_loader_gives_such_a_model(folder, tmp_path):
    model, _ = FastLanguageModel.from_pretrained(folder, load_in_4bit=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))
