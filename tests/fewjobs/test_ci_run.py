"""What CI says of its steps: of those that could not be tried, and of failed tests that have one more run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / ".ci/run"


def steps(folder: Path, *commands: str) -> subprocess.CompletedProcess[str]:
    """What CI says of steps with these commands, and how it ends."""
    text = SCRIPT.read_text(encoding="utf-8")
    function = re.search(r"^step\(\).*?^}\n", text, re.MULTILINE | re.DOTALL)
    assert function is not None
    lines = "\n".join(f'step step{i} 9 "{command}"; echo "$?"' for i, command in enumerate(commands))
    ending = text[text.index('[ -s "$logs/failed" ] && echo') :]
    script = f"set -uo pipefail\nlogs={folder} last=1500\n{function[0]}\n{lines}\n{ending}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20, check=False)


def test_a_step_that_could_not_be_tried_is_skipped_and_not_ok(tmp_path):
    done = steps(tmp_path, "echo 'not proved: no index reachable'; exit 77", "true")
    first, status, second, other, last = done.stdout.splitlines()
    assert (first.split()[0], first.split()[-1], status) == ("step0", "skipped", "0")
    assert (second.split()[0], second.split()[-1], other) == ("step1", "ok", "0")
    assert last == "skipped: step0, not proved: no index reachable"
    assert done.returncode == 0


def test_a_step_that_gives_no_reason_for_77_fails(tmp_path):
    done = steps(tmp_path, "exit 77", "exit 3")
    assert done.stdout.splitlines()[1::2] == ["77", "3"]
    assert done.stdout.splitlines()[-1] == "failed: step0 step1 "
    assert done.returncode == 1


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
