"""A max_seq_length beyond what a model was made for: the positions of transformers' linear rope scaling."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel

from fewbits import FastLanguageModel, fuse
from fewbits.errors import BadInput
from fewbits.models.adapting.adapters import load_adapter
from fewbits.models.loading.longer_positions import TRAINED_FOR, check_stretched, stretch, stretched
from tests.models.loading import save_tiny
from tests.models.tiny import tiny, tiny_config

IDS = torch.arange(300)[None] % 60
PLAIN = {"load_in_4bit": False, "dtype": torch.float32, "device_map": "cpu"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("short") / "base"
    save_tiny(folder)  # 128 positions
    return folder


@pytest.fixture(scope="module")
def expected(base):
    """The logits of transformers' own model, stretched to 384 positions."""
    config = AutoConfig.from_pretrained(base)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": 3.0}
    model = AutoModelForCausalLM.from_pretrained(base, config=config, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=IDS).logits


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def test_a_longer_model_is_transformers_own(base, expected, tmp_path):
    model, tokenizer = FastLanguageModel.from_pretrained(base, max_seq_length=384, **PLAIN)
    told = "positions are stretched by 3 (rope scaling, linear) to 384: the model was trained for 128, and"
    assert [note.startswith(told) for note in model.fewbits_notes] == [True]
    assert model.max_seq_length == tokenizer.model_max_length == 384
    assert torch.equal(logits(model), expected)
    fuse(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    for again in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32),
        FastLanguageModel.from_pretrained(tmp_path / "whole", **PLAIN)[0],
    ):
        torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-4)
    longer, _ = FastLanguageModel.from_pretrained(tmp_path / "whole", max_seq_length=512, **PLAIN)
    assert longer.config.rope_parameters["factor"] == 4 and getattr(longer.config, TRAINED_FOR) == 128


def test_an_adapter_brings_its_length_to_every_base(base, expected, tmp_path):
    """Also packed, merged, and at a smaller length: angles stay those of its training."""
    model, tokenizer = FastLanguageModel.from_pretrained(base, max_seq_length=384, **PLAIN)
    adapted = FastLanguageModel.get_peft_model(model, r=4)
    adapted.save_pretrained(tmp_path / "adapter")
    for length in (None, 200, 384):
        again, _ = FastLanguageModel.from_pretrained(tmp_path / "adapter", max_seq_length=length, **PLAIN)
        assert torch.equal(logits(again), expected)
    packed, _ = FastLanguageModel.from_pretrained(tmp_path / "adapter", device_map="cpu")
    assert packed.config.rope_parameters["factor"] == 3
    again.save_pretrained_merged(tmp_path / "merged", tokenizer, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(BadInput, match="more than the 384 positions to which the base of"):
        FastLanguageModel.from_pretrained(tmp_path / "adapter", max_seq_length=500, **PLAIN)
    short, _ = FastLanguageModel.from_pretrained(base, **PLAIN)
    with pytest.raises(BadInput, match=r"stretched to 384 positions, and this one has 128; load it by its"):
        load_adapter(short, tmp_path / "adapter")


def test_what_cannot_be_stretched_is_refused(base, tmp_path):
    own = tiny_config("llama")
    own.rope_parameters = {**own.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    layered = Gemma3TextConfig(num_hidden_layers=1, hidden_size=8, head_dim=4, max_position_embeddings=64)
    learned = GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=32)
    for config, why in (
        (own, r"are scaled already \(dynamic\)"),
        (layered, "are not of the kind"),
        (learned, "are not of the kind"),
    ):
        positions = config.get_text_config().max_position_embeddings
        with pytest.raises(BadInput, match=rf"the positions of x {why}.*; pass at most {positions}"):
            stretch(config, positions + 1, "x")
        assert stretch(config, positions, "x") is stretch(config, None, "x") is stretched(config) is None
    claims = tiny_config("llama")
    most = 16 * claims.max_position_embeddings
    with pytest.raises(BadInput, match=rf"stretched by 16 times at most; pass at most {most}\."):
        stretch(claims, most + 1, "x")
    assert stretched(claims) is None
    assert stretch(claims, most, "x").startswith("positions are stretched by ")
    with pytest.raises(BadInput, match="its class, GPT2LMHeadModel, does not stretch them"):
        check_stretched(claims, GPT2LMHeadModel(learned), "x")
    check_stretched(claims, type(tiny("llama"))(claims), "x")


def test_a_model_with_a_rope_for_each_kind_of_layer_passes_unless_it_was_to_be_stretched():
    """Gemma 3 holds a dictionary of types: its models could not be loaded."""
    rotary, model, config = nn.Module(), nn.Module(), tiny_config("llama")
    rotary.rope_type = {"full_attention": "linear", "sliding_attention": "default"}
    model.rotary = rotary
    check_stretched(config, model, "it")
    setattr(config, TRAINED_FOR, 8)
    with pytest.raises(BadInput, match="does not stretch them"):
        check_stretched(config, model, "it")
    rotary.rope_type = dict.fromkeys(rotary.rope_type, "linear")
    check_stretched(config, model, "it")
