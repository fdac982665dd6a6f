"""CI runs failed tests of builds once more, alone, and never without saying so."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / ".ci/run"


def second_run(folder: Path, written: str, *, passes: bool) -> str:
    """What CI says after a step that wrote this has failed; ``passes``: whether its second run passes."""
    text = SCRIPT.read_text(encoding="utf-8")
    function = re.search(r"^once_more\(\).*?^}\n", text, re.MULTILINE | re.DOTALL)
    assert function is not None
    (folder / "tests").write_text(written, encoding="utf-8")
    (folder / "failed").write_text("tests\n", encoding="utf-8")
    ending = text[text.index('[ -s "$logs/failed" ] && echo') :]
    script = f"""logs={folder}
    step() {{ {"true" if passes else "false"}; }}
    {function[0]}
    once_more tests .cache
    {ending}"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == (0 if passes else 1), done.stderr
    return done.stdout


def test_a_pass_at_the_second_run_is_told_by_name_at_the_end(tmp_path):
    name = "tests/fewjobs/test_runner.py::test_a_build"
    said = second_run(tmp_path, f"FAILED {name} - assert 0\n1 failed, 3 passed\n", passes=True)
    assert f"tests: {name} failed; it has one more run, alone" in said
    assert said.splitlines()[-1] == f"tests: {name} FAILED at first and passed only when run again, alone"


def test_a_failure_at_the_second_run_stays_one(tmp_path):
    said = second_run(
        tmp_path, "FAILED tests/fewjobs/test_runner.py::test_a_build - assert 0\n", passes=False
    )
    assert "failed: tests" in said and "passed only" not in said


def test_other_tests_have_no_second_run(tmp_path):
    said = second_run(tmp_path, "FAILED tests/nn/test_lora.py::test_a - assert 0\n", passes=False)
    assert "one more run" not in said
