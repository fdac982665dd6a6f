"""A run ends with what to do next, and each of those lines works as it stands."""

from __future__ import annotations

import shlex

import pytest

from fewbits.cli import next_steps
from tests.training.conftest import make_tiny_folder, write_tiny_data


@pytest.mark.parametrize("name", ["a run", pytest.param("run", marks=pytest.mark.slow)])
def test_every_line_works(run, tmp_path, monkeypatch, name):
    make_tiny_folder(tmp_path / "m")
    write_tiny_data(tmp_path / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        next_steps, "find_spec", lambda name: None
    )  # a byte tokenizer is none that GGUF knows
    words = ["model=m", "train_data=rows.jsonl", "max_steps=1", "device=cpu", f"output_dir={name}"]
    shown = run("train", *words)
    assert shown.code == 0, shown.err
    lines = shown.out.partition("next")[2].splitlines()
    commands = [line.strip() for line in lines if line.strip()]
    assert [shlex.split(line)[1] for line in commands] == ["generate", "eval", "merge"]
    monkeypatch.setattr("builtins.input", lambda *prompt: "/exit")
    for line in commands:
        program, *argv = shlex.split(line)
        assert program == "fewbits"
        monkeypatch.setattr("sys.stdin.readline", lambda: "", raising=False)
        done = run(*argv)
        assert done.code == 0, (line, done.err)
