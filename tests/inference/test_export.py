from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fewbits.errors import BadCheckpoint, BadInput, Unsupported
from fewbits.formats import NF4
from fewbits.inference import export
from fewbits.inference.export import quantize_checkpoint
from fewbits.models.fast import FastLanguageModel
from fewbits.recipes import get_recipe


@pytest.fixture(scope="module")
def source(shared):
    return shared / "data/models/stories260k"


def logits(folder, **options):
    model, tokenizer = FastLanguageModel.from_pretrained(folder, load_in_4bit=False, **options)
    ids = tokenizer("Once upon a time, there was a little girl", return_tensors="pt").input_ids
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.parametrize("recipe", ["qlora_nf4", "int8"])
def test_it_loads_and_equals_quantising_while_loading(source, tmp_path, recipe):
    result = quantize_checkpoint(source, tmp_path / "packed", recipe)
    assert torch.equal(logits(tmp_path / "packed"), logits(source, recipe=recipe))
    assert result.recipe == recipe
    assert len(result.layers) == 35


def test_the_table_is_true(source, tmp_path):
    seen = []
    result = quantize_checkpoint(source, tmp_path / "packed", "qlora_nf4", progress=lambda *x: seen.append(x))
    weights = load_file(source / "model.safetensors")
    total_error = total_norm = 0.0
    for layer in result.layers:
        w = weights[f"{layer.name}.weight"]
        rule = get_recipe("qlora_nf4").rule_for(layer.name)
        packed = rule.weight.quantize(w)
        error, norm = (w - packed.dequantize(torch.float32)).double().norm(), w.double().norm()
        assert layer.relative_error == pytest.approx((error / norm).item(), rel=1e-5)
        assert layer.snr_db == pytest.approx(-20 * torch.log10(error / norm).item(), rel=1e-5)
        assert layer.bytes_after == packed.nbytes == rule.weight.nbytes(tuple(w.shape))
        assert layer.bits_per_value == pytest.approx(rule.weight.bits_per_value(tuple(w.shape)))
        total_error, total_norm = total_error + error**2, total_norm + norm**2
    assert result.relative_error == pytest.approx((total_error / total_norm).sqrt().item(), rel=1e-5)
    assert 0.05 < result.relative_error < 0.15  # NF4 of nearly normal values, block 64
    written = load_file(tmp_path / "packed" / "model.safetensors")
    assert result.bytes_after == sum(t.nbytes for t in written.values())
    assert result.bytes_before == sum(t.nbytes for t in weights.values())
    assert seen[-1] == (len(weights), len(weights))
    json.dumps(result.as_dict())


def test_what_else_belongs_to_the_model_comes_along(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "packed", "int8")
    for file in source.iterdir():
        assert (tmp_path / "packed" / file.name).is_file()
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fewbits"
    assert config["hidden_size"] == json.loads((source / "config.json").read_text())["hidden_size"]


def test_shards(source, tmp_path, monkeypatch):
    """A sharded source, and a target of several shards."""
    shards = tmp_path / "source"
    shutil.copytree(source, shards)
    weights = load_file(source / "model.safetensors")
    (shards / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[:20], "model-00002-of-00002.safetensors": names[20:]}
    for file, keys in parts.items():
        save_file({k: weights[k] for k in keys}, shards / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {k: file for file, keys in parts.items() for k in keys}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(export, "SHARD_BYTES", 60_000)
    quantize_checkpoint(shards, tmp_path / "packed", "qlora_nf4")
    assert len(list((tmp_path / "packed").glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(tmp_path / "packed"), logits(source, recipe="qlora_nf4"))


def test_a_recipe_for_qat_gives_its_weight_format(source, tmp_path):
    result = quantize_checkpoint(source, tmp_path / "packed", "int4_qat")
    recipe = get_recipe("int4_qat")
    assert {layer.format for layer in result.layers} == {recipe.qat.weight.name}
    assert torch.isfinite(logits(tmp_path / "packed")).all()


def test_what_cannot_be(source, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(BadInput, match="exists and is not empty"):
        quantize_checkpoint(source, tmp_path / "taken", "int8")
    with pytest.raises(BadInput, match="never overwritten"):
        quantize_checkpoint(source, source, "int8", overwrite=True)
    with pytest.raises(BadInput, match="there is no model folder"):
        quantize_checkpoint(tmp_path / "nowhere", tmp_path / "a", "int8")
    with pytest.raises(BadInput, match="packs no weight"):
        quantize_checkpoint(source, tmp_path / "b", "lora_bf16")
    with pytest.raises(BadInput, match=r"no linear is named '\*\.down_prj'"):
        quantize_checkpoint(source, tmp_path / "b", "{name: mine, linear: nf4, skip: ['*.down_prj']}")
    quantize_checkpoint(source, tmp_path / "packed", "int8")
    with pytest.raises(Unsupported, match="quantised already"):
        quantize_checkpoint(tmp_path / "packed", tmp_path / "c", "int8")
    quantize_checkpoint(source, tmp_path / "packed", "qlora_nf4", overwrite=True)
    assert "nf4" in (tmp_path / "packed" / "config.json").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["packed", "taken"]  # nothing half-written


def test_a_damaged_weight_is_named_and_nothing_is_left(source, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"model\.layers\.1\.mlp\.up_proj\.weight .* holds a NaN"):
        quantize_checkpoint(broken, tmp_path / "packed", "qlora_nf4")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken"]


def test_a_zero_weight_is_exact(source, tmp_path):
    """No division by the norm of nothing."""
    item = export._pack("a.weight", torch.zeros(4, 64), NF4)
    assert item.error.relative_error == 0
    assert item.error.snr_db is None
