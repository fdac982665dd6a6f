"""A folder that fewbits packed, opened by transformers alone: refused in words, never random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModel, AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import fewbits
from fewbits import FastLanguageModel
from fewbits.inference.export import quantize_checkpoint
from fewbits.models.loading.hf_quantizer import FewbitsConfig
from fewbits.nn.linear import QuantizedLinear
from fewbits.training.calibration.qat import convert_qat, prepare_qat
from tests.models.loading import packed_state, same, save_tiny


def by_save_pretrained(plain: Path, folder: Path) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(plain)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def in_shards(plain: Path, folder: Path) -> None:
    FastLanguageModel.from_pretrained(plain)[0].save_pretrained(folder, max_shard_size="20KB")


def by_quantize(plain: Path, folder: Path) -> None:
    quantize_checkpoint(plain, folder, "int8")


def by_convert(plain: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(plain)
    fewbits.convert(model, fewbits.get_recipe("int8"))
    model.save_pretrained(folder)


def after_training(plain: Path, folder: Path) -> None:
    model = prepare_qat(AutoModelForCausalLM.from_pretrained(plain), fewbits.get_recipe("int4_qat"))
    convert_qat(model)[0].save_pretrained(folder)


def merged(plain: Path, folder: Path) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(plain)
    peft_model = FastLanguageModel.get_peft_model(model, r=2)
    peft_model.save_pretrained_merged(folder, tokenizer, save_method="merged_4bit")


WAYS = (by_save_pretrained, in_shards, by_quantize, by_convert, after_training, merged)


@pytest.mark.parametrize("pack", WAYS, ids=lambda f: f.__name__)
def test_transformers_alone_refuses_and_fewbits_reads(pack, tmp_path, monkeypatch):
    save_tiny(tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    with monkeypatch.context() as alone:
        alone.delitem(AUTO_QUANTIZER_MAPPING, "fewbits")
        alone.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "fewbits")
        for door in (AutoModelForCausalLM, AutoModel):
            with pytest.raises(ValueError, match=r"packed by fewbits.*fewbits\.register\(\)"):
                door.from_pretrained(tmp_path / "packed")
    fewbits.register()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 14
    assert not hasattr(model.config, "transformers_weights")
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert same(packed_state(again), packed_state(model))
    assert "fewbits" in json.loads((tmp_path / "again" / "config.json").read_text())["transformers_weights"]


def test_the_folders_readme_says_how_to_open_it(tmp_path):
    save_tiny(tmp_path / "plain")
    (tmp_path / "plain" / "README.md").write_text("# My model\n")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", "int8")
    text = (tmp_path / "quantized" / "README.md").read_text()
    assert text.startswith("# My model\n") and text.count("fewbits.register()") == 1
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "saved")
    assert "fewbits.register()" in (tmp_path / "saved" / "README.md").read_text()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("mine")
    model.save_pretrained(tmp_path / "mine")
    assert (tmp_path / "mine" / "README.md").read_text() == "mine"


def test_a_merged_16_bit_model_has_no_such_entry(tmp_path):
    save_tiny(tmp_path / "plain")
    by_save_pretrained(tmp_path / "plain", tmp_path / "packed")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "packed")
    peft_model = FastLanguageModel.get_peft_model(model, r=2)
    peft_model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    assert "transformers_weights" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    assert not list(tmp_path.glob("merged/README*"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")


def test_what_goes_to_the_hub_is_closed_as_well(tmp_path, monkeypatch):
    save_tiny(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=FewbitsConfig())
    sent = []

    def push(self, repo_id, **options):
        self.save_pretrained(tmp_path / "sent", max_shard_size="50GB")
        sent.append((repo_id, options))

    monkeypatch.setattr(type(model), "push_to_hub", push)
    model.save_pretrained(tmp_path / "packed", push_to_hub=True, private=True)
    model.save_pretrained(tmp_path / "packed", push_to_hub=True, repo_id="me/mine")
    assert sent == [("packed", {"private": True}), ("me/mine", {})]
    assert "fewbits" in json.loads((tmp_path / "sent" / "config.json").read_text())["transformers_weights"]
