"""`fewbits plan`: what a model takes on a GPU, as a table and as JSON."""

from __future__ import annotations

import json

import pytest

from fewbits.bench.train.shapes import SHAPES
from fewbits.training.ahead.gpu_plan import trainable_recipes

LLAMA = SHAPES["llama-3.1-8b"]


def test_the_command(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA}))
    shown = run("plan", tmp_path, "--gpu", "rtx4090", "--batch", "1x1024", "--json")
    assert shown.code == 0, shown.err
    told = json.loads(shown.out)
    assert told["fastest"].startswith("qlora_nf4")
    found = {row["recipe"]: row for row in told["recipes"]}
    assert set(found) == set(trainable_recipes())
    row = found["qlora_nf4"]
    parts = ("weights", "lora", "gradients", "optimizer", "activations")
    assert sum(row[part] for part in parts) == row["total"] <= told["budget_bytes"]
    assert row["fits"] and not found["float8_full"]["fits"]
    text = run("plan", tmp_path, "--gpu", "rtx4090", "--batch", "1x1024").out
    assert "fastest that fits" in text and "fewbits init" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gpu", "gtx"], "there is no GPU 'gtx'"),
        (["--gpu", "h200", "--batch", "4"], "--batch is '4'; write sequences x tokens, as in 4x2048"),
        (["--gpu", "h200", "--batch", "1x900000"], "allows sequences of at most 131,072"),
        (["--gpu", "h200", "--recipe", "qlora"], "qlora"),
    ],
)
def test_bad_questions(run, tmp_path, argv, message):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA}))
    shown = run("plan", tmp_path, *argv)
    assert shown.code != 0 and message in shown.err and shown.err.count("\n") == 1


def test_a_recipe_with_a_slip_is_refused_as_training_refuses_it(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\nlinear: {weight: nf4}\nlora: {r: 8}\nskip: ['*.down_prj']\n")
    shown = run("plan", tmp_path, "--gpu", "h200", "--recipe", mine)
    assert shown.code == 1 and "the nearest is '*.down_proj'" in shown.err, shown.err


def test_a_model_of_short_sequences(run, tmp_path):
    """Who asked for no length is not told that it is too long."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 512}))
    shown = run("plan", tmp_path, "--gpu", "h200", "--recipe", "qlora_nf4")
    assert shown.code == 0 and "batch 1x512;" in shown.out and "of 512 tokens" in shown.out
    asked = run("plan", tmp_path, "--gpu", "h200", "--batch", "1x2048")
    assert asked.code == 1 and "--batch asks for sequences of 2,048 tokens" in asked.err


def test_no_model(run, tmp_path):
    shown = run("plan", tmp_path, "--gpu", "h200")
    assert shown.code != 0 and "has no config.json" in shown.err
    shown = run("plan", "nobody/has-this", "--gpu", "h200")
    assert shown.code != 0 and "nobody/has-this" in shown.err and shown.err.count("\n") == 1
