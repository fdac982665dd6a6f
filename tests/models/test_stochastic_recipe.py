"""The recipe "stochastic" on whole models: every family, checkpoints, adapters, evaluation, refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from fewbits import FastLanguageModel, convert, restore, sc_matmul
from fewbits.decoder.fuse import fuse, fusion_of
from fewbits.errors import BadCheckpoint, SpecMismatch, Unsupported
from fewbits.formats import STOCHASTIC
from fewbits.formats.stochastic import Stochastic
from fewbits.inference.evaluate import perplexity
from fewbits.inference.export import quantize_checkpoint
from fewbits.models.loading.hf_quantizer import FewbitsConfig
from fewbits.models.loading.in_memory import apply_stochastic, mark_packed
from fewbits.models.packing.convert import convert as convert_modules
from fewbits.nn.stochastic.linear import StochasticLinear
from fewbits.recipes import Recipe, Rule, get_recipe, stochastic
from fewbits.recipes.stochastic_config import AttentionSetting, StochasticConfig
from tests.models.loading import logits, packed_state, perturb, same, save_tiny
from tests.models.tiny import FAMILIES, tiny, tokens

load = AutoModelForCausalLM.from_pretrained


def stochastic_layers(model: nn.Module) -> dict[str, StochasticLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, StochasticLinear)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_saves_and_loads(family: str, tmp_path) -> None:
    model = save_tiny(tmp_path / "plain", family)
    loaded = load(
        tmp_path / "plain", quantization_config=FewbitsConfig("stochastic"), attn_implementation="eager"
    )
    layers = stochastic_layers(loaded)
    assert len(layers) == (8 if family == "phi3" else 14) and all(".layers." in name for name in layers)
    convert(model, get_recipe("stochastic"))
    assert same(packed_state(loaded), packed_state(model))
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    loaded.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed", attn_implementation="eager")
    assert same(dict(again.state_dict()), dict(loaded.state_dict()))
    assert torch.equal(logits(again, tokens()), logits(loaded, tokens()))


def test_layers_compute_what_sc_matmul_does() -> None:
    model = tiny("llama")
    weight = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    receipt = convert(model, get_recipe("stochastic"))
    assert "StochasticLinear stochastic" in str(receipt)
    x = torch.randn(5, weight.shape[1])
    y = sc_matmul(x, weight, chunk_d=128, halve_bipolar_stoc_len=True, n_masks=64)
    assert torch.equal(model.model.layers[0].mlp.down_proj(x), y)
    assert type(model.lm_head) is nn.Linear


def test_half_the_bytes_of_16_bits(tmp_path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    save_tiny(tmp_path / "plain", dtype=torch.bfloat16, **wide)
    result = quantize_checkpoint(tmp_path / "plain", tmp_path / "packed", "stochastic")
    packed = load(tmp_path / "packed")
    layers = stochastic_layers(packed).values()
    values = sum(layer.in_features * layer.out_features for layer in layers)
    assert sum(layer.packed.nbytes for layer in layers) == values * (1 + 4 / 128)
    rest = result.bytes_before - 2 * values  # embeddings, norms, the head
    assert result.bytes_after == rest + values * (1 + 4 / 128)
    assert 0 < result.relative_error < 0.01
    direct = load(tmp_path / "plain", quantization_config=FewbitsConfig("stochastic"))
    assert same(packed_state(packed), packed_state(direct))


def test_what_a_layer_has_of_its_own_is_saved(tmp_path) -> None:
    model = save_tiny(tmp_path / "plain", dtype=torch.bfloat16)

    def build(name: str, linear: nn.Linear, rule: Rule) -> nn.Module | None:
        if "mlp" not in name:
            return None
        made = StochasticLinear.from_linear(
            linear, rule, smooth_scales=torch.rand(linear.in_features) + 0.5, protected=[1, 9]
        )
        made.set_lengths([[128], [48]], [1.5], "chunk")
        made.use_int8("up_proj" in name)
        return made

    convert_modules(model, get_recipe("stochastic"), build=build)
    mark_packed(model, get_recipe("stochastic"))
    model.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed", attn_implementation="eager", dtype="auto")
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))
    layers = stochastic_layers(again)
    assert layers["model.layers.1.mlp.up_proj"].int8
    assert layers["model.layers.1.mlp.down_proj"].levels == (48, 128)
    assert layers["model.layers.1.mlp.down_proj"].by_chunk
    assert layers["model.layers.1.self_attn.q_proj"].length_table is None


def test_restoring_gives_plain_linears() -> None:
    model = tiny("qwen2")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    convert(model, get_recipe("stochastic"))
    restore(model)
    assert not stochastic_layers(model)
    for name, parameter in model.named_parameters():
        assert (parameter - before[name]).abs().max() <= before[name].abs().max() / 127


def test_an_adapter_merges_into_16_bits_with_and_without_the_original(tmp_path) -> None:
    save_tiny(tmp_path / "base")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base", recipe="stochastic")
    model = perturb(FastLanguageModel.get_peft_model(model, r=4))
    receipt = model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    assert receipt.logits_error < receipt.tolerance and "the original weights" in str(receipt)
    shutil.rmtree(tmp_path / "base")
    receipt = model.save_pretrained_merged(tmp_path / "other", tokenizer)
    assert "dequantised" in str(receipt) and receipt.logits_error < receipt.tolerance
    with safe_open(tmp_path / "other" / "model.safetensors", framework="pt") as stream:
        assert not [key for key in stream.keys() if "weight_" in key or "settings" in key]  # noqa: SIM118


def test_a_fused_decoder_leaves_stochastic_layers_alone_and_says_why() -> None:
    model = tiny("llama")
    convert(model, get_recipe("stochastic"))
    ids = tokens()
    fuse(model)
    with pytest.warns(UserWarning, match=r"decoder layers run unfused: .*q_proj is a StochasticLinear"):
        loss = model(ids, labels=ids).loss
    assert loss.isfinite()
    (reason,) = fusion_of(model).fallbacks
    assert reason.endswith("is a StochasticLinear")


# Evaluation of a real model under exact stochastic computing.


def test_stories260k_under_exact_stochastic_computing(shared) -> None:
    """Perplexity close to float32's at 128 cycles, and worse with shorter streams; a few seconds on a CPU."""
    text = (shared / "data/text/tinystories_val.txt").read_text(encoding="utf-8")[:6000]
    found = {}
    for cycles in (None, 128, 32):
        recipe = Recipe(name="plain")
        if cycles:
            recipe = replace(stochastic(), linear=Rule(weight=STOCHASTIC.with_length(cycles)))
        model, tokenizer = FastLanguageModel.from_pretrained(
            shared / "data/models/stories260k", recipe=recipe, load_in_4bit=False, dtype=torch.float32
        )
        assert bool(stochastic_layers(model)) == bool(cycles)
        found[cycles] = perplexity(model, tokenizer, text, max_tokens=1500).perplexity
    assert found[None] < found[128] < found[32]
    assert found[128] < 1.05 * found[None] and found[32] > 1.05 * found[None]


# Refusals.


def test_options_that_cannot_be_prepared_are_refused_before_anything_changes() -> None:
    for options, words in ((Stochastic(mode="unipolar"), "unipolar"), (Stochastic(sc_prec=10), "sc_prec=10")):
        model = tiny("llama")
        with pytest.raises(Unsupported, match=words):
            convert(model, Recipe(name="mine", linear=Rule(weight=options)))
        assert not stochastic_layers(model) and type(model.model.layers[0].mlp.up_proj) is nn.Linear


def test_modules_of_a_shape_without_a_stochastic_product() -> None:
    """They are named in the receipt, or refused before anything changes; all others run."""
    sentence = "q_proj: it is a Conv1d, not a plain nn.Linear"
    model = tiny("llama")
    odd = model.model.layers[1].self_attn.q_proj = nn.Conv1d(64, 64, 1)
    with pytest.raises(SpecMismatch, match=sentence):
        convert(model, get_recipe("stochastic"), strict=True)
    assert not stochastic_layers(model)
    config = StochasticConfig(options=STOCHASTIC)
    for made in (
        lambda: convert(model, get_recipe("stochastic")),
        lambda: apply_stochastic(model, config),
    ):
        receipt = made()
        assert [str(left.reason) for left in receipt.mismatches] == [sentence.split(": ")[1]]
        assert len(stochastic_layers(model)) == 13 and model.model.layers[1].self_attn.q_proj is odd
        restore(model)


def packed_folder(tmp_path, **linear):
    model = save_tiny(tmp_path / "plain")
    convert(model, get_recipe("stochastic"))
    if linear:
        layer = model.model.layers[0].mlp.down_proj
        layer.set_lengths(**linear)
    model.save_pretrained(tmp_path / "packed")
    return tmp_path / "packed"


def change_format(folder, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"]
    plain = quantization["recipe"]["linear"]["weight"]
    plain = {"name": plain} if isinstance(plain, str) else plain
    quantization["recipe"]["linear"]["weight"] = {**plain, **fields}
    quantization.pop("formats")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"chunk_d": 64}, r"weight_scales has shape \(64, 1\) and its settings make it"),
        ({"sc_prec": 7, "rng_levels": 64}, "prepared with codes beyond 63, the largest of the sc_prec=7"),
        ({"mode": "unipolar", "chunk_d": 0}, 'not for mode "unipolar"'),
    ],
)
def test_a_checkpoint_prepared_with_other_settings(fields, words: str, tmp_path) -> None:
    folder = packed_folder(tmp_path)
    change_format(folder, **fields)
    with pytest.raises((BadCheckpoint, Unsupported), match=words) as caught:
        load(folder)
    assert str(caught.value).count(". ") == 0


def test_a_table_of_lengths_of_another_model(tmp_path) -> None:
    folder = packed_folder(tmp_path, table=[[64]])
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.0.mlp.down_proj.length_table"
    tensors[key] = torch.full((1, 5), 64, dtype=torch.int16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match="stream lengths for 5 chunks, and its 128 inputs make 1"):
        load(folder)


@pytest.mark.multi
@pytest.mark.parametrize("attention", [False, True])
def test_multi_a_prepared_checkpoint_over_two_gpus(attention: bool, tmp_path) -> None:
    """``device_map="auto"`` with room for half of the model on the first; the current device is left at 0."""
    model = save_tiny(tmp_path / "plain")
    options = {"attention": (("*", AttentionSetting(scores=64, values=64)),)} if attention else {}
    apply_stochastic(model, StochasticConfig(options=STOCHASTIC, **options))
    model.save_pretrained(tmp_path / "packed")
    bytes_of = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    torch.cuda.set_device(0)
    split = load(tmp_path / "packed", device_map="auto", max_memory={0: int(0.6 * bytes_of), 1: 2**30})
    assert set(split.hf_device_map.values()) == {0, 1}
    whole = load(tmp_path / "packed", device_map={"": 0})
    ids = tokens().cuda(0)
    with torch.inference_mode():
        found = [m(input_ids=ids).logits for m in (split, whole)]
    assert torch.equal(*(x.cpu() for x in found)) and torch.cuda.current_device() == 0
    made = [m.generate(ids, max_new_tokens=8, do_sample=False).cpu() for m in (split, whole)]
    assert torch.equal(*made)
