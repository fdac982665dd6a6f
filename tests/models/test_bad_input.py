"""Bad input: each with one clear sentence, and nothing lost."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fewbits import FastLanguageModel
from fewbits.device import Device
from fewbits.errors import BadCheckpoint, BadInput, FewbitsError, SpecMismatch, Unsupported
from fewbits.formats import FORMATS
from fewbits.models.loading.hf_quantizer import FewbitsConfig
from fewbits.models.packing import packed
from fewbits.recipes import Recipe, Rule
from tests.models.loading import save_tiny, tokenizer


@pytest.fixture
def base(tmp_path) -> Path:
    save_tiny(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def sharded(tmp_path) -> Path:
    save_tiny(tmp_path / "sharded", shard="60KB")
    return tmp_path / "sharded"


def refuses(kind: type[FewbitsError], text: str, where, **options) -> None:
    with pytest.raises(kind, match=text) as caught:
        FastLanguageModel.from_pretrained(where, **options)
    message = str(caught.value)
    assert "\n" not in message and message.endswith("."), message


def edit(file: Path, **changes) -> None:
    value = json.loads(file.read_text())
    value.update(changes)
    file.write_text(json.dumps(value))


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "~/nowhere", "a/b/c", "nowhere/", ""])
def test_no_such_model_path(path):
    refuses(BadInput, "no model folder", path)


def test_a_file_and_a_folder_without_a_model(base, tmp_path):
    refuses(BadInput, "is a file", base / "config.json")
    (tmp_path / "empty").mkdir()
    refuses(BadInput, "no config.json", tmp_path / "empty")


def test_unknown_model_type(base):
    edit(base / "config.json", model_type="llama9")
    refuses(Unsupported, "llama9", base)
    edit(base / "config.json", model_type="gpt2")
    refuses((Unsupported, BadCheckpoint), "gpt2|lacks", base)


def test_a_model_type_that_cannot_be_taken_names_what_is_missing(tmp_path):
    from transformers import JetMoeConfig, JetMoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "kv_channels": 16, "num_key_value_heads": 2}
    config = JetMoeConfig(**sizes, num_hidden_layers=1, vocab_size=96)
    JetMoeForCausalLM(config).save_pretrained(tmp_path / "jetmoe")
    tokenizer().save_pretrained(tmp_path / "jetmoe")
    refuses(Unsupported, "no spec for model_type 'jetmoe'.*most of a layer", tmp_path / "jetmoe")


def test_config_that_is_not_json(base):
    (base / "config.json").write_text("{")
    refuses(BadInput, "JSON", base)


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -1000])
def test_a_truncated_shard(sharded, keep):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:keep] if keep >= 0 else data[: len(data) + keep])
    refuses(BadCheckpoint, shard.name, sharded)


def test_a_corrupt_shard(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    for garbage in (b"\xff" * 8, (20).to_bytes(8, "little") + b"not json at all {{{{"):
        shard.write_bytes(garbage + bytes(data[len(garbage) :]))
        refuses(BadCheckpoint, shard.name, sharded)
    shard.write_bytes(bytes(data) + b"tail")
    refuses(BadCheckpoint, "corrupt", sharded)


def test_a_truncated_shard_through_transformers(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(BadCheckpoint, match="truncated"):
        AutoModelForCausalLM.from_pretrained(sharded, quantization_config=FewbitsConfig())


def test_a_missing_shard(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    refuses(BadCheckpoint, f"lacks {re.escape(shard.name)}", sharded)


def test_an_index_that_promises_more_than_the_shards_hold(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = next(iter(index["weight_map"].values()))
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(BadCheckpoint, "layers.9", sharded)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_not_made_up(base, name):
    tensors = load_file(base / "model.safetensors")
    del tensors[name]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    refuses(BadCheckpoint, f"lacks {re.escape(name)}", base)


def test_no_weights_at_all(base):
    (base / "model.safetensors").unlink()
    refuses(BadCheckpoint, "no model.safetensors", base)


def test_a_pickle_is_refused_unless_asked_for(base):
    torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    refuses(BadCheckpoint, "allow_pickle=True", base)
    with pytest.raises(BadCheckpoint, match="allow_pickle=True"):
        AutoModelForCausalLM.from_pretrained(base, quantization_config=FewbitsConfig())
    model, _ = FastLanguageModel.from_pretrained(base, allow_pickle=True)
    assert "QuantizedLinear" in repr(model)


@pytest.mark.parametrize("load_in_4bit", [True, False])
def test_weights_of_another_shape(base, load_in_4bit):
    edit(base / "config.json", intermediate_size=192)
    refuses(BadCheckpoint, "mlp.*shape", base, load_in_4bit=load_in_4bit)


@pytest.mark.parametrize("load_in_4bit", [True, False])
def test_vocabulary_and_embedding_disagree(base, load_in_4bit):
    edit(base / "config.json", vocab_size=90)
    refuses(BadCheckpoint, "96 rows.*vocab_size 90", base, load_in_4bit=load_in_4bit)


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows(base):
    bigger = tokenizer()
    bigger.add_tokens(["<a>", "<b>"])
    bigger.save_pretrained(base)
    refuses(BadCheckpoint, "ids up to 97.*96 rows.*resize_model_vocab=98", base)
    model, _ = FastLanguageModel.from_pretrained(base, resize_model_vocab=98)
    assert model.config.vocab_size == 98


def test_no_tokenizer(base):
    for file in base.glob("tokenizer*"):
        file.unlink()
    refuses(FewbitsError, "base", base)


def test_checkpoints_of_other_methods(base):
    edit(base / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    refuses(BadCheckpoint, "declares gptq weights, but none", base)
    edit(base / "config.json", quantization_config={"quant_method": "vptq"})
    refuses(Unsupported, "vptq", base)
    edit(base / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    refuses(BadCheckpoint, "bitsandbytes", base)
    edit(base / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    refuses(BadCheckpoint, "declares bitsandbytes weights, but none", base)


def test_a_packed_checkpoint_with_another_recipe(base, tmp_path):
    model, tok = FastLanguageModel.from_pretrained(base)
    model.save_pretrained(tmp_path / "packed")
    tok.save_pretrained(tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    other = FewbitsConfig("int8").to_dict()
    edit(tmp_path / "packed" / "config.json", quantization_config=other)
    refuses((SpecMismatch, BadCheckpoint), "weights and config.json|lacks", tmp_path / "packed")
    none = FewbitsConfig(Recipe(name="none")).to_dict()
    edit(tmp_path / "packed" / "config.json", quantization_config=none)
    refuses(SpecMismatch, "no weight format", tmp_path / "packed")
    config["quantization_config"]["recipe"]["linear"]["weight"] = "nf9"
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    refuses(FewbitsError, "nf9", tmp_path / "packed")


def adapter(folder: Path, path: Path, **config) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    peft.get_peft_model(plain, peft.LoraConfig(r=2, **config)).save_pretrained(path)


def test_adapter_and_base_that_do_not_fit(base, tmp_path):
    adapter(base, tmp_path / "lora", target_modules=["q_proj", "up_proj"])
    save_tiny(tmp_path / "wide", intermediate_size=192)
    refuses(SpecMismatch, "192", tmp_path / "lora", base_model=str(tmp_path / "wide"))
    save_tiny(tmp_path / "phi", "phi3")
    refuses(SpecMismatch, "q_proj|up_proj", tmp_path / "lora", base_model=str(tmp_path / "phi"))
    save_tiny(tmp_path / "shallow", num_hidden_layers=1)
    refuses(SpecMismatch, "layers.1", tmp_path / "lora", base_model=str(tmp_path / "shallow"))


def test_damaged_adapters(base, tmp_path):
    adapter(base, tmp_path / "lora", target_modules=["q_proj"])
    weights = tmp_path / "lora" / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-20])
    refuses(BadCheckpoint, "adapter_model.safetensors", tmp_path / "lora")
    weights.unlink()
    refuses(BadCheckpoint, "adapter_model.safetensors", tmp_path / "lora")
    weights.write_bytes(data)
    edit(tmp_path / "lora" / "adapter_config.json", base_model_name_or_path=None)
    refuses(BadInput, "base_model", tmp_path / "lora")
    shutil.copytree(tmp_path / "lora", tmp_path / "lora2")
    edit(tmp_path / "lora2" / "adapter_config.json", base_model_name_or_path=str(tmp_path / "lora"))
    refuses(BadInput, "another adapter", tmp_path / "lora2")


def test_a_recipe_that_is_not_there(base):
    refuses(FewbitsError, "qlora_nf9", base, recipe="qlora_nf9")


def test_a_recipe_the_device_cannot_run(monkeypatch):
    old = Device(type="cuda", name="A100", memory_bytes=1, capability=(8, 0))
    monkeypatch.setattr(packed.device, "pick", torch.device)
    monkeypatch.setattr(packed.device, "describe", lambda place: old)
    recipe = Recipe(name="fp8", linear=Rule(weight=FORMATS["nf4"], activation=FORMATS["float8_e4m3_row"]))
    with pytest.raises(Unsupported, match=r"fp8.*8\.9"):
        packed.check_device(recipe, "cuda:0")
    packed.check_device(Recipe(name="stored", linear=Rule(weight=FORMATS["float8_e4m3_row"])), "cuda:0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there(base):
    for place in ("cuda", "cuda:3", {"": 0}):
        refuses(Unsupported, "CUDA", base, device_map=place)
    refuses(BadInput, "no device", base, device_map="abacus")


def test_an_output_folder_that_cannot_be_written(base, tmp_path):
    model, _ = FastLanguageModel.from_pretrained(base)
    (tmp_path / "file").write_text("precious")
    for target in (tmp_path / "file", tmp_path / "file" / "model"):
        with pytest.raises(BadInput, match=r"^[^\n]+\.$"):
            model.save_pretrained(target)
    assert (tmp_path / "file").read_text() == "precious"
