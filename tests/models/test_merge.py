"""Merged models: from the original weights or the packed ones, checked, whole or nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fewbits import FastLanguageModel, convert_qat
from fewbits.errors import BadCheckpoint, BadInput, Unsupported
from fewbits.formats import INT4_G32, INT8, NF4
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.fast import with_methods
from fewbits.models.loading.hf_quantizer import FewbitsConfig
from fewbits.models.merging import merger
from fewbits.models.merging.merge import save_pretrained_merged
from fewbits.models.packing.convert import convert
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import LoRA, Recipe, Rule, int4_qat, nf4_qat, qlora_nf4_fp8
from tests.models.loading import logits, packed_state, perturb, save_tiny
from tests.models.tiny import tiny, tokens

load = AutoModelForCausalLM.from_pretrained


def trained(folder: Path, family: str = "llama", **lora):
    """A packed model with an adapter that does something."""
    save_tiny(folder, family, shard="60KB")
    model, tokenizer = FastLanguageModel.from_pretrained(folder)
    return perturb(FastLanguageModel.get_peft_model(model, r=4, **lora)), tokenizer


def reference(folder: Path, peft_model, adapter: Path):
    """The same adapter on the unquantised model, by PEFT alone."""
    peft_model.save_pretrained(adapter)
    return peft.PeftModel.from_pretrained(load(folder), adapter).merge_and_unload()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "phi3"])
def test_merging_takes_the_original_weights(family, tmp_path):
    model, tokenizer = trained(tmp_path / "base", family, use_rslora=True)
    receipt = model.save_pretrained_merged(tmp_path / "merged", tokenizer, save_method="merged_16bit")
    assert "the original weights" in str(receipt) and receipt.num_merged == (8 if family == "phi3" else 14)
    assert receipt.logits_error < receipt.tolerance
    expected = reference(tmp_path / "base", model, tmp_path / "adapter").state_dict()
    merged = load(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.bfloat16 and not hasattr(merged.config, "quantization_config")
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor.float(), expected[name], rtol=2**-8, atol=1e-8)  # one rounding
    assert len(list((tmp_path / "merged").glob("model-*.safetensors"))) > 1
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "merged")("hello").input_ids == tokenizer("hello").input_ids
    )


def test_without_the_original_it_dequantises_and_says_so(tmp_path):
    model, tokenizer = trained(tmp_path / "base")
    shutil.rmtree(tmp_path / "base")
    receipt = model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    assert "dequantised" in str(receipt) and "gone" in str(receipt)
    expected = logits(model.eval(), tokens())
    found = logits(load(tmp_path / "merged"), tokens())
    assert (found - expected).norm() / expected.norm() < receipt.tolerance


@pytest.mark.parametrize("method", ["merged_16bit", "merged_4bit"])
def test_fp8_operands_are_no_part_of_what_a_merge_is_held_against(method, tmp_path):
    """They move logits by percents; a folder merged from such a model was refused without the original."""
    model = tiny("llama")
    convert(model, qlora_nf4_fp8())
    with_methods(model)
    model = perturb(FastLanguageModel.get_peft_model(model, r=4))
    before = logits(model.eval(), tokens())
    model.save_pretrained_merged(tmp_path / "merged", None, save_method=method)
    assert torch.equal(logits(model, tokens()), before), "the model's own operands are back"


def test_a_merge_packs_each_linear_in_its_own_format(tmp_path):
    """The exceptions of a recipe in memory were named as they are below an adapter, and so forgotten."""
    model = tiny("llama")
    convert(
        model, Recipe(name="mixed", linear=Rule(weight=NF4), overrides=(("*.down_proj", Rule(weight=INT8)),))
    )
    with_methods(model)
    model = perturb(FastLanguageModel.get_peft_model(model, r=4))
    model.save_pretrained_merged(tmp_path / "merged", None, save_method="merged_4bit")
    layer = load(tmp_path / "merged").model.layers[0]
    assert layer.mlp.down_proj.format == INT8 and layer.mlp.up_proj.format == NF4


def test_a_packed_base_is_dequantised(tmp_path):
    save_tiny(tmp_path / "base")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "packed")
    tokenizer.save_pretrained(tmp_path / "packed")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "packed")
    model = perturb(FastLanguageModel.get_peft_model(model, r=4))
    receipt = model.save_pretrained_merged(tmp_path / "merged", tokenizer, max_shard_size="50KB")
    assert "itself quantised" in str(receipt)
    assert len(list((tmp_path / "merged").glob("model-*.safetensors"))) > 1
    assert not hasattr(load(tmp_path / "merged").config, "quantization_config")


@pytest.mark.parametrize("original", [True, False])
def test_tied_embeddings_stay_tied(original, tmp_path):
    model, tokenizer = trained(tmp_path / "base", "qwen2")
    if not original:
        shutil.rmtree(tmp_path / "base")
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    names = {k for f in (tmp_path / "merged").glob("*.safetensors") for k in load_file(f)}
    assert "lm_head.weight" not in names
    merged = load(tmp_path / "merged")
    assert merged.lm_head.weight.data_ptr() == merged.model.embed_tokens.weight.data_ptr()


def test_trained_biases_and_whole_modules_are_the_trained_ones(tmp_path):
    model, tokenizer = trained(tmp_path / "base", "qwen2", bias="all")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.add_(1.0)
    bias = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.bias.detach().clone()
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    merged = load(tmp_path / "merged", dtype="auto")
    torch.testing.assert_close(merged.model.layers[0].self_attn.q_proj.bias, bias.bfloat16())


def test_modules_to_save_are_written(tmp_path):
    model, tokenizer = trained(tmp_path / "base", modules_to_save=["lm_head"])
    head = model.base_model.model.lm_head.modules_to_save["default"].weight
    with torch.no_grad():
        head.add_(torch.randn_like(head))
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    torch.testing.assert_close(
        load(tmp_path / "merged", dtype="auto").lm_head.weight, head.detach().bfloat16()
    )


@pytest.mark.parametrize("four_bits", [False, True])
@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("gemma", marks=pytest.mark.slow),
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("gemma3_text", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"modules_to_save": ["embed_tokens"]},
    ],
    ids=["apart", "tied", "tied by the embedding", "embedding alone"],
)
def test_trained_embeddings_of_a_model_whose_head_is_tied(settings, family, four_bits, tmp_path):
    save_tiny(tmp_path / "base", family, tie_word_embeddings=True)
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=four_bits)
    model = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj"], **settings)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    copies = {
        name.split(".modules_to_save")[0].rpartition(".")[2]: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if ".modules_to_save." in name
    }
    model.eval().save_pretrained(tmp_path / "adapter")
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    merged = load(tmp_path / "merged", dtype="auto")
    tied = bool(settings.get("ensure_weight_tying"))
    assert merged.config.tie_word_embeddings == tied
    original = load(tmp_path / "base")
    for name, weight in (
        ("embed_tokens", merged.model.embed_tokens.weight),
        ("lm_head", merged.lm_head.weight),
    ):
        if name in copies:
            assert torch.equal(weight, copies[name].detach().bfloat16())
            assert not torch.equal(copies[name], original.lm_head.weight)
        elif not tied:
            assert torch.equal(weight, original.lm_head.weight.bfloat16())
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "adapter", load_in_4bit=four_bits)
    assert torch.equal(logits(again.eval(), tokens()), logits(model, tokens()))


@pytest.mark.parametrize("four_bits", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_dora_is_merged(family, four_bits, tmp_path):
    save_tiny(tmp_path / "base", family)
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=four_bits)
    model = perturb(FastLanguageModel.get_peft_model(model, r=4, use_dora=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    receipt = model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    assert receipt.num_merged == 14
    expected = reference(tmp_path / "base", model, tmp_path / "adapter").state_dict()
    for name, tensor in load(tmp_path / "merged", dtype="auto").state_dict().items():
        torch.testing.assert_close(tensor.float(), expected[name], rtol=2**-7, atol=1e-7)


@pytest.mark.parametrize("method", ["merged_16bit", "merged_4bit"])
@pytest.mark.parametrize("with_adapter", [False, True])
def test_a_model_trained_through_rounding_is_compared_without_it(with_adapter, method, tmp_path):
    """What is written are the weights as they were trained; NF4's rounding is no error of the merge."""
    model = tiny("llama", dtype=torch.bfloat16)
    convert(model, nf4_qat())
    if with_adapter:
        model = perturb(get_peft_model(model, LoRA(r=4)))
    before = logits(model, tokens())
    receipt = save_pretrained_merged(model, tmp_path / "merged", save_method=method)
    assert receipt.logits_error < receipt.tolerance / 2
    assert torch.equal(logits(model, tokens()), before)
    assert sum(isinstance(module, FakeQuantizedLinear) for module in model.modules()) == 14


@pytest.mark.parametrize("as_loaded", [False, True])
def test_a_model_trained_through_rounding_is_packed_in_the_format_it_was_trained_for(as_loaded, tmp_path):
    """As convert_qat packs it, to the bit; never in another format, which would round it a second time."""
    model = tiny("llama", dtype=torch.bfloat16)
    if as_loaded:
        model.save_pretrained(tmp_path / "plain")
        model = load(tmp_path / "plain", quantization_config=FewbitsConfig(int4_qat()), dtype=torch.bfloat16)
    else:
        convert(model, int4_qat())
    save_pretrained_merged(model, tmp_path / "merged", save_method="merged_4bit")
    packed = load(tmp_path / "merged")
    assert {m.format for m in packed.modules() if isinstance(m, QuantizedLinear)} == {INT4_G32}
    found, want = packed_state(packed), packed_state(convert_qat(model)[0])
    assert found.keys() == want.keys() and all(torch.equal(part, want[name]) for name, part in found.items())


def test_merged_4bit_is_packed_again(tmp_path):
    model, tokenizer = trained(tmp_path / "base")
    model.save_pretrained_merged(tmp_path / "m16", tokenizer)
    receipt = model.save_pretrained_merged(tmp_path / "m4", tokenizer, save_method="merged_4bit")
    assert "merged_4bit" in str(receipt)
    packed, tok = FastLanguageModel.from_pretrained(tmp_path / "m4")
    expected, _ = FastLanguageModel.from_pretrained(tmp_path / "m16", dtype=packed.dtype)
    assert packed_state(packed)
    assert torch.equal(logits(packed, tokens()), logits(expected, tokens()))
    assert tok("hello").input_ids == tokenizer("hello").input_ids
    assert not (tmp_path / "m4" / "16bit").exists()


def test_lora_is_a_peft_adapter(tmp_path):
    model, tokenizer = trained(tmp_path / "base")
    assert model.save_pretrained_merged(tmp_path / "lora", tokenizer, save_method="lora") is None
    again = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "lora")
    assert logits(again, tokens()).isfinite().all()
    assert (tmp_path / "lora" / "tokenizer.json").is_file()


def test_the_inner_model_merges_too(tmp_path):
    """TRL wraps by itself; what the user holds then may be the model inside."""
    model, tokenizer = trained(tmp_path / "base")
    receipt = model.get_base_model().save_pretrained_merged(tmp_path / "merged", tokenizer)
    assert receipt.num_merged == 14
    with pytest.raises(BadInput, match="PeftModel"):
        model.get_base_model().save_pretrained_merged(tmp_path / "lora", save_method="lora")


def test_a_wrong_result_is_caught_and_nothing_is_written(tmp_path, monkeypatch):
    model, tokenizer = trained(tmp_path / "base")
    merged = merger.Merger._merged

    def wrong(self, name, weight):
        right = merged(self, name, weight)
        return right * 1.5 if name.endswith("down_proj.weight") else right

    monkeypatch.setattr(merger.Merger, "_merged", wrong)
    with pytest.raises(BadCheckpoint, match="nothing was written"):
        model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    assert {p.name for p in tmp_path.iterdir()} == {"base"}


def test_a_script_that_runs_again_replaces_what_it_wrote_and_nothing_else(tmp_path, caplog):
    model, tokenizer = trained(tmp_path / "base")
    for method in ("merged_16bit", "merged_4bit", "lora"):
        place = tmp_path / method
        model.save_pretrained_merged(place, tokenizer, save_method=method)
        before = {p.name: p.read_bytes() for p in place.glob("*.safetensors")}
        perturb(model, seed=len(method))
        (place / "mine.txt").write_text("mine")
        with pytest.raises(BadInput, match="exists and is not empty"):
            model.save_pretrained_merged(place, tokenizer, save_method=method, overwrite=False)
        caplog.clear()
        model.save_pretrained_merged(place, tokenizer, save_method=method)
        assert "is replaced" in caplog.text and (place / "mine.txt").read_text() == "mine"
        after = {p.name: p.read_bytes() for p in place.glob("*.safetensors")}
        assert after.keys() == before.keys() and after != before
    shutil.copytree(tmp_path / "base", tmp_path / "theirs")  # a model that no merge wrote
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a")
    for place in ("theirs", "notes"):
        with pytest.raises(BadInput, match="exists and is not empty"):
            model.save_pretrained_merged(tmp_path / place, tokenizer)
    with pytest.raises(BadInput, match="never overwritten"):
        model.save_pretrained_merged(tmp_path / "base", tokenizer, overwrite=True)


@pytest.mark.parametrize("method", ["merged_16bit", "merged_4bit", "lora"])
def test_a_rerun_removes_only_what_the_earlier_call_wrote(method, tmp_path):
    model, tokenizer = trained(tmp_path / "base")
    place = tmp_path / "out"
    model.save_pretrained_merged(place, tokenizer, save_method=method, max_shard_size="50KB")
    record = json.loads((place / "merge.json").read_text())
    assert record["written_by"] == "fewbits" and record["save_method"] == method
    wrote = {p.relative_to(place).as_posix() for p in place.rglob("*") if p.is_file()}
    assert set(record["files"]) == wrote
    mine = (
        "tokenizer.model",
        "preprocessor_config.json",
        "model_ema.safetensors",
        "pytorch_model_fsdp.bin",
        "vocab.txt",
        "export.json",
        "checkpoint-5/config.json",
    )
    for name in mine:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(name)
    model.save_pretrained_merged(place, None if method == "lora" else tokenizer, save_method=method)
    assert {name: (place / name).read_text() for name in mine} == {name: name for name in mine}
    record = json.loads((place / "merge.json").read_text())
    there = {p.relative_to(place).as_posix() for p in place.rglob("*") if p.is_file()}
    assert there == {*record["files"], *mine} and not {*record["files"]} & {*mine}
    if method == "lora":  # what the earlier call alone wrote is gone
        assert "tokenizer.json" in wrote and "tokenizer.json" not in there


def test_folders_of_other_writers_are_refused_by_default(tmp_path):
    model, tokenizer = trained(tmp_path / "base")
    for method, kind in (("merged_16bit", "base"), ("lora", "adapter")):
        for number, text in enumerate((None, '{"by": "mergekit"}', "[1]", "no JSON", '{"files": ["a"]}')):
            place = tmp_path / f"{method}{number}"
            if kind == "adapter":
                model.save_pretrained(place)  # PEFT's own, of whatever training
            else:
                shutil.copytree(tmp_path / "base", place)
            if text is not None:
                (place / "merge.json").write_text(text)
            before = {p.name: p.read_bytes() for p in place.iterdir()}
            with pytest.raises(BadInput, match="exists and is not empty"):
                model.save_pretrained_merged(place, tokenizer, save_method=method)
            assert {p.name: p.read_bytes() for p in place.iterdir()} == before
        model.save_pretrained_merged(place, tokenizer, save_method=method, overwrite=True)


def test_a_name_that_somebody_took_since_is_refused(tmp_path):
    model, tokenizer = trained(tmp_path / "base")
    place = tmp_path / "out"
    model.save_pretrained_merged(place, save_method="lora")
    (place / "tokenizer.json").write_text("mine")
    before = {p.name: p.read_bytes() for p in place.iterdir()}
    with pytest.raises(BadInput, match=r"tokenizer\.json is not of the earlier call"):
        model.save_pretrained_merged(place, tokenizer, save_method="lora")
    assert {p.name: p.read_bytes() for p in place.iterdir()} == before


def test_a_record_goes_with_the_files_that_it_names(tmp_path):
    """Another model saved there since is not of that merge, and no rerun replaces it."""
    model, tokenizer = trained(tmp_path / "base")
    model.save_pretrained_merged(tmp_path / "out", tokenizer)
    packed, _ = FastLanguageModel.from_pretrained(tmp_path / "base")
    packed.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / "merge.json").exists()
    with pytest.raises(BadInput, match="exists and is not empty"):
        model.save_pretrained_merged(tmp_path / "out", tokenizer)


@pytest.mark.parametrize("method", ["merged_16bit", "merged_4bit", "lora"])
def test_what_others_saved_over_a_merge_is_theirs(method, tmp_path):
    """transformers and PEFT know nothing of the record, and leave it beside another model's weights."""
    model, tokenizer = trained(tmp_path / "base")
    other = load(tmp_path / "base")
    other.lm_head.weight.data.add_(1)
    place = tmp_path / "out"
    for size in ("50KB", "1GB"):  # the earlier call's weights in several files, and in one
        model.save_pretrained_merged(place, tokenizer, save_method=method, max_shard_size=size)
        model.save_pretrained_merged(place, tokenizer, save_method=method, max_shard_size=size)  # a rerun
        if method == "lora":
            weights = load_file(place / "adapter_model.safetensors")
            save_file({name: w + 1 for name, w in weights.items()}, place / "adapter_model.safetensors")
        else:
            other.save_pretrained(place)
        before = {p.name: p.read_bytes() for p in place.iterdir()}
        assert "merge.json" in before
        with pytest.raises(BadInput, match=r"model\.safetensors is not what the earlier call wrote"):
            model.save_pretrained_merged(place, tokenizer, save_method=method)
        assert {p.name: p.read_bytes() for p in place.iterdir()} == before
        model.save_pretrained_merged(place, tokenizer, save_method=method, overwrite=True)
        shutil.rmtree(place)


def test_an_adapter_beside_a_merge_is_sent_to_a_folder_of_its_own(tmp_path):
    """The sentence named overwrite=True as a way out, which is refused there as well."""
    model, tokenizer = trained(tmp_path / "base")
    model.save_pretrained_merged(tmp_path / "out", tokenizer)
    model.save_pretrained(tmp_path / "out")
    with pytest.raises(BadInput, match=r"adapter_model\.safetensors was saved beside .* a folder each"):
        model.save_pretrained_merged(tmp_path / "out", tokenizer)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_what_is_refused(tmp_path):
    model, tokenizer = trained(tmp_path / "base")
    with pytest.raises(BadInput, match="save_method"):
        model.save_pretrained_merged(tmp_path / "m", tokenizer, save_method="gguf")
    with pytest.raises(BadInput, match="no option colour"):
        model.save_pretrained_merged(tmp_path / "m", tokenizer, colour="red")
    with pytest.raises(Unsupported, match="upload"):
        model.save_pretrained_merged(tmp_path / "m", tokenizer, push_to_hub=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="is a file"):
        model.save_pretrained_merged(tmp_path / "file", tokenizer)
    biased = peft.get_peft_model(
        load(tmp_path / "base"), peft.LoraConfig(target_modules=["embed_tokens"], use_dora=True)
    )
    with pytest.raises(Unsupported, match="nor DoRA over a linear"):
        save_pretrained_merged(biased, tmp_path / "m", tokenizer)
    with pytest.warns(UserWarning, match="rounds them again"):
        model.merge_adapter()
    with pytest.raises(BadInput, match="unmerge_adapter"):
        model.save_pretrained_merged(tmp_path / "m", tokenizer)
    assert {p.name for p in tmp_path.iterdir()} == {"base", "file"}


def test_a_full_finetune_saves_what_was_trained(tmp_path):
    save_tiny(tmp_path / "base")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base", full_finetuning=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    receipt = model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    merged = load(tmp_path / "merged", dtype="auto")
    for name, parameter in model.named_parameters():
        assert torch.equal(merged.get_parameter(name), parameter.detach().bfloat16()), name
    assert receipt.num_merged == 0
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"
