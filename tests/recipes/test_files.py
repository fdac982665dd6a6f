"""A recipe is data at every door: a name, a mapping, a text of YAML or JSON, a file, a value of Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fewbits.errors import BadInput
from fewbits.formats import NF4
from fewbits.models.packing.convert import convert
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import CATALOG, LoRA, Recipe, Rule, get_recipe, recipe_to_config
from fewbits.training.config import TrainConfig
from tests.models.tiny import tiny

MINE = {
    "name": "mine",
    "linear": {"weight": {"name": "nf4", "block": 32}},
    "overrides": {"*.down_proj": {"weight": "int8"}},
    "lora": {"r": 4, "alpha": 8},
}


@pytest.fixture(params=["mine.yaml", "mine.yml", "mine.json"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = tmp_path / request.param
    text = json.dumps(MINE) if path.suffix == ".json" else yaml.safe_dump(MINE)
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_door_gives_the_same_recipe(written: str) -> None:
    recipe = get_recipe(MINE)
    assert get_recipe(written) == recipe
    assert get_recipe(json.dumps(MINE)) == recipe
    assert get_recipe(recipe) is recipe
    assert get_recipe(recipe_to_config(recipe)) == recipe
    for name, make in CATALOG.items():
        assert get_recipe(yaml.safe_load(yaml.safe_dump(recipe_to_config(get_recipe(name))))) == make()


def test_a_file_puts_its_formats_into_a_model(written: str) -> None:
    model = tiny("llama")
    convert(model, written)
    layer = model.model.layers[0]
    for linear, name in ((layer.mlp.up_proj, "nf4"), (layer.mlp.down_proj, "int8")):
        assert isinstance(linear, QuantizedLinear) and linear.format.name == name
    assert layer.mlp.up_proj.format.contract.block == (1, 32)


def test_a_run_keeps_what_stood_in_the_file(written: str, tmp_path: Path) -> None:
    settings = {"model": "m", "train_data": "d", "output_dir": "o"}
    config = TrainConfig.from_mapping({**settings, "recipe": written})
    Path(written).write_text("name: qlora_nf4", encoding="utf-8")
    assert config.recipe == MINE and get_recipe(config.recipe) == get_recipe(MINE)
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump({**settings, "recipe": MINE}), encoding="utf-8")
    assert TrainConfig.from_yaml(run) == config
    value = Recipe(name="r", linear=Rule(weight=NF4), lora=LoRA(r=2))
    assert get_recipe(TrainConfig.from_mapping({**settings, "recipe": value}).recipe) == value


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("nowhere.yaml", "the recipe nowhere.yaml cannot be read"),
        ("{name: qlora_nf4", "is not valid YAML"),
        ("qlora_nf5", "no recipe named 'qlora_nf5'.*or name a YAML or JSON file"),
        ({"name": "x", "linear": {"weight": {"name": "nf4", "block": "64"}}}, "block='64'"),
        ({"name": "x", "linear": {"weight": {"name": "nf4", "block": -1}}}, "block=-1"),
        ({"name": "x", "linear": {"weight": {"name": "nf4", "values": [1, 2]}}}, "a table has 2 entries"),
        ({"name": "x", "linear": {"weight": {"name": "int4_g64", "block": [1]}}}, "it is rows and columns"),
        ({"name": "x", "linear": {"weight": {"name": "int4_g64", "bits": 99}}}, "bits is 99"),
        ({"name": "x", "linear": {"weight": {"name": "mxfp4", "element": "e9m9"}}}, "element is 'e9m9'"),
        ({"name": "x", "linear": {"weight": {"name": "gguf_q4_0", "kind": "Q9"}}}, "kind is 'Q9'"),
        ({"name": "x", "linear": {"weight": {"name": "float8_e4m3", "kind": "e8"}}}, "kind is 'e8'"),
        ({"name": "x", "overrides": {3: {"weight": "nf4"}}}, "maps patterns to rules"),
        ({"name": "qlora_nf4", "lora": {"alpha": float("nan")}}, "recipe's lora is nan; it must be a number"),
        ({"name": "qlora_nf4", "lora": {"bias": "sometimes"}}, "'bias' of a recipe's lora"),
    ],
    ids=str,
)
def test_what_is_no_recipe_is_refused_in_one_sentence(recipe: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        get_recipe(recipe)


def test_a_run_says_which_file_is_not_there() -> None:
    with pytest.raises(BadInput, match=r"the recipe nowhere[.]yaml cannot be read"):
        TrainConfig.from_mapping({"model": "m", "train_data": "d", "recipe": "nowhere.yaml"})


def test_a_file_without_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- qlora_nf4", encoding="utf-8")
    with pytest.raises(BadInput, match="holds list; write a mapping"):
        get_recipe(str(path))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="is not UTF-8 text"):
        get_recipe(str(path))
