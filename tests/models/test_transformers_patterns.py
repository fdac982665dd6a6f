"""What people do with a model of transformers: each works over plain, NF4 and INT8 weights, or is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache, pipeline

from fewbits import FastLanguageModel
from fewbits.models.loading.hf_quantizer import FewbitsConfig
from fewbits.recipes import get_recipe
from tests.models.loading import logits, packed_state, same, save_tiny, tokenizer
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


OPTIONS: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "several answers": {"do_sample": True, "num_return_sequences": 3, "min_p": 0.01, "typical_p": 0.95},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "words": {"bad_words_ids": [[5], [6, 7]], "suppress_tokens": [8], "forced_eos_token_id": 2},
    "looked up in the prompt": {"prompt_lookup_num_tokens": 2},
    "stopped": {"stop_strings": ["e"], "max_time": 60.0},
    "with scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}


def decoded(model: Any) -> Any:
    """The plain model of transformers with the weights that are stored."""
    twin = copy.deepcopy(model)
    return twin.dequantize() if packed_state(twin) else twin


@pytest.mark.parametrize("name", OPTIONS)
def test_generates_as_the_plain_model_of_its_weights_does(folder, recipe, name):
    model = load(folder, recipe)
    twin = decoded(model)
    assert not packed_state(twin) and bool(packed_state(model)) == (recipe is not None)
    prompt = tokens(rows=1 if "looked" in name else 2, length=6)
    mask = torch.ones_like(prompt)
    if len(prompt) > 1:
        prompt[0, :2], mask[0, :2] = 0, 0  # padded on the left
    options = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False, **OPTIONS[name]}
    if "stop_strings" in options:
        options["tokenizer"] = tokenizer()
    found = []
    for one in (model, twin):
        torch.manual_seed(0)
        found.append(one.generate(input_ids=prompt, attention_mask=mask, **options))
    if name == "with scores":
        torch.testing.assert_close(*(torch.stack(made.logits) for made in found), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(*(torch.stack(made.scores) for made in found), rtol=1e-4, atol=1e-4)
        found = [made.sequences for made in found]
    assert torch.equal(*found)


def test_generates_with_an_assistant(folder, recipe):
    model, assistant = load(folder, recipe), load(folder, "qlora_nf4")
    prompt, options = tokens(rows=1, length=6), {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(
        model.generate(prompt, assistant_model=assistant, **options), model.generate(prompt, **options)
    )


def test_chat_that_goes_on_with_its_cache(folder, recipe):
    model = load(folder, recipe)
    whole = tokens(rows=1, length=12)
    with torch.no_grad():
        first = model(whole[:, :7], use_cache=True)
        rest = model(whole[:, 7:], past_key_values=first.past_key_values)
    joined = torch.cat([first.logits, rest.logits], 1)
    torch.testing.assert_close(joined, logits(model, whole), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", ["cpu", {"": "cpu"}, "auto", torch.device("cpu")], ids=str)
def test_device_maps(folder, recipe, place, tmp_path):
    model = load(folder, recipe, device_map=place)
    assert torch.equal(logits(model, tokens()), logits(load(folder, recipe), tokens()))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=place).eval()
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))
    if recipe is not None:
        assert same(packed_state(again), packed_state(model))


@pytest.mark.parametrize("word", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["auto", "bfloat16", torch.float16], ids=str)
def test_either_word_for_the_dtype(folder, recipe, word, value):
    expected = {"auto": torch.float32, "bfloat16": torch.bfloat16}.get(value, value)
    model = load(folder, recipe, **{word: value})
    assert model.dtype == model.model.norm.weight.dtype == expected
    assert model(tokens()).logits.dtype == expected


def test_the_hub_is_not_reached_offline(folder, recipe, tmp_path, monkeypatch):
    """And what was saved beside it is whole."""
    reached = []
    monkeypatch.setattr("socket.socket.connect", lambda *args: reached.append(args))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = load(folder, recipe)
    with pytest.raises(Exception, match=r"(?i)offline"):
        model.push_to_hub("nobody/nothing")
    with pytest.raises(Exception, match=r"(?i)offline"):
        model.save_pretrained(tmp_path, push_to_hub=True, repo_id="nobody/nothing")
    assert not reached


def test_a_pipeline_over_a_folder_that_was_saved(folder, recipe, tmp_path):
    model = load(folder, recipe)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    made = pipeline("text-generation", model=str(tmp_path), device_map="cpu")
    chat = [{"role": "user", "content": "abc"}]
    answer = made(chat, max_new_tokens=4, do_sample=False)[0]["generated_text"][-1]
    assert answer["role"] == "assistant"
    rows = made(["abc", "abcdef"], max_new_tokens=4, do_sample=False, batch_size=2, return_full_text=False)
    for text, row in zip(["abc", "abcdef"], rows, strict=True):
        ids = tokenizer()(text, return_tensors="pt").input_ids
        said = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        assert row[0]["generated_text"] == tokenizer().decode(said, skip_special_tokens=True)


def test_a_copy_and_a_saved_generation_configuration(folder, recipe, tmp_path):
    model = load(folder, recipe)
    model.generation_config.update(max_new_tokens=3, do_sample=False, repetition_penalty=1.1)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.generation_config.repetition_penalty == 1.1
    prompt = tokens(rows=1, length=6)
    expected = model.generate(prompt)
    assert torch.equal(again.generate(prompt), expected)
    assert torch.equal(copy.deepcopy(model).generate(prompt), expected)
