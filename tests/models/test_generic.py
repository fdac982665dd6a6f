"""Dense decoders that nobody wrote a spec for: packed, adapted, trained and saved by their own layers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import fewbits
from fewbits import FastLanguageModel
from fewbits.decoder.fuse import fused_layers
from fewbits.errors import BadInput, Unsupported
from fewbits.families import registry
from fewbits.families.catalog import LLAMA, SPECS
from fewbits.formats import INT8, NF4
from fewbits.host.generic import routers
from fewbits.host.spec import layer_names, spec_for
from fewbits.inference.export import quantize_checkpoint
from fewbits.models.generation import step as decode_step
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import QAT, Recipe, Rule
from tests.models.loading import logits, packed_state, perturb, same
from tests.models.tiny import tokens
from tests.models.unwritten import UNFUSED, UNWRITTEN, save_unwritten, unwritten

PACK = Recipe(name="pack", linear=Rule(weight=NF4))
WHY_UNFUSED = {
    "granite": "each half is multiplied by residual_multiplier (0.22) before it is added",
    "olmo2": "its norms of queries and keys go over all heads at once",
    "smollm3": "its queries and keys are not turned by their positions",
    "cohere": "its norms are LayerNorms",
    "cohere2": "its norms are LayerNorms",
}
SOME = ("granite", "smollm3", "cohere2", "gpt2", "opt", "falcon", "gpt_neox")


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(input_ids=tokens(), labels=tokens(), use_cache=False).loss


def rounded_twin(model_type: str) -> nn.Module:
    """The plain model with every linear of its layers rounded to NF4 by hand."""
    model = unwritten(model_type)
    ends = (model.get_output_embeddings(),)
    with torch.no_grad():
        for name, module in model.named_modules():
            if module in ends or name.endswith(("project_in", "project_out")):
                continue
            if isinstance(module, nn.Linear):
                module.weight.copy_(NF4.fake_quantize(module.weight))
            elif isinstance(module, Conv1D):
                module.weight.copy_(NF4.fake_quantize(module.weight.t().contiguous()).t())
    return model


@pytest.mark.parametrize("model_type", UNFUSED)
def test_a_packed_model_is_the_model_with_rounded_weights(model_type: str) -> None:
    model, twin = unwritten(model_type), rounded_twin(model_type)
    before = {type(module) for module in model.modules()}
    receipt = fewbits.convert(model, PACK, strict=True)
    layers = list(layer_names(model, spec_for(model)))
    assert len(layers) == 2 and len(receipt.changes) >= 8
    plain = [n for n, m in model.get_submodule(layers[0]).named_modules() if type(m) in (nn.Linear, Conv1D)]
    assert plain == []
    # one product each, of the same operands; OPT and the like add their bias in the product or after it
    torch.testing.assert_close(logits(model, tokens()), logits(twin, tokens()), rtol=2**-24 * 64, atol=2e-5)
    note = f"{model_type} has no spec: its linears are packed and trained through its own layers, unfused"
    assert (note in receipt.notes) == (model_type in UNWRITTEN)
    fewbits.restore(model)
    assert {type(module) for module in model.modules()} - before <= {nn.Linear}  # Falcon's own is one, too
    torch.testing.assert_close(logits(model, tokens()), logits(twin, tokens()), rtol=2**-24 * 64, atol=2e-5)


@pytest.mark.parametrize("model_type", UNFUSED)
def test_neither_norms_nor_attention_nor_fusion_change_loss_and_gradients(model_type: str) -> None:
    model = unwritten(model_type)
    before = loss_and_gradients(model)
    fewbits.convert(model, Recipe(name="identity"))
    if model_type not in UNWRITTEN:
        receipt = str(fewbits.fuse(model.train()))
        assert "stays unfused: " in receipt and WHY_UNFUSED[model_type] in receipt
        assert len(fused_layers(model)) == (model_type == "smollm3")  # of its two layers one is turned
        assert "attention: by fewbits" in receipt
    after = loss_and_gradients(model)
    torch.testing.assert_close(after[0], before[0], rtol=1e-5, atol=1e-6)
    assert after[1].keys() == before[1].keys()
    for name, gradient in before[1].items():
        torch.testing.assert_close(
            after[1][name], gradient, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def loss_and_gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", UNFUSED)
def test_two_steps_of_training_last_through_a_folder(model_type: str, tmp_path) -> None:
    save_unwritten(tmp_path / "base", model_type)
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=True, dtype=torch.float32)
    adapted = FastLanguageModel.get_peft_model(model, r=4, target_modules="all-linear").eval()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(loss_of(adapted))
        losses[-1].backward()
        if len(losses) < 3:
            optimizer.step()
    assert losses[2] < losses[1] < losses[0]
    adapted.save_pretrained(tmp_path / "adapter")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert torch.equal(logits(again, tokens()), logits(adapted, tokens()))


@pytest.mark.parametrize("model_type", UNFUSED)
def test_adapters_train_as_over_the_decoded_weights(model_type: str, tmp_path) -> None:
    save_unwritten(tmp_path / "base", model_type)
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=True, dtype=torch.float32)
    plain = copy.deepcopy(model).dequantize()
    assert not any(isinstance(m, QuantizedLinear) for m in plain.modules())
    adapted = perturb(FastLanguageModel.get_peft_model(model, r=4, target_modules="all-linear")).eval()
    names = {n.partition(".lora_")[0] for n, p in adapted.named_parameters() if p.requires_grad}
    assert names and all(isinstance(adapted.get_submodule(n).base_layer, QuantizedLinear) for n in names)
    adapted.save_pretrained(tmp_path / "adapter")
    beside = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True).eval()
    losses = [loss_of(adapted), loss_of(beside)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-5)
    theirs = dict(beside.named_parameters())
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("model_type", SOME)
def test_a_packed_folder_opens_again_through_every_door(model_type: str, tmp_path) -> None:
    save_unwritten(tmp_path / "base", model_type)
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model.save_pretrained(tmp_path / "packed")
    tokenizer.save_pretrained(tmp_path / "packed")
    quantize_checkpoint(tmp_path / "base", tmp_path / "quantized", "qlora_nf4")
    fewbits.register()
    doors = [
        FastLanguageModel.from_pretrained(tmp_path / "packed", dtype=torch.float32)[0],
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32).eval(),
        FastLanguageModel.from_pretrained(tmp_path / "quantized", dtype=torch.float32)[0],
    ]
    for opened in doors:
        assert same(packed_state(opened), packed_state(model))
        assert torch.equal(logits(opened, tokens()), logits(model, tokens()))
    doors[0].dequantize().save_pretrained(tmp_path / "plain")  # which transformers alone opens
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(plain, tokens()), logits(model, tokens()), rtol=0, atol=2e-5)
    generated = doors[1].generate(tokens(2, 8), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    expected = plain.generate(tokens(2, 8), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert torch.equal(generated, expected)


@pytest.mark.parametrize("model_type", SOME)
def test_an_adapter_is_merged_and_loads_again(model_type: str, tmp_path) -> None:
    save_unwritten(tmp_path / "base", model_type)
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    adapted = perturb(FastLanguageModel.get_peft_model(model, r=4), scale=0.05)
    adapted.save_pretrained(tmp_path / "adapter")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert torch.equal(logits(again, tokens()), logits(adapted.eval(), tokens()))
    receipt = adapted.save_pretrained_merged(tmp_path / "merged", tokenizer, dtype=torch.float32)
    assert "the original weights" in str(receipt)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    reference = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter").merge_and_unload()
    torch.testing.assert_close(logits(merged, tokens()), logits(reference, tokens()), rtol=0, atol=2e-5)


def test_a_merge_without_the_original_turns_gpt2s_weights_back(tmp_path) -> None:
    model = unwritten("gpt2")
    fewbits.convert(model, Recipe(name="int8", linear=Rule(weight=INT8)))
    adapted = perturb(FastLanguageModel.get_peft_model(model, r=4), scale=0.05)
    write = fewbits.models.merging.merge.save_pretrained_merged
    receipt = write(adapted, tmp_path / "merged", dtype=torch.float32)
    assert "dequantised" in str(receipt)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(merged, tokens()), logits(adapted.eval(), tokens()), rtol=0, atol=2e-5)


def test_fake_quantised_weights_of_gpt2_come_back_as_they_were() -> None:
    model, twin = unwritten("gpt2"), rounded_twin("gpt2")
    before = {name: p.clone() for name, p in model.named_parameters()}
    fewbits.convert(model, Recipe(name="qat", qat=QAT(weight=NF4)))
    torch.testing.assert_close(logits(model, tokens()), logits(twin, tokens()), rtol=0, atol=2e-5)
    loss_of(model).backward()
    assert model.transformer.h[0].attn.c_attn.weight.grad is not None
    fewbits.restore(model)
    assert type(model.transformer.h[0].attn.c_attn) is Conv1D
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_receipt_names_what_no_rule_touched_in_one_line_each() -> None:
    lines = str(fewbits.convert(unwritten("gpt2"), PACK)).splitlines()
    (norm,) = [line for line in lines if "transformer.h.*.ln_1 " in line]
    assert " x2 " in norm and "a LayerNorm that no rule names: left as it is" in norm
    assert any(line.endswith("x1  an Embedding that no rule names: left as it is") for line in lines)
    model = llama_with_sinks()
    (sinks,) = [left for left in str(fewbits.convert(model, PACK)).splitlines() if "sinks" in left]
    assert sinks.split()[:2] == ["model.layers.*.self_attn.sinks", "x2"]
    assert "no rule names" not in str(fewbits.convert(llama_with_sinks(sinks=False), PACK, fuse_norms=False))


def llama_with_sinks(*, sinks: bool = True) -> nn.Module:
    from tests.models.tiny import tiny

    model = tiny("llama")
    for layer in model.model.layers if sinks else ():
        layer.self_attn.sinks = nn.Parameter(torch.zeros(4))
    return model


@pytest.mark.parametrize("training", [False, True])
def test_new_adapters_switch_no_dropout_of_the_base_on(training: bool) -> None:
    model = unwritten("gpt2").train(training)
    fewbits.get_peft_model(model, r=4, target_modules="all-linear")
    assert all(m.training == training for m in (model, *model.transformer.h))
    model = unwritten("gpt2")
    expected = logits(model, tokens())
    adapted = FastLanguageModel.get_peft_model(model.train(training), r=4)
    assert adapted.training == training
    assert training or torch.equal(logits(adapted, tokens()), expected)
    said = any("resid_pdrop 0.1" in note and "for_training" in note for note in adapted.fewbits_notes)
    assert said != training
    assert FastLanguageModel.for_training(adapted).training
    assert torch.equal(logits(FastLanguageModel.for_inference(adapted), tokens()), expected)
    assert FastLanguageModel.get_peft_model(unwritten("granite"), r=4).training


def test_what_needs_the_arithmetic_says_that_there_is_no_spec() -> None:
    model = unwritten("starcoder2")
    with pytest.raises(Unsupported, match=r"starcoder2 has no spec, so its layers run .*register_family"):
        fewbits.fuse(model)
    assert decode_step.why_not(model) == "starcoder2 has no spec"


def experts_config(model_type: str, **sizes: int) -> object:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    return AutoConfig.for_model(model_type, **{**small, "num_attention_heads": 2, **sizes})


@pytest.mark.parametrize(
    ("model_type", "sizes", "missing"),
    [
        ("t5", {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}, "an encoder and"),
        ("jetmoe", {"num_local_experts": 8, "kv_channels": 16, "num_key_value_heads": 2}, "most of a layer"),
    ],
)
def test_what_linears_do_not_describe_is_refused_by_name(model_type: str, sizes: dict, missing: str) -> None:
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(experts_config(model_type, **sizes))
    with pytest.raises(Unsupported, match=rf"no spec for model_type '{model_type}'.*{missing}"):
        fewbits.convert(model, PACK)


def test_a_users_own_family_is_handled_by_its_spec(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    spec = replace(LLAMA, model_type="seed_oss")
    config = {"model_type": "seed_oss"}
    with pytest.raises(Unsupported, match=r"register_family"):
        spec_for(config)
    fewbits.register_family(spec)
    assert spec_for(config) is spec and "seed_oss" not in SPECS
    with pytest.raises(BadInput, match=r"a spec for 'seed_oss' already; pass replace=True"):
        fewbits.register_family(spec)
    other = replace(spec, final_norm="model.last_norm")
    fewbits.register_family(other, replace=True)
    assert spec_for(config) is other
    with pytest.raises(BadInput, match="a spec for 'llama' already"):
        fewbits.register_family(LLAMA)
    with pytest.raises(BadInput, match=r"takes a fewbits.ModelSpec, and this is a str"):
        fewbits.register_family("llama")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="needs a model_type and the paths"):
        fewbits.register_family(replace(LLAMA, model_type=""))


def test_a_registered_family_is_converted_and_fused_where_it_computes_the_same(monkeypatch) -> None:
    """SeedOss is Llama by another name, with biases; its layers fuse once a spec says where things are."""
    from tests.models.tiny import _COMMON

    monkeypatch.setattr(registry, "_REGISTERED", {})
    fewbits.register_family(replace(LLAMA, model_type="seed_oss"))
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "seed_oss", **_COMMON, head_dim=16, attention_dropout=0.0, residual_dropout=0.0
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    expected = loss_of(model)
    fewbits.convert(model, Recipe(name="identity"), strict=True)
    assert len(fewbits.fuse(model, loss=False).changes) == 2
    torch.testing.assert_close(loss_of(model), expected, rtol=1e-5, atol=0)


def empty_layer(model_type: str, **sizes: int) -> Any:
    """The last of four decoder layers, on the meta device."""
    config = AutoConfig.for_model(
        model_type, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, head_dim=8, **sizes
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).model.layers[3]


def test_a_linear_with_as_many_outputs_as_experts_is_no_router() -> None:
    """Qwen3-Next as it comes has 512 experts, two key heads of 256 and a shared expert of 512."""
    layer = empty_layer(
        "qwen3_next", num_experts=16, num_key_value_heads=2, shared_expert_intermediate_size=16
    )
    assert layer.self_attn.k_proj.out_features == layer.mlp.shared_expert.up_proj.out_features == 16
    assert routers(layer) == {"mlp.shared_expert_gate"}


@pytest.mark.parametrize(
    ("model_type", "experts", "router"),
    [("phimoe", "num_local_experts", "mlp.router"), ("afmoe", "num_experts", "mlp.router.gate")],
)
def test_a_router_is_known_beside_its_experts(model_type: str, experts: str, router: str) -> None:
    layer = empty_layer(model_type, num_key_value_heads=2, **{experts: 16})
    assert layer.self_attn.k_proj.out_features == 16
    assert routers(layer) == {router}
