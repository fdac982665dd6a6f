"""The examples run as a user would run them, on a tiny model."""

from __future__ import annotations

import runpy
import subprocess
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
    monkeypatch.setattr(sys, "argv", ["qlora.py", str(model_folder), str(tmp_path / "out"), "1"])
    before = (tmp_path / "out" / "merged" / "model.safetensors").read_bytes()
    runpy.run_path(str(EXAMPLES / "qlora.py"))  # again in the same folder, as people do
    assert (tmp_path / "out" / "merged" / "model.safetensors").read_bytes() != before


def test_only_the_import_line_differs_from_an_unsloth_script():
    code = (EXAMPLES / "qlora.py").read_text().split('"""', 2)[2]
    lines = [line for line in code.splitlines() if "fewbits" in line and "assets" not in line]
    assert len(lines) == 1 and lines[0].startswith("from fewbits import FastLanguageModel")
    assert len((EXAMPLES / "qlora.py").read_text().splitlines()) <= 60


def test_the_eleven_are_short_and_run_by_one_script(tmp_path, monkeypatch, capsys):
    eleven = sorted(path for path in EXAMPLES.glob("*.py") if path.stem != "qlora")
    assert len(eleven) == 11
    for path in eleven:
        text = path.read_text()
        assert len(text.splitlines()) <= 40 and f"python examples/{path.name}" in text
    script = runpy.run_path(str(EXAMPLES.parent / "scripts" / "run_examples.py"))
    assert script["main"](["plan_memory", "preview_rows"]) == 0
    shown = capsys.readouterr().out
    assert "== plan_memory" in shown and "[" in shown and "== qlora" not in shown
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    monkeypatch.setitem(script["main"].__globals__, "EXAMPLES", tmp_path)
    assert script["main"]([]) == 1


def test_users_scripts_that_fail_or_hang_or_are_absent_are_told(tmp_path):
    scripts = {
        "good": "import os, sys; print(os.listdir(), os.environ['HF_HUB_OFFLINE'], __name__)",
        "wrong": "print('before'); assert 1 == 2, 'one is not two'",
        "hangs": "import time; time.sleep(60)",
        "leaves": "raise SystemExit(3)",
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    code = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES.parent / 'scripts')!r})\n"
        "import run_users\nrun_users.LIBRARIES.clear()\nrun_users.LIMIT_S = 3\n"
        "sys.exit(run_users.main(sys.argv[1], sys.argv[2:]))"
    )

    def ran(*names: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", code, str(tmp_path), *names]
        return subprocess.run(words, capture_output=True, text=True, timeout=60)

    done = ran("good")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["good", "ok"] and "[] 1 __main__" in done.stdout
    done = ran("wrong", "hangs", "leaves", "absent")
    assert done.returncode == 1
    assert [line.split()[1] for line in done.stdout.splitlines() if line.split()[0] in scripts] == [
        "FAILED"
    ] * 3
    assert "one is not two" in done.stdout and "absent: there is no" in done.stdout
