"""Runs every test marked `interpret` under Triton's interpreter, in a process of its own.

Triton comes with torch, and not every Triton interprets with every numpy (interpreter_probe.py says which).
Where a small kernel that does nothing of ours cannot be interpreted, the tests are skipped, and say so; with
the versions of constraints-cpu.txt, which CI installs, that is a failure.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROBE = Path(__file__).with_name("interpreter_probe.py")
CONSTRAINTS = Path(__file__).parents[2] / "constraints-cpu.txt"


def interpreted(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=Path(__file__).parent, env=env, capture_output=True, text=True)


def pinned() -> bool:
    """Are Triton and numpy those of the constraints?"""
    text = CONSTRAINTS.read_text(encoding="utf-8")
    wanted = dict(re.findall(r"^(triton|numpy)\S*[=<]=(\S+)$", text, re.MULTILINE))
    assert wanted.keys() == {"triton", "numpy"}
    return wanted == {name: version(name) for name in wanted}


def excuse(probe: subprocess.CompletedProcess[str], pinned: bool) -> str | None:
    """Why the tests cannot run; None where they can, or have to."""
    if probe.returncode == 0 or pinned:
        return None
    last = probe.stderr.strip().splitlines()[-1]
    return f"Triton {version('triton')} cannot interpret a plain kernel with numpy {version('numpy')}: {last}"


@pytest.mark.slow
def test_kernels_under_the_interpreter() -> None:
    if reason := excuse(interpreted(str(PROBE)), pinned()):
        pytest.skip(reason)
    run = interpreted(
        "-m", "pytest", "-m", "interpret", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "."
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout and "skipped" not in run.stdout, run.stdout


def test_what_cannot_be_interpreted_is_an_excuse_but_not_for_the_pinned_versions() -> None:
    fails = interpreted("-c", "raise TypeError('only 0-dimensional arrays')")
    assert "TypeError: only 0-dimensional arrays" in str(excuse(fails, pinned=False))
    assert excuse(fails, pinned=True) is None
    assert excuse(interpreted("-c", ""), pinned=False) is None
