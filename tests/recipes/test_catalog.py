"""Recipes: plain data both ways, refusals, predicted memory."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from fewbits.errors import BadInput
from fewbits.formats import INT8, NF4, NF4_DQ
from fewbits.formats.kv_cache import KVCache
from fewbits.recipes import (
    CATALOG,
    QAT,
    LoRA,
    Recipe,
    Rule,
    get_recipe,
    qlora_nf4,
    recipe_from_config,
    recipe_to_config,
)


@pytest.mark.parametrize("name", CATALOG)
def test_plain_data_both_ways(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.name == name
    plain = recipe_to_config(recipe)
    assert recipe_from_config(json.loads(json.dumps(plain))) == recipe
    assert recipe_from_config(yaml.safe_load(yaml.safe_dump(plain))) == recipe
    assert get_recipe(recipe) is recipe
    assert get_recipe({"name": name}) == recipe


def test_everything_set_goes_both_ways() -> None:
    recipe = Recipe(
        name="mine",
        linear=Rule(weight=replace(NF4_DQ, block=128), activation=INT8),
        overrides=(("*.o_proj", Rule(weight=NF4)), ("*.down_proj", Rule())),
        skip=("lm_head", "model.layers.0.*"),
        lora=LoRA(r=4, alpha=8.0, targets=("q_proj", "v_proj"), rslora=True),
        qat=QAT(weight=NF4, activation=INT8),
        kv_cache=KVCache(keys="int8", values="int4", newest=32),
        communication=replace(INT8, block=(1, 256)),
    )
    plain = recipe_to_config(recipe)
    assert recipe_from_config(json.loads(json.dumps(plain))) == recipe
    assert recipe_from_config(yaml.safe_load(yaml.safe_dump(plain))) == recipe


def test_a_catalog_name_supplies_what_is_left_out() -> None:
    recipe = get_recipe(
        {"name": "qlora_nf4", "lora": {"r": 64}, "linear": {"weight": {"name": "nf4", "block": 128}}}
    )
    assert recipe == replace(
        qlora_nf4(), lora=replace(LoRA(), r=64), linear=Rule(weight=replace(NF4, block=128))
    )
    assert get_recipe({"name": "qlora_nf4", "lora": None}).lora is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("qlora_nf5", "no recipe named 'qlora_nf5'; known: qlora_nf4"),
        ({"linear": {}}, "needs a field 'name'"),
        ({"name": "x", "linaer": {}}, "no field linaer"),
        ({"name": "x", "linear": {"wieght": "nf4"}}, "no field wieght"),
        ({"name": "x", "linear": {"weight": "nf5"}}, "no number format named 'nf5'"),
        ({"name": "x", "linear": 4}, "'linear' of a recipe is 4; give a format's name or a mapping"),
        ({"name": "x", "lora": 4}, "'lora' of a recipe is 4; give a mapping of its fields"),
        (
            {"name": "x", "overrides": {"*.q": 4}},
            r"'overrides, \*\.q' of a recipe is 4; give a format's name or",
        ),
        (
            {"name": "x", "overrides": {"*.q": {"wieght": 4}}},
            r"'overrides, \*\.q' of a recipe has no field wieght",
        ),
        (
            {"name": "x", "overrides": {"*.q": "nf5"}},
            r"'overrides, \*\.q\.weight' of a recipe: no number format",
        ),
        ({"name": "x", "communication": "nf5"}, "'communication' of a recipe: no number format named 'nf5'"),
        ({"name": "x", "qat": {"weight": "nf5"}}, "'qat.weight' of a recipe: no number format named 'nf5'"),
        ({"name": "x", "head": "nf5"}, "no number format named 'nf5'"),
        ({"name": "x", "qat": {}}, "has no 'weight'; give"),
        (3, "3 is not a recipe; give a name"),
        ({"name": "x", "kv_cache": "int5"}, "no key/value cache in 'int5'; known: bfloat16, fp8, int8, int4"),
        (
            {"name": "x", "kv_cache": {"keys": "int8", "sinks": 4}},
            "cache has no field sinks; its fields",
        ),
        ({"name": "x", "kv_cache": {"group": 48}}, "group=48 of a key/value cache is not possible"),
    ],
)
def test_refusals(config, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        get_recipe(config)


def test_a_formats_name_alone_is_the_weights() -> None:
    fields = {"linear": "nf4", "head": "int8", "overrides": {"*.down_proj": "int8", "*.o_proj": {}}}
    recipe = get_recipe({"name": "mine", **fields})
    assert (recipe.linear, recipe.head) == (Rule(weight=NF4), Rule(weight=INT8))
    assert recipe.overrides == (("*.down_proj", Rule(weight=INT8)), ("*.o_proj", Rule()))


def test_rules_in_order() -> None:
    recipe = Recipe(
        name="mine", linear=Rule(weight=NF4), overrides=(("*.o_proj", Rule(weight=INT8)),), skip=("*.1.*",)
    )
    assert recipe.rule_for("model.layers.0.self_attn.q_proj").weight == NF4
    assert recipe.rule_for("model.layers.0.self_attn.o_proj").weight == INT8
    assert recipe.rule_for("model.layers.1.self_attn.o_proj").is_plain
