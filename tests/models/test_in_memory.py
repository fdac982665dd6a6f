"""A model converted in memory is saved as what it then is, and loads again with the same bits."""

from __future__ import annotations

import json

import torch
from transformers import AutoModelForCausalLM

import fewbits
from fewbits import FastLanguageModel, get_recipe
from tests.models.loading import logits, save_tiny
from tests.models.tiny import tokens


def plain(folder):
    save_tiny(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_packed_model_is_saved_packed(tmp_path):
    model = plain(tmp_path / "base")
    fewbits.convert(model, get_recipe("qlora_nf4"))
    model.save_pretrained(tmp_path / "packed")
    assert (
        json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]["quant_method"]
        == "fewbits"
    )
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))


def test_a_restored_model_is_saved_plain(tmp_path):
    model = plain(tmp_path / "base")
    before = logits(model, tokens())
    fewbits.convert(model, get_recipe("int8"), keep_original=True)
    fewbits.restore(model)
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), tokens()), before)


def test_a_model_loaded_packed_can_be_restored_and_saved(tmp_path):
    save_tiny(tmp_path / "base")
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=True)
    before = logits(model, tokens())
    fewbits.restore(model)
    model.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert not hasattr(again.config, "quantization_config")
    torch.testing.assert_close(logits(again, tokens()), before, rtol=1e-5, atol=1e-5)


def test_after_quantisation_aware_training_too(tmp_path):
    model = fewbits.prepare_qat(plain(tmp_path / "base"), get_recipe("int4_qat"))
    trained = logits(model, tokens())
    packed, _ = fewbits.convert_qat(model)
    packed.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(logits(again, tokens()), trained)


def test_a_model_whose_weights_train_is_not_marked(tmp_path):
    model = plain(tmp_path / "base")
    fewbits.convert(model, get_recipe("float8_full"))
    assert getattr(model, "hf_quantizer", None) is None
