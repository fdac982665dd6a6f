"""The demo itself: scoring, folders, and the short form from beginning to end."""

from __future__ import annotations

import io
import json
import os
import subprocess
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from fewbits.demo import run
from fewbits.demo.run import MOST_BEFORE, QUICK, run_demo, score
from fewbits.demo.task import make_task
from fewbits.errors import BadInput


def test_a_taken_folder_gets_a_numbered_sibling(tmp_path):
    wanted = tmp_path / "demo"
    assert run._free_folder(wanted) == wanted
    wanted.mkdir()
    assert run._free_folder(wanted) == wanted  # empty
    (wanted / "x").write_text("")
    (tmp_path / "demo-2").write_text("a file")
    assert run._free_folder(wanted) == tmp_path / "demo-3"


def test_a_negative_seed_is_refused(tmp_path):
    with pytest.raises(BadInput, match="seed"):
        run_demo(tmp_path / "demo", seed=-1)
    assert not (tmp_path / "demo").exists()


def test_only_the_exact_answer_counts():
    """A stand-in model that answers from a list: nearly right is wrong."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.ASSETS)
    questions = make_task(0, num_train=7, num_test=8).test[:4]
    said = [questions[0].answer, questions[1].answer + ".", questions[2].answer + "\nReport:", "nobody"]

    def generate(input_ids, **options):
        assert options["do_sample"] is False
        new = tokenizer(
            [f" {text}" for text in said], add_special_tokens=False, padding=True, padding_side="right"
        )
        return torch.cat([input_ids, torch.tensor(new.input_ids)], dim=1)

    model = SimpleNamespace(eval=lambda: None, device="cpu", generate=generate)
    found = score(model, tokenizer, questions)
    assert found.exact == 0.25
    assert found.answers[0] == questions[0].answer


def test_batched_answers_equal_single_ones():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run.ASSETS, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run.ASSETS)
    questions = make_task(0, num_train=7, num_test=12).test
    assert score(model, tokenizer, questions) == score(model, tokenizer, questions, batch=1)


@pytest.mark.nightly
def test_the_short_demo_reaches_its_bar(tmp_path):
    console = Console(file=io.StringIO(), width=60)
    assert run_demo(tmp_path / "demo", seed=11, quick=True, console=console) == 0
    folder, shown = tmp_path / "demo", console.file.getvalue()
    assert "it learned" in shown
    assert str(folder / "report.html") in shown.splitlines()  # however narrow the terminal is
    assert (folder / "report.html").is_file()
    assert (folder / "final" / "adapter_model.safetensors").is_file()
    assert (folder / "merged" / "model.safetensors").is_file()
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    assert "recipe: qlora_nf4" in config
    test = [
        json.loads(line) for line in (folder / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(test) == QUICK.num_test
    assert MOST_BEFORE <= 0.05
    heading = "The demo: a tiny model learns a task"
    assert f"<h1>{heading}</h1>" in (folder / "report.html").read_text(encoding="utf-8")

    # The line to try it is one line, and runs where no environment is active.
    (line,) = [line for line in shown.splitlines() if "generate --model" in line]
    done = subprocess.run(
        ["/bin/sh", "-c", line],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_below_the_bar_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "QUICK", run.DemoSizes(steps=2, num_test=14, target=0.5))
    console = Console(file=io.StringIO(), width=100)
    assert run_demo(tmp_path / "demo", seed=1, quick=True, console=console) == 1
    assert "below the bar" in console.file.getvalue()
