"""Quantise while loading, save, load again: bits, logits, configuration, refusals."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from fewbits.errors import BadCheckpoint, SpecMismatch, Unsupported
from fewbits.formats import FORMATS
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.folders.checkpoint import inspect_folder
from fewbits.models.loading.hf_quantizer import FewbitsConfig
from fewbits.models.packing.convert import convert, explain
from fewbits.models.packing.packed import quantize_by_rows
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import CATALOG, Recipe, Rule, get_recipe, recipe_to_config
from tests.every_format import every_format
from tests.models.loading import logits, packed_state, same, save_tiny
from tests.models.steps import losses_of_steps
from tests.models.tiny import FAMILIES, tokens

load = AutoModelForCausalLM.from_pretrained


@pytest.mark.parametrize("family", FAMILIES)
def test_loading_equals_converting_and_survives_saving(family, tmp_path):
    model = save_tiny(tmp_path / "plain", family)
    loaded = load(
        tmp_path / "plain", quantization_config=FewbitsConfig("qlora_nf4"), attn_implementation="eager"
    )
    convert(model, get_recipe("qlora_nf4"))
    assert packed_state(loaded) and same(packed_state(loaded), packed_state(model))
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    loaded.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed", attn_implementation="eager")
    assert same(dict(again.state_dict()), dict(loaded.state_dict()))
    assert torch.equal(logits(again, tokens()), logits(loaded, tokens()))
    assert not any(p.requires_grad for n, p in again.named_parameters() if "weight_" in n)


@pytest.mark.parametrize("recipe", ["qlora_nf4", None])
def test_a_base_with_an_adapters_layers(recipe, tmp_path):
    """A packed one is not written under names that nobody reads; a plain one is refused by its cause."""
    save_tiny(tmp_path / "plain")
    settings = {"quantization_config": FewbitsConfig(recipe)} if recipe else {}
    model = get_peft_model(load(tmp_path / "plain", **settings), r=2)
    base, out = model.get_base_model(), tmp_path / "out"
    if recipe:
        with pytest.raises(Unsupported, match=r"save_pretrained_merged, or take the adapter out first"):
            base.save_pretrained(out)
        assert not out.exists()
    else:
        base.save_pretrained(out)
        with pytest.raises(
            BadCheckpoint, match=r"base_layer\.weight: it was saved from a model with an adapter"
        ):
            inspect_folder(out)
    model.unload().save_pretrained(tmp_path / "clean")
    assert torch.equal(logits(load(tmp_path / "clean"), tokens()), logits(base, tokens()))


def test_an_adapter_that_transformers_added_is_saved_alone(tmp_path):
    save_tiny(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=FewbitsConfig("qlora_nf4"))
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    assert {p.name for p in (tmp_path / "adapter").glob("*.safetensors")} == {"adapter_model.safetensors"}
    again = load(tmp_path / "plain", quantization_config=FewbitsConfig("qlora_nf4"))
    again.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_every_recipe_of_the_catalog_loads(name, tmp_path):
    model = save_tiny(tmp_path / "plain")
    loaded = load(tmp_path / "plain", quantization_config=FewbitsConfig(name), attn_implementation="eager")
    convert(model, get_recipe(name))
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    loaded.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", attn_implementation="eager")
    assert torch.equal(logits(again, tokens()), logits(loaded, tokens()))
    assert again.hf_quantizer.recipe == get_recipe(name)


def test_mixed_formats_biases_and_shards(tmp_path):
    save_tiny(tmp_path / "plain", "qwen2", shard="40KB")
    assert len(list((tmp_path / "plain").glob("model-*.safetensors"))) > 2
    int4 = Rule(weight=replace(FORMATS["int4_g64"], name="int4_g64"))
    recipe = Recipe(
        name="mixed",
        linear=Rule(weight=replace(FORMATS["nf4"], block=32)),
        overrides=(("*.mlp.*", int4), ("*.v_proj", Rule(weight=FORMATS["float8_e4m3_row"]))),
        skip=("*.1.self_attn.o_proj",),
    )
    model = load(tmp_path / "plain", quantization_config=FewbitsConfig(recipe))
    layers = model.model.layers
    assert layers[0].self_attn.q_proj.format.block == 32
    assert layers[0].self_attn.q_proj.bias is not None
    assert layers[1].mlp.up_proj.format == int4.weight
    assert layers[0].self_attn.v_proj.format.name == "float8_e4m3_row"
    assert type(layers[1].self_attn.o_proj) is torch.nn.Linear
    model.save_pretrained(tmp_path / "packed", max_shard_size="30KB")
    again = load(tmp_path / "packed")
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert again.hf_quantizer.recipe == recipe
    plain_data = recipe_to_config(recipe)
    assert same(
        packed_state(load(tmp_path / "plain", quantization_config=FewbitsConfig(plain_data))),
        packed_state(model),
    )


def test_an_override_packs_the_head(tmp_path):
    save_tiny(tmp_path / "plain")
    recipe = Recipe(name="head", overrides=(("lm_head", Rule(weight=FORMATS["int8"])),))
    model = load(tmp_path / "plain", quantization_config=FewbitsConfig(recipe))
    assert isinstance(model.lm_head, QuantizedLinear)
    model.save_pretrained(tmp_path / "packed")
    assert isinstance(load(tmp_path / "packed").lm_head, QuantizedLinear)


def test_dtype_is_the_loads_own(tmp_path):
    model = save_tiny(tmp_path / "plain")
    loaded = load(tmp_path / "plain", quantization_config=FewbitsConfig(), dtype=torch.bfloat16)
    convert(model.to(torch.bfloat16), get_recipe("qlora_nf4"))
    assert same(packed_state(loaded), packed_state(model))
    assert loaded.dtype == torch.bfloat16
    assert loaded.model.layers[0].mlp.up_proj.dtype == torch.bfloat16
    assert logits(loaded, tokens()).isfinite().all()


def test_config_json_spells_recipe_and_formats_out(tmp_path):
    save_tiny(tmp_path / "plain")
    load(tmp_path / "plain", quantization_config=FewbitsConfig()).save_pretrained(tmp_path / "packed")
    written = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "fewbits"
    assert written["recipe"]["name"] == "qlora_nf4"
    (format,) = (f for f in written["formats"] if f["name"] == "nf4_dq")
    assert format["block"] == 64 and len(format["values"]) == 16
    format["block"] = 32
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    config["quantization_config"] = written
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecMismatch, match="nf4_dq"):
        load(tmp_path / "packed")


def test_a_newer_layout_is_refused():
    with pytest.raises(Unsupported, match="newer fewbits"):
        FewbitsConfig(layout_version=99)


def test_receipt_names_what_was_loaded(tmp_path):
    save_tiny(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=FewbitsConfig())
    receipt = explain(model)
    assert sum("QuantizedLinear" in change.after for change in receipt.changes) == 14
    assert receipt.bytes_after < receipt.bytes_before / 5
    assert not receipt.mismatches


def test_flags_that_trainers_read(tmp_path):
    save_tiny(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=FewbitsConfig())
    assert model.is_quantized and model.hf_quantizer.is_trainable and model.hf_quantizer.is_serializable()
    assert not model.hf_quantizer.is_qat_trainable
    assert not getattr(
        model, "is_loaded_in_4bit", False
    )  # it would make TRL and PEFT treat it as bitsandbytes


def test_device_maps(tmp_path):
    save_tiny(tmp_path / "plain")
    plain = load(tmp_path / "plain", quantization_config=FewbitsConfig())
    for device_map in ({"": "cpu"}, "cpu", "auto"):
        model = load(tmp_path / "plain", quantization_config=FewbitsConfig(), device_map=device_map)
        assert same(packed_state(model), packed_state(plain))
    with pytest.raises(Unsupported, match="disk"):
        load(
            tmp_path / "plain",
            quantization_config=FewbitsConfig(),
            device_map={"model": "cpu", "lm_head": "disk"},
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_gpu_that_is_not_there(tmp_path):
    save_tiny(tmp_path / "plain")
    with pytest.raises(Unsupported, match="cuda"):
        load(tmp_path / "plain", quantization_config=FewbitsConfig(), device_map="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nf4", "nf4_dq", "int8", "int4_g64", "float8_e4m3_row"])
def test_on_a_gpu(name, tmp_path):
    save_tiny(tmp_path / "plain")
    recipe = Recipe(name="gpu", linear=Rule(weight=FORMATS[name]))
    cpu = packed_state(load(tmp_path / "plain", quantization_config=FewbitsConfig(recipe)))
    gpu = load(tmp_path / "plain", quantization_config=FewbitsConfig(recipe), device_map="cuda")
    assert all(p.device.type == "cuda" for p in gpu.parameters())
    found = {k: v.cpu() for k, v in packed_state(gpu).items()}
    if name.endswith("_dq"):  # the mean of the scales is summed in another order
        cpu, found = ({k: v for k, v in s.items() if k.endswith("codes")} for s in (cpu, found))
    assert same(found, cpu)
    gpu.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed", device_map="cuda")
    assert torch.equal(logits(again, tokens().cuda()), logits(gpu, tokens().cuda()))


@pytest.mark.gpu
def test_fast_on_a_gpu(tmp_path):
    from fewbits import FastLanguageModel

    save_tiny(tmp_path / "plain", shard="60KB")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "plain")
    assert model.dtype == torch.bfloat16 and model.device.type == "cuda"
    model = FastLanguageModel.get_peft_model(model, r=4)
    ids = tokens().cuda()
    losses = losses_of_steps(model, ids, 6)
    assert losses[-1] < losses[0]
    for method in ("merged_16bit", "merged_4bit"):
        receipt = model.save_pretrained_merged(tmp_path / method, tokenizer, save_method=method)
        assert receipt.num_merged == 14


def test_one_tensor_at_a_time(tmp_path, monkeypatch):
    """While a weight is quantised, no other linear of the model holds a full-precision weight."""
    save_tiny(tmp_path / "plain", shard="40KB")
    from fewbits.models.loading.hf_quantizer import FewbitsQuantizer

    seen = []
    quantize_into = FewbitsQuantizer.quantize_into

    def spy(self, model, name, weight):
        plain = [
            n
            for n, m in model.named_modules()
            if type(m) is torch.nn.Linear and n != "lm_head" and m.weight.device.type != "meta"
        ]
        seen.append(len(plain))
        quantize_into(self, model, name, weight)

    monkeypatch.setattr(FewbitsQuantizer, "quantize_into", spy)
    load(tmp_path / "plain", quantization_config=FewbitsConfig())
    assert seen == [0] * 14


@every_format
def test_quantising_by_rows_gives_the_same_bits(format):
    for shape in ((300, 256), (256, 256), (257, 100), (8, 64)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        whole = format.quantize(weight)
        assert same(dict(quantize_by_rows(format, weight, rows=128).parts), dict(whole.parts)), shape


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["qlora_nf4", "int8"])
def test_peak_memory_is_the_packed_model_and_about_one_tensor(recipe):
    """In a fresh process, on 0.6 GB of weights: the process's own memory, without the shards' file pages."""
    script = Path(__file__).parents[2] / "benchmarks" / "training" / "load_memory.py"
    measured = runpy.run_path(str(script))["measure"](layers=4, hidden=2048, vocab=32000, recipe=recipe)
    embeddings = 2 * 32000 * 2048 * 2  # they stay bfloat16, as pages of the file
    packed = measured["model_bytes"] - embeddings
    one_tensor = 2048 * 5632 * 4  # the largest linear's weight in float32
    assert measured["peak_anon_bytes"] < packed + 2 * one_tensor
