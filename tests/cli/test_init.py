"""`fewbits init`, `recipes` and `models`: what is written runs, what is listed is there."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fewbits.cli import init, listings
from fewbits.formats import E4M3, STOCHASTIC
from fewbits.recipes import CATALOG, Recipe, Rule, qlora_nf4
from fewbits.training.config import METHODS, REWARDED, TrainConfig

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d", "label": True}


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(PAIR) + "\n")
    return path


@pytest.mark.parametrize("method", METHODS)
def test_what_flags_say_is_written_and_read_back(run, tmp_path, rows, method):
    path = tmp_path / "c.yaml"
    rewards = ["--rewards", "my_rewards:length"] if method in REWARDED else []
    shown = run(
        "init", path, "--model", "models/m", "--train-data", rows, "--method", method,
        "--recipe", "lora_bf16", "--output-dir", tmp_path / "out put", "--yes", *rewards,
    )  # fmt: skip
    assert shown.code == 0, shown.err
    config = TrainConfig.from_yaml(path)
    assert (config.model, config.method, config.recipe) == ("models/m", method, "lora_bf16")
    assert config.output_dir == str(tmp_path / "out put")
    text = path.read_text()
    assert f"fewbits train {path}" in shown.out
    assert "# learning_rate: 0.0002" in text and "prompt, chosen, rejected" in text
    usual = tuple(f"# {key}: " for key in init._USUAL)
    lines = [line[2:] if line.startswith(usual) else line for line in text.splitlines()]
    uncommented = "\n".join(lines)
    (tmp_path / "all.yaml").write_text(uncommented)
    assert TrainConfig.from_yaml(tmp_path / "all.yaml") == config  # the comments say what holds


def test_the_file_that_was_written_trains(run, tmp_path, monkeypatch):
    from tests.training.conftest import make_tiny_folder, write_tiny_data

    make_tiny_folder(tmp_path / "m")
    write_tiny_data(tmp_path / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    shown = run("init", "--model", "m", "--train-data", "rows.jsonl", "--yes", "--output-dir", "out")
    assert shown.code == 0, shown.err
    assert run("train", "fewbits.yaml", "max_steps=1", "--device", "cpu").code == 0
    assert (tmp_path / "out" / "final").is_dir()


def test_what_is_left_open_is_asked(run, tmp_path, rows, monkeypatch):
    asked = {}

    def answer(text, *, choices, default, **rest):
        asked[text] = choices, default
        return "models/m" if "model" in text else str(rows) if "data" in text else default

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(init.Prompt, "ask", answer)
    assert run("init", tmp_path / "c.yaml", "--method", "dpo").code == 0
    assert len(asked) == 4
    choices, default = next(value for text, value in asked.items() if "bits" in text)
    assert default == "qlora_nf4" and set(choices) < set(CATALOG) and "int8" not in choices
    assert TrainConfig.from_yaml(tmp_path / "c.yaml").method == "dpo"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--train-data", "{rows}"], "--model is missing; give it, as in --model PATH."),
        (["--model", "m", "--train-data", "none.jsonl"], "there is no data file none.jsonl"),
        (["--model", "m", "--train-data", "{rows}", "--method", "dop"], "method is 'dop'; it must be one of"),
        (["--model", "m", "--train-data", "{rows}", "--method", "grpo"], "needs reward functions"),
        (
            ["--model", "m", "--train-data", "{texts}", "--method", "dpo"],
            "dpo needs prompt, chosen",
        ),
        (["--model", "m", "--train-data", "{odd}"], "name your columns with fields"),
        (["--model", "m", "--train-data", "{rows}", "--recipe", "nf44"], "no recipe named 'nf44'"),
        (
            ["--model", "m", "--train-data", "{rows}", "--rewards", "a:b"],
            "rewards are for methods grpo and rloo",
        ),
    ],
)
def test_bad_answers_write_nothing(run, tmp_path, rows, argv, message):
    for name, row in (("texts", {"text": "a"}), ("odd", {"body": "a"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    places = {name: tmp_path / f"{name}.jsonl" for name in ("rows", "texts", "odd")}
    shown = run("init", tmp_path / "c.yaml", "--yes", *(a.format(**places) for a in argv))
    assert shown.code != 0 and message in shown.err and shown.err.count("\n") == 1
    assert not (tmp_path / "c.yaml").exists()


def test_to_standard_output_goes_the_configuration_alone(run, tmp_path, rows, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--model", "models/m", "--train-data", rows, "--yes"]
    shown = run("init", "-", *flags)
    assert shown.code == 0 and not shown.err and not (tmp_path / "-").exists()
    assert run("init", "c.yaml", *flags).code == 0
    assert shown.out == (tmp_path / "c.yaml").read_text()


def test_a_file_that_is_there_stays(run, tmp_path, rows):
    path = tmp_path / "c.yaml"
    path.write_text("mine")
    flags = ["init", path, "--model", "m", "--train-data", rows, "--yes"]
    shown = run(*flags)
    assert shown.code != 0 and "--overwrite" in shown.err and path.read_text() == "mine"
    assert run(*flags, "--overwrite").code == 0


def test_recipes_are_those_of_the_catalog(run, monkeypatch):
    def mine():
        """A recipe of my own. Nobody else's."""
        return replace(qlora_nf4(), name="mine")

    monkeypatch.setitem(CATALOG, "mine", mine)
    facts = {one["name"]: one for one in json.loads(run("recipes", "--json").out)}
    assert set(facts) == set(CATALOG)
    assert facts["mine"]["what"] == "A recipe of my own"
    assert facts["mine"]["bits"] == facts["qlora_nf4"]["bits"] == pytest.approx(4.127, abs=0.01)
    assert facts["lora_bf16"]["bits"] == 16 and facts["int8"]["trains"] == "nothing"
    assert facts["qlora_nf4_fp8"]["runs_on"].startswith("GPU from 8.9")
    assert facts["float8_full"]["trains"] == "all weights"
    shown = run("recipes").out
    assert all(name in shown for name in CATALOG)


def test_products_and_units_are_read_from_formats_and_not_from_their_names(monkeypatch):
    def streams():
        """Streams by another name."""
        return Recipe(name="streams", linear=Rule(weight=replace(STOCHASTIC, name="other")))

    def eight():
        """8 bits by another name."""
        return Recipe(name="eight", linear=Rule(activation=replace(E4M3, name="other")))

    for make in (streams, eight):
        monkeypatch.setitem(CATALOG, make.__name__, make)
    facts = {one.name: one for one in listings.recipe_facts()}
    assert facts["streams"].products == "stochastic"
    assert facts["eight"].runs_on.startswith("GPU from 8.9")


def test_families_are_tried(run, monkeypatch, tmp_path):
    from fewbits.families import catalog, registry
    from fewbits.families.spec import Attention
    from tests.models.loading import save_tiny

    save_tiny(tmp_path / "folder", "qwen3")
    shown = run("models", tmp_path / "folder", "olmo2", "mixtral", "granite", "--json")
    assert shown.code == 0, shown.err
    found = {one["model_type"]: one for one in json.loads(shown.out)}
    assert found["qwen3"]["outcome"] == "fused" and "q_proj" in found["qwen3"]["linears"]
    # as its published models are, though the default of its configuration is a multiplier of 1
    assert found["granite"]["outcome"] == "unfused"
    assert "multiplied by residual_multiplier" in found["granite"]["reason"]
    (smollm3,) = json.loads(run("models", "smollm3", "--json").out)
    assert smollm3["outcome"] == "fused" and "not turned by their positions" in smollm3["reason"]
    # a family is fused because its layers compute the same, not because a list says so
    scores = Attention(multiplier="attention_multiplier")
    wrong = replace(catalog.LLAMA, model_type="granite", attention=scores)
    monkeypatch.setitem(registry._REGISTERED, "granite", wrong)
    (again,) = json.loads(run("models", "granite", "--json").out)
    assert again["has_spec"] and again["outcome"] == "unfused" and "differs" in again["reason"]
    assert "model_type" in run("models", "olmo2").out or "olmo2" in run("models", "olmo2").out


def test_families_nobody_has(run, tmp_path):
    shown = run("models", "gtp2")
    assert shown.code != 0 and "no causal decoder 'gtp2'" in shown.err
    assert "config.json" in run("models", tmp_path).err


def test_bits_count_the_scales():
    assert listings.recipe_facts()[0].bits > 4


def test_a_recipe_is_told_by_one_whole_sentence():
    for facts in listings.recipe_facts():
        assert 30 < len(facts.what) < 130 and facts.what.count("(") == facts.what.count(")"), facts
        assert not facts.what.endswith(("et al", "e.g", "i.e")), facts
