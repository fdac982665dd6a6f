"""``fewbits sc`` on a small real model and on files of operands."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from fewbits.recipes.stochastic_config import read_config


@pytest.fixture(scope="module")
def operands(tmp_path_factory):
    path = tmp_path_factory.mktemp("operands") / "ab.safetensors"
    save_file({"a": torch.randn(6, 40), "b": torch.randn(4, 40)}, path)
    return path


def test_error_and_heat_map(run, operands, tmp_path):
    shown = run("sc", "error", "--operands", operands, "--length", "32", "--heatmap", tmp_path / "t.svg")
    assert shown.code == 0 and "rel. error" in shown.out and "a b^T" in shown.out
    assert (tmp_path / "t.svg").read_text().startswith("<?xml")
    plain = json.loads(run("sc", "error", "--operands", operands, "--json", "--full").out)
    assert 0 < plain["all"]["relative"] < 0.1 and plain["all"]["values"] == 24


def test_error_on_a_model(run, model, text):
    plain = json.loads(
        run("sc", "error", "--model", model, "--text", text, "--max-tokens", "60", "--layers", "*.up_proj",
            "--rows", "8", "--json").out
    )  # fmt: skip
    assert len(plain) == 6 and plain["model.layers.0.mlp.up_proj"]["mse"] > 0


def test_sweep(run, operands, tmp_path):
    rows = json.loads(
        run("sc", "sweep", "--operands", operands, "--lengths", "16,256", "--scrambles", "bitrev,off",
            "--plot", tmp_path / "s.png", "--json").out
    )  # fmt: skip
    assert [(r["length"], r["scramble"], r["halve"]) for r in rows] == [
        (16, "bitrev", True),
        (16, "off", True),
        (16, "bitrev", False),
        (256, "bitrev", False),
        (16, "off", False),
        (256, "off", False),
    ]
    assert rows[3]["mse"] < rows[2]["mse"]
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_calibrate_then_eval_and_again_from_the_ledger(run, model, text, tmp_path):
    mixed, ledger = tmp_path / "mixed.yaml", tmp_path / "eval.jsonl"
    done = run("sc", "calibrate", "--model", model, "--text", text, "--window", "64", "--max-tokens", "126",
               "--budget", "40", "--attention", "64", "--rows", "32", "--output", mixed)  # fmt: skip
    assert done.code == 0 and "cycles a product" in done.out
    assert read_config(mixed).calibration["budget"] == 40
    command = ("sc", "eval", "--model", model, "--text", text, "--window", "64", "--max-tokens", "126",
               "--lengths", "32,128", "--halve", "yes", "--settings", mixed, "--output", ledger, "--json",
               "--plot", tmp_path / "e.svg")  # fmt: skip
    rows = json.loads(run(*command).out)
    names = [row["setting"] for row in rows]
    assert names == [
        "as it is",
        "int8",
        "32 cycles, bitrev, halved",
        "128 cycles, bitrev, halved",
        str(mixed),
    ]
    perplexity = {row["setting"]: row["perplexity"] for row in rows}
    assert perplexity["as it is"] < perplexity["128 cycles, bitrev, halved"] < perplexity[names[2]]
    size = ledger.stat().st_size
    assert json.loads(run(*command).out) == rows and ledger.stat().st_size == size


@pytest.mark.slow
def test_two_processes_and_the_parts_of_a_pass(run, model, text, tmp_path):
    command = ("sc", "eval", "--model", model, "--text", text, "--window", "64", "--max-tokens", "0",
               "--lengths", "32", "--halve", "yes", "--no-baselines", "--batch-size", "2", "--attention",
               "--output", tmp_path / "eval.jsonl")  # fmt: skip
    first = run(*command, "--share", "2/2")
    assert first.code == 0 and "other processes' windows are missing" in first.out
    second = json.loads(run(*command, "--share", "1/2", "--json").out)
    shown = run(*command, "--parts").out
    assert f"{second[0]['perplexity']:.3f}" in shown and "down_proj" in shown and "attention" in shown
    assert second[0]["tokens"] > 700
    blocks = json.loads(run(*command[:-2], "--blocks", "--json").out)
    assert blocks[0]["tokens"] % 63 == 0 and 0 < second[0]["tokens"] - blocks[0]["tokens"] < 2 * 63
    for share, sentence in (("3/2", "share 3 of 2 is refused"), ("half", "--share is 'half'")):
        said = run(*command, "--share", share)
        assert said.code == 1 and sentence in said.err


@pytest.mark.parametrize(
    ("argv", "code", "sentence"),
    [
        (("error",), 2, "give either --operands, or --model and --text"),
        (("error", "--model", "here"), 2, "--model needs --text"),
        (("sweep", "--operands", "no.npz"), 1, "there is no file no.npz"),
        (("sweep", "--operands", "ab", "--lengths", "x"), 1, "--lengths 'x' is refused"),
        (("sweep", "--operands", "ab", "--scrambles", "owen"), 1, "scramble 'owen' is unknown"),
        (("sweep", "--operands", "ab", "--lengths", "16,300"), 1, "length of 300 is out of range"),
        (
            ("sweep", "--operands", "ab", "--lengths", "200", "--halve", "yes"),
            1,
            "[200] fits halved streams",
        ),
        (("error", "--operands", "AB", "--length", "300"), 1, "stoc_len=300 is refused"),
        (("error", "--operands", "AB", "--heatmap", "t.pdf"), 1, "written as .svg or .png"),
        (("eval", "--model", "m", "--text", "TEXT", "--settings", "TEXT"), 1, "no stochastic configuration"),
        (("calibrate", "--model", "m", "--text", "t", "--output", "c.txt"), 1, "neither .yaml nor .json"),
        (
            ("calibrate", "--model", "m", "--text", "t", "--output", "c.yaml", "--alpha", "2"),
            1,
            "alpha=2 is refused",
        ),
        (("eval",), 2, "required: --model, --text"),
    ],
)
def test_refused_in_one_sentence(run, operands, text, argv, code, sentence):
    words = [str({"AB": operands, "TEXT": text}.get(a, a)) for a in argv]
    shown = run("sc", *words)
    assert shown.code == code and sentence in shown.err, shown.err
    assert len(shown.err.strip().splitlines()) == 1


def test_help(run):
    assert run("sc").code == 2
    shown = run("sc", "--help").out
    assert all(name in shown for name in ("error", "sweep", "eval", "calibrate"))
    assert "fewbits sc eval --model" in run("sc", "eval", "--help").out


def test_a_bundle_of_others_there_and_back(run, model, tmp_path):
    table = {
        "stoc_len_levels": [64, 16],
        "layer_buckets": 2,
        "buckets": {"down_proj:t0:l1": {"thresholds": [0.9]}},
    }
    ops = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qk", "av")
    table["operator_defaults"] = {op: {"thresholds": [0.25]} for op in ops}
    wrapper = {"type": "AdaptiveMPConfig", "stoc_len_levels": [64, 16], "threshold_table_path": "t.json"}
    (tmp_path / "t.json").write_text(json.dumps(table))
    (tmp_path / "w.json").write_text(json.dumps(wrapper))
    read = ("sc", "bundle", "--wrapper", tmp_path / "w.json", "--model", model)
    assert run(*read, "--output", tmp_path / "one.yaml").code == 0
    written = run("sc", "bundle", "--settings", tmp_path / "one.yaml", "--model", model,
                  "--output", tmp_path / "bundle", "--json")  # fmt: skip
    files = json.loads(written.out)["written"]
    assert (
        run("sc", "bundle", "--wrapper", files[0], "--model", model, "--output", tmp_path / "two.yaml").code
        == 0
    )
    one, two = read_config(tmp_path / "one.yaml"), read_config(tmp_path / "two.yaml")
    for i in range(5):
        name = f"model.layers.{i}.mlp.down_proj"
        assert one.linear(name) == two.linear(name) and one.linear(name).classify == "call"
        assert one.linear(name).thresholds == ((0.9,) if i >= 2 else (0.25,))
    said = run("sc", "bundle", "--output", "x.yaml")
    assert said.code == 2 and "give either --wrapper" in said.err
    said = run(*read[:4], "--output", tmp_path / "x.yaml")
    assert said.code == 1 and "give num_layers (--layers)" in said.err
    (tmp_path / "story.txt").write_text("Once there was a cat that sat on a mat. " * 9)
    words = ["--no-baselines", "--lengths", "16", "--halve", "yes", "--window", "32", "--max-tokens", "60"]
    text = ("--text", tmp_path / "story.txt", "--settings", tmp_path / "one.yaml")
    told = ("sc", "eval", "--model", model, *text, *words)
    assert "rows' lengths depend on the other rows of a call, here 4 windows" in run(*told).out
    assert "rows' lengths depend" not in run(*told, "--batch-size", "1").out
    said = run("sc", "eval", "--model", model, "--text", tmp_path / "w.json", "--settings", "32")
    assert said.code == 1 and "there is none called 32; write --lengths 32" in said.err


def test_arithmetics_side_by_side(run, operands, tmp_path):
    words = (
        "gate=and,flip_rate=0.01",
        "signs=twos_complement",
        "or_group=4,gate=and,scramble=cells",
        "plain",
    )
    sweep = ["sc", "sweep", "--operands", operands, "--lengths", "32,128", "--scrambles", "bitrev"]
    for word in words:
        sweep += ["--arithmetic", word]
    rows = json.loads(run(*sweep, "--halve", "yes", "--plot", tmp_path / "a.svg", "--json").out)
    assert len(rows) == 8 and len({row["mse"] for row in rows}) == 8
    assert [row["arithmetic"] for row in rows[::2]] == [
        "gate=and,flip_rate=0.01",
        "signs=twos_complement",
        "gate=and,or_group=4,scramble=cells",
        "plain",
    ]
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    error = ["sc", "error", "--operands", operands, "--arithmetic", "signs=twos_complement"]
    shown = run(*error, "--length", "32", "--heatmap", tmp_path / "h.svg")
    assert shown.code == 0 and (tmp_path / "h.svg").read_text().startswith("<?xml")
    shown = run(*error, "--arithmetic", "plain")
    assert shown.code == 1 and "--arithmetic is given more than once" in " ".join(shown.err.split())


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("gates=and", "'gates' is no field of it; write 'plain', or NAME=VALUE"),
        ("flip_rate=much", "flip_rate is 'much'; give a number"),
        ("flip_rate=2", "flip_rate=2.0 is refused: give the share of inverted bits, from 0 to 1"),
        ("or_group=3", "or_group=3 does not divide the 40 inner dimensions"),
        ("planned_len=16", "fits streams of 8 bits planned for 16 steps"),
    ],
)
def test_arithmetics_that_are_none(run, operands, word, sentence):
    shown = run("sc", "sweep", "--operands", operands, "--lengths", "32", "--arithmetic", word)
    assert shown.code == 1 and sentence in " ".join(shown.err.split())


def test_a_model_is_evaluated_in_another_arithmetic(run, model, text):
    command = ["sc", "eval", "--model", model, "--text", text, "--max-tokens", "60", "--lengths", "64"]
    command += ["--halve", "yes", "--no-baselines", "--arithmetic", "plain", "--arithmetic", "gate=and"]
    rows = json.loads(run(*command, "--json").out)
    assert [row["setting"] for row in rows] == [
        "64 cycles, bitrev, halved",
        "64 cycles, bitrev, halved, gate=and",
    ]
    assert rows[0]["nll"] != rows[1]["nll"]
