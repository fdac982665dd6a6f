"""A pattern in a recipe that names no linear is refused; one that names another family's is said."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM

from fewbits.errors import BadInput
from fewbits.models.loading.hf_quantizer import FewbitsConfig
from fewbits.models.packing.convert import convert, explain
from fewbits.models.packing.recipe_patterns import check_patterns
from fewbits.recipes import get_recipe
from tests.models.loading import save_tiny
from tests.models.mixtures import mixture
from tests.models.tiny import tiny

load = AutoModelForCausalLM.from_pretrained


def recipe(**fields: object) -> dict[str, object]:
    return {"name": "mine", "linear": {"weight": "nf4"}, **fields}


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("*.down_prj", "*.down_proj"),
        ("down_proj", "*.down_proj"),
        ("model.layers.0.mlp", "model.layers.0.mlp.*"),
        ("mlp", "*.mlp.*"),
        ("model.layers.*.mlp.downproj", "model.layers.*.mlp.down_proj"),
        ("model.layers.7.*", "model.layers"),
        ("*.Down_Proj", "*.down_proj"),
    ],
)
@pytest.mark.parametrize("field", ["overrides", "skip"])
def test_a_slip_is_refused_with_the_nearest_name(field: str, pattern: str, near: str) -> None:
    model = tiny("llama")
    said = {"overrides": {pattern: {"weight": "int8"}}, "skip": [pattern]}[field]
    with pytest.raises(BadInput, match="no linear is named") as refused:
        convert(model, recipe(**{field: said}))
    assert f"the nearest is '{near}" in str(refused.value), refused.value
    assert convert(model, recipe()).changes  # nothing was changed by the call that was refused


def test_a_pattern_of_another_family_is_told() -> None:
    model = tiny("llama")
    receipt = convert(model, recipe(skip=["*.qkv_proj"], overrides={"*.down_proj": {"weight": "int8"}}))
    assert "no linear of this model is named '*.qkv_proj', which the recipe has a rule for" in str(
        explain(model)
    )
    assert not any("down_proj" in note for note in receipt.notes)


@pytest.mark.parametrize("router", ["mlp.gate", "mlp.shared_expert_gate", "block_sparse_moe.gate"])
def test_a_router_may_be_skipped_by_a_recipe_for_several_families(router: str) -> None:
    for pattern in (f"*.{router}", f"model.layers.*.{router}"):
        receipt = convert(tiny("llama"), recipe(skip=[pattern]))
        assert any(f"is named {pattern!r}" in note for note in receipt.notes)


def test_names_that_are_there_need_no_word() -> None:
    model = mixture("qwen3_moe")
    said = {"*.experts.down_proj": {"weight": "int8"}, "*.q_proj": {"weight": "int8"}}
    receipt = convert(model, recipe(overrides=said, skip=["lm_head", "*.o_proj", "*norm"]))
    assert not any("is named" in note for note in receipt.notes)
    assert {c.after.split()[-1] for c in receipt.changes if c.name.endswith("experts.down_proj")} == {"int8"}


def test_loading_refuses_a_slip_too(tmp_path) -> None:
    save_tiny(tmp_path / "plain")
    with pytest.raises(BadInput, match=r"'\*\.down_prj'.*the nearest is '\*\.down_proj'"):
        load(tmp_path / "plain", quantization_config=FewbitsConfig(recipe(skip=["*.down_prj"])))


def test_a_slip_is_refused_by_the_configuration_alone() -> None:
    config = tiny("llama").config.to_dict()
    slip = get_recipe(recipe(overrides={"*.down_prj": {"weight": "int8"}}))
    with pytest.raises(BadInput, match=r"'\*\.down_prj'.*the nearest is '\*\.down_proj'"):
        check_patterns(config, slip)
    check_patterns({**config, "quantization_config": {"quant_method": "fewbits"}}, slip)  # packed by it
    check_patterns(config, get_recipe(recipe(skip=["*.down_proj", "*.mlp.gate"])))


def test_a_folder_that_was_packed_with_a_slip_still_loads(tmp_path) -> None:
    save_tiny(tmp_path / "plain")
    load(tmp_path / "plain", quantization_config=FewbitsConfig(recipe())).save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["recipe"]["skip"] = ["*.down_prj"]
    file.write_text(json.dumps(config))
    assert "no linear of this model is named '*.down_prj'" in str(explain(load(tmp_path / "packed")))
