"""The command line in a process of its own, and in this one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.launched import HEAD, flags
from tests.extras import SAID


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Callable[..., Ran]:
    """``run("eval", "--model", path)`` in this process."""
    said = request.node.stash.setdefault(SAID, [])

    def call(*argv: str | Path) -> Ran:
        from fewbits.cli import main

        code = main([str(a) for a in argv])
        ran = Ran(code, *capsys.readouterr())
        if ran.code:
            said.append(ran.err)
        return ran

    return call


@pytest.fixture(scope="session")
def spawn() -> Callable[..., Ran]:
    """The same in a new process, as a user starts it."""

    def call(*argv: str | Path, stdin: str = "") -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "fewbits.cli", *map(str, argv)],
            input=stdin,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def launched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Exit code and error stream of two processes with some code, which imports nothing heavy."""

    from fewbits.cli.launch import run_processes

    def launch(code: str, *words: str) -> tuple[int, str]:
        command = [sys.executable, "-c", HEAD + textwrap.dedent(code)]
        args = flags("--nproc-per-node", "2", *words)
        result = run_processes(command, args, count=2, logs=tmp_path / "run/logs")
        return result, capsys.readouterr().err

    return launch


@pytest.fixture(scope="module")
def model(shared: Path) -> Path:
    """A small real model's folder; a file of tests may have one of its own."""
    return shared / "data/models/stories260k"


@pytest.fixture(scope="module")
def text(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The beginning of a real text."""
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text((shared / "data/text/tinystories_val.txt").read_text()[:3000])
    return path
