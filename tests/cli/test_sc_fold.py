"""``fewbits sc fold``: an ordinary model that is exactly the same and loses less in streams; refusals."""

from __future__ import annotations

import json

import pytest
import torch


def test_a_model_of_other_weights_that_computes_the_same(run, model, tmp_path):
    from transformers import AutoModelForCausalLM

    folded = tmp_path / "folded"
    done = run("sc", "fold", "--model", model, "--output", folded, "--seed", "1", "--json")
    figures = json.loads(done.out)
    assert figures["folded"] == ["values", "residual"] and figures["moved"] < 1e-3
    again = run("sc", "fold", "--model", model, "--output", folded)
    assert again.code == 1 and "folded exists and is not empty" in " ".join(again.err.split())
    plain, other = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, folded))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(other(ids).logits, plain(ids).logits, rtol=1e-3, atol=1e-3)
    ours, theirs = (m.model.layers[0].mlp.up_proj.weight for m in (other, plain))
    assert (ours - theirs).abs().max() > 0.01


@pytest.mark.slow
def test_scales_are_chosen_by_a_text(run, model, text, tmp_path):
    words = ("--parts", "scales", "--text", text, "--window", "32", "--max-tokens", "31", "--powers-of-two")
    shown = run("sc", "fold", "--model", model, "--output", tmp_path / "folded", *words, "--length", "16")
    assert "moved by at most 0 (float32)" in shown.out
    before, after = (
        float(shown.out.partition(word)[0].split()[-1]) for word in (" before its", " with them")
    )
    assert after < before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--parts", "value"), "--parts 'value' is refused: choose from scales, values, residual"),
        (("--parts", "scales"), "chosen by a text; add --text"),
        (("--length", "16"), "are for scales; add scales to --parts"),
    ],
)
def test_refused_in_one_sentence(run, model, tmp_path, words, sentence):
    said = run("sc", "fold", "--model", model, "--output", tmp_path / "x", *words)
    assert said.code == 1 and sentence in " ".join(said.err.split()) and not (tmp_path / "x").exists()


def test_a_folder_in_streams_is_no_original(run, model, text, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fewbits import convert

    prepared = AutoModelForCausalLM.from_pretrained(model)
    convert(prepared, "stochastic")
    prepared.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    for command in (("eval", "--text", text), ("fold", "--output", tmp_path / "x")):
        said = run("sc", command[0], "--model", tmp_path, *command[1:])
        assert said.code == 1 and "give the folder of the original model" in " ".join(said.err.split())


def test_tasks_are_refused_in_a_sentence(run, model, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    said = run("sc", "tasks", "--model", model, "--tasks", "piqa", "--settings", "32", "--attention")
    assert said.code == 1 and "tasks need lm-eval" in said.err
    said = run("sc", "tasks", "--model", model, "--tasks", "piqa", "--attention")
    assert said.code == 1 and "--attention goes with a stream length" in said.err


def test_tasks_show_their_receipt(run, model, monkeypatch):
    from fewbits.inference import harness
    from fewbits.inference.stochastic import tasks

    def one_pass(model, tokenizer, names, **_):
        ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
        return {name: {"acc": float(model(ids).logits.std())} for name in names}

    monkeypatch.setattr(tasks.tasks_under, "__defaults__", (one_pass,))
    assert harness.run_tasks is not one_pass
    words = ("--tasks", "one,two", "--settings", "32", "--settings", "64", "--attention", "--json")
    rows = json.loads(run("sc", "tasks", "--model", model, *words).out)
    assert [row["setting"] for row in rows] == ["32 cycles", "64 cycles"]
    assert rows[0]["receipt"].startswith("35 linears and 5 attentions ran in streams")
    assert rows[0]["figures"].keys() == {"one", "two"}
    shown = run("sc", "tasks", "--model", model, "--tasks", "one").out
    assert "nothing ran in streams or INT8 codes" in shown
