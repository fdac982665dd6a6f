"""Folders: written whole or not at all; bitsandbytes checkpoints read without bitsandbytes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fewbits import FastLanguageModel
from fewbits.errors import BadInput
from fewbits.models.folders.checkpoint import inspect_folder
from fewbits.models.loading.hf_quantizer import FewbitsConfig, attach_recipe
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import get_recipe
from tests import peers
from tests.models.loading import logits, packed_state, same, save_tiny, tokenizer
from tests.models.tiny import tiny, tokens

load = AutoModelForCausalLM.from_pretrained


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_a_file_size_limit_while_saving_a_model_loses_nothing(tmp_path):
    """The real thing: the kernel refuses to write on, in the middle of the weights."""
    save_tiny(tmp_path / "plain", hidden_size=128)
    model = load(tmp_path / "plain", quantization_config=FewbitsConfig())
    model.save_pretrained(tmp_path / "packed")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(BadInput, match=r"^the disk is full [^\n]+\.$"):
            model.save_pretrained(tmp_path / "packed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == {"plain", "packed"}
    inspect_folder(tmp_path / "packed")
    assert same(packed_state(load(tmp_path / "packed")), packed_state(model))


def test_a_packed_model_is_not_saved_over_its_original(tmp_path):
    save_tiny(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=FewbitsConfig())
    with pytest.raises(BadInput, match="never overwritten"):
        model.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "packed")
    load(tmp_path / "packed").save_pretrained(tmp_path / "packed")  # the very same bits
    assert same(packed_state(load(tmp_path / "packed")), packed_state(model))


def test_a_model_packed_in_memory_saves_too(tmp_path):
    from fewbits import convert

    model = tiny("llama")
    convert(model, get_recipe("int8"))
    attach_recipe(model, get_recipe("int8"))
    model.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed", attn_implementation="eager")
    assert same(packed_state(again), packed_state(model))
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))


def bitsandbytes_model(folder: Path, quant_type: str, double: bool, dtype: torch.dtype = torch.float32):
    """A checkpoint in bitsandbytes 4-bit form, written by transformers and bitsandbytes."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    save_tiny(folder.parent / "plain", "qwen2")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=dtype,
    )
    model = load(folder.parent / "plain", quantization_config=config, dtype=dtype, device_map="cpu")
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_a_bitsandbytes_checkpoint_keeps_its_bits(quant_type, double, tmp_path):
    theirs = bitsandbytes_model(tmp_path / "bnb", quant_type, double)
    ours, _ = FastLanguageModel.from_pretrained(tmp_path / "bnb")
    packed = [(n, m) for n, m in ours.named_modules() if isinstance(m, QuantizedLinear)]
    assert len(packed) == 14
    said = load(tmp_path / "plain")  # what the checkpoint's codes and scales say, in plain linears
    for name, module in packed:
        assert module.format.name == f"{quant_type}_dq" if double else quant_type
        their = theirs.get_submodule(name).weight
        decoded = peers.bitsandbytes_decoded(their.data, their.quant_state).float()
        assert torch.equal(module.dequantize(torch.float32), decoded), name
        said.get_submodule(name).weight.data.copy_(decoded)
    ids = tokens()
    close = {"rtol": 1e-4, "atol": 1e-4}  # order of float32 sums
    torch.testing.assert_close(logits(ours, ids), logits(said, ids), **close)
    assert any("bitsandbytes" in note for note in ours.fewbits_notes)


def test_a_bitsandbytes_checkpoint_computes_as_bitsandbytes_does(tmp_path):
    """Beside its own modules, where these decode and multiply as their codes and scales say."""
    theirs = bitsandbytes_model(tmp_path / "bnb", "nf4", True)
    ours, _ = FastLanguageModel.from_pretrained(tmp_path / "bnb")
    for name, module in ours.named_modules():
        if isinstance(module, QuantizedLinear):
            their = theirs.get_submodule(name).weight
            live = peers.live_bitsandbytes(their.data, their.quant_state).float()
            assert torch.equal(module.dequantize(torch.float32), live), name
            linear, x = theirs.get_submodule(name), torch.randn(5, module.in_features)
            need = torch.nn.functional.linear(x, live, linear.bias)
            peers.same_or_skip("bitsandbytes", linear(x), need, f"the forward pass of {name}", rtol=1e-4)
    ids = tokens()
    torch.testing.assert_close(logits(ours, ids), logits(theirs, ids), rtol=1e-4, atol=1e-4)


def test_a_bitsandbytes_checkpoint_becomes_ours_when_saved(tmp_path):
    bitsandbytes_model(tmp_path / "bnb", "nf4", True, torch.bfloat16)
    ours, tok = FastLanguageModel.from_pretrained(tmp_path / "bnb")
    assert ours.dtype == torch.bfloat16
    ours.save_pretrained(tmp_path / "packed")
    tok.save_pretrained(tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fewbits" and config["source"] == "fewbits"
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "packed")
    assert same(packed_state(again), packed_state(ours))
    assert torch.equal(logits(again, tokens()), logits(ours, tokens()))


@pytest.mark.slow
def test_a_fresh_process_registers_late_and_needs_no_bitsandbytes(tmp_path):
    bitsandbytes_model(tmp_path / "bnb", "nf4", False)
    packed = FastLanguageModel.from_pretrained(tmp_path / "bnb")
    for part in packed:
        part.save_pretrained(tmp_path / "packed")
    code = f"""
import sys
sys.modules["bitsandbytes"] = None
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING
import fewbits.models.fast
assert "fewbits" not in AUTO_QUANTIZER_MAPPING and "fewbits" not in AUTO_QUANTIZATION_CONFIG_MAPPING
from fewbits import FastLanguageModel
for folder in ({str(tmp_path / "packed")!r}, {str(tmp_path / "bnb")!r}):
    model, _ = FastLanguageModel.from_pretrained(folder)
    assert "QuantizedLinear" in repr(model)
assert "fewbits" in AUTO_QUANTIZER_MAPPING and "fewbits" in AUTO_QUANTIZATION_CONFIG_MAPPING
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_packed_files_are_safetensors_only(tmp_path):
    save_tiny(tmp_path / "plain")
    load(tmp_path / "plain", quantization_config=FewbitsConfig()).save_pretrained(tmp_path / "packed")
    written = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert names(tmp_path / "packed") == written
    keys = load_file(tmp_path / "packed" / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.weight_codes" in keys
    assert "model.layers.0.mlp.up_proj.weight" not in keys
