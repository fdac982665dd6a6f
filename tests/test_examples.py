"""The examples run as a user would run them, on a tiny model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def model_folder(tmp_path) -> Path:
    """stories260k where it is at hand, else a tiny random Llama."""
    stories = Path(__file__).parents[2] / "shared" / "data" / "models" / "stories260k"
    if stories.is_dir():
        return stories
    from tests.models.loading import save_tiny

    save_tiny(tmp_path / "base", max_position_embeddings=256)
    return tmp_path / "base"


def test_qlora(model_folder, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    import peft
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(sys, "argv", ["qlora.py", str(model_folder), str(tmp_path / "out"), "15"])
    names = runpy.run_path(str(EXAMPLES / "qlora.py"))
    losses = [row["loss"] for row in names["trainer"].state.log_history if "loss" in row]
    assert float(losses[-1]) < float(losses[0])
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "out" / "lora")
    assert adapted.peft_config["default"].r == 16
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    assert not hasattr(merged.config, "quantization_config")


def test_only_the_import_line_differs_from_an_unsloth_script():
    code = (EXAMPLES / "qlora.py").read_text().split('"""', 2)[2]
    lines = [line for line in code.splitlines() if "fewbits" in line and "assets" not in line]
    assert len(lines) == 1 and lines[0].startswith("from fewbits import FastLanguageModel")
    assert len((EXAMPLES / "qlora.py").read_text().splitlines()) <= 60


def test_the_ten_are_short_and_run_by_one_script(tmp_path, monkeypatch, capsys):
    ten = sorted(path for path in EXAMPLES.glob("*.py") if path.stem != "qlora")
    assert len(ten) == 10
    for path in ten:
        text = path.read_text()
        assert len(text.splitlines()) <= 40 and f"python examples/{path.name}" in text
    script = runpy.run_path(str(EXAMPLES.parent / "scripts" / "run_examples.py"))
    assert script["main"](["plan_memory", "preview_rows"]) == 0
    shown = capsys.readouterr().out
    assert "== plan_memory" in shown and "[" in shown and "== qlora" not in shown
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    monkeypatch.setitem(script["main"].__globals__, "EXAMPLES", tmp_path)
    assert script["main"]([]) == 1
