"""What "all-linear" means of experts: one rule for all families, which PEFT's users know, and said."""

from __future__ import annotations

import re
import warnings

import peft
import pytest

import fewbits
from tests.models.mixtures import MIXTURES, mixture

NOT_LINEARS = ("gpt_oss", "granitemoe")


def adapted(model) -> set[str]:
    """Where adapters are, layers' numbers left out, attention and routers too."""
    names = (n.split(".lora_A")[0] for n, _ in model.named_parameters() if "lora_A" in n)
    places = {re.sub(r".*layers\.\d+\.", "", n).replace(".base_layer", "") for n in names}
    return {place for place in places if "self_attn" not in place and not re.search(r"(router|gate)$", place)}


@pytest.mark.parametrize("kind", MIXTURES)
def test_it_means_routed_experts_where_an_expert_is_linears_as_in_peft(kind):
    plain = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = adapted(peft.get_peft_model(mixture(kind), plain))
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        by_config = adapted(fewbits.get_peft_model(mixture(kind), config))
        packed = mixture(kind)
        fewbits.convert(packed, "qlora_nf4")
        model = fewbits.get_peft_model(packed, r=4)
    ours = adapted(model)
    assert any("experts" in place.split(".") for place in ours) == (kind not in NOT_LINEARS)
    assert by_config == ours
    if kind == "qwen2_moe":  # PEFT moves no names there; we take its experts as those of its relatives
        theirs = theirs - {"mlp.shared_expert_gate"} | {"mlp.experts"}
    assert ours == theirs
    told = next((line for line in str(fewbits.explain(model)).splitlines() if "all-linear" in line), "")
    assert ("leaves out the routed experts" in told) == (kind in NOT_LINEARS)
    assert ("means the routed experts too" in told) == (kind not in NOT_LINEARS)


def test_one_configuration_serves_several_models():
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    before = config.to_dict()
    for kind in ("mixtral", "gpt_oss", "qwen2_moe", "mixtral"):
        model = fewbits.get_peft_model(mixture(kind), config)
        assert adapted(model) == adapted(fewbits.get_peft_model(mixture(kind), r=4))
    assert config.to_dict() == before


def test_names_of_the_attention_leave_experts_out_and_nothing_is_said():
    model = mixture("mixtral")
    model = fewbits.get_peft_model(model, r=4, target_modules=["q_proj", "v_proj"])
    assert not adapted(model)
    assert "all-linear" not in str(fewbits.explain(model))


def test_names_that_shared_experts_have_too_adapt_both():
    model = fewbits.get_peft_model(mixture("qwen2_moe"), r=4, target_modules=["gate_proj", "up_proj"])
    assert adapted(model) == {
        *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "experts")),
        *(f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj")),
    }


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_the_adapter_is_pefts_both_ways(kind, tmp_path):
    import torch

    model = fewbits.get_peft_model(mixture(kind), r=4)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    ids = torch.randint(5, 60, (2, 9))
    model.save_pretrained(tmp_path)
    theirs = peft.PeftModel.from_pretrained(mixture(kind), tmp_path)
    ours = fewbits.load_adapter(mixture(kind), tmp_path)
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        torch.testing.assert_close(theirs.eval()(input_ids=ids).logits, expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(ours.eval()(input_ids=ids).logits, expected, rtol=1e-3, atol=1e-3)
        plain = mixture(kind)(input_ids=ids).logits
    assert (expected - plain).abs().max() > 0.05


def layers_with(model) -> set[str]:
    names = [name for name, _ in model.named_parameters() if "lora_A" in name]
    return {found.group(1) for name in names if (found := re.search(r"layers\.(\d+)\.mlp\.experts", name))}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "gate_proj", "up_proj", "down_proj"]])
def test_layers_to_transform_holds_for_experts_saved_loaded_and_merged(kind, targets, tmp_path):
    import torch

    model = fewbits.get_peft_model(mixture(kind), r=4, target_modules=targets, layers_to_transform=[1])
    assert layers_with(model) == {"1"} and adapted(model) == {"mlp.experts"}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    ids = torch.randint(5, 60, (2, 9))
    model.save_pretrained(tmp_path)
    theirs = peft.PeftModel.from_pretrained(mixture(kind), tmp_path)
    ours = fewbits.load_adapter(mixture(kind), tmp_path)
    assert layers_with(theirs) == layers_with(ours) == {"1"}
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        for other in (theirs.eval(), ours.eval(), model.merge_and_unload()):
            torch.testing.assert_close(other(input_ids=ids).logits, expected, rtol=1e-3, atol=1e-3)
        assert (expected - mixture(kind)(input_ids=ids).logits).abs().max() > 0.02


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("excluded", [["experts"], ".*experts.*", r".*\.layers\.\d+\.mlp\.experts"])
def test_excluded_experts_have_no_adapters_and_then_dropout_is_taken(kind, excluded):
    config = peft.LoraConfig(r=4, target_modules="all-linear", exclude_modules=excluded, lora_dropout=0.1)
    for model in (
        fewbits.get_peft_model(mixture(kind), config),
        fewbits.FastLanguageModel.get_peft_model(mixture(kind), r=4, exclude_modules=excluded),
    ):
        assert not layers_with(model)
        names = {n.split(".")[-4] for n, _ in model.named_parameters() if "lora_A" in n}
        assert names >= {"q_proj", "k_proj", "v_proj", "o_proj"}
        assert ("gate_proj" in names) == (kind == "qwen2_moe")  # of dense layers and shared experts
        assert "means the routed experts" not in str(fewbits.explain(model))


def test_one_weight_of_the_experts_may_be_excluded():
    model = fewbits.get_peft_model(mixture("mixtral"), r=4, exclude_modules=["down_proj"])
    assert set(model.peft_config["default"].target_parameters) == {"mlp.experts.gate_up_proj"}


@pytest.mark.parametrize(
    "settings",
    [
        *({"init_lora_weights": name} for name in ("orthogonal", "pissa", "olora", "loftq", "eva", "corda")),
        {"use_dora": True},
        {"lora_dropout": 0.1},
    ],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_what_an_adapter_on_experts_cannot_do_is_said_with_a_way_out(settings, is_packed):
    model = mixture("mixtral")
    if is_packed:
        fewbits.convert(model, "qlora_nf4")
    said = r'adapters? on experts .*leave the experts out with exclude_modules=\["experts"\]'
    with pytest.raises(fewbits.errors.Unsupported, match=said):
        fewbits.get_peft_model(model, r=4, **settings)
