"""Runs every test marked `interpret` under Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_kernels_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "interpret", "-x", "-p", "no:cacheprovider", "."]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=Path(__file__).parent, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout and "skipped" not in run.stdout, run.stdout
