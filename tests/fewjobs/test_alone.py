"""The build runner without fewbits and without torch, as `src/fewjobs/pyproject.toml` installs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import rich

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "fewjobs"

ALONE = """
import sys
sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]
for name in ("fewbits", "torch", "transformers", "numpy", "psutil"):
    sys.modules[name] = None  # importing it fails
from fewjobs.command_line import main
sys.exit(main())
"""


def alone(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """``fewjobs`` from a copy of its folder, where nothing else of ours can be imported."""
    shutil.copytree(PACKAGE, tmp_path / "site" / "fewjobs", dirs_exist_ok=True)
    folders = [str(tmp_path / "site"), str(Path(rich.__file__).parents[1])]
    command = [sys.executable, "-I", "-c", ALONE, *folders, *args]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120)


def test_it_runs_a_build_and_ends_with_its_code(tmp_path: Path) -> None:
    done = alone(tmp_path, "--", "sh", "-c", "echo built; exit 3")
    assert done.returncode == 3, done.stderr
    assert done.stdout == "built\n"
    assert "fewbits build: report" in done.stderr
    assert (tmp_path / ".cache/fewbits/build/last/report.html").is_file()


def test_it_says_what_memory_there_is(tmp_path: Path) -> None:
    done = alone(tmp_path, "--doctor")
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line[0] != " "] == ["memory", "TMPDIR"]


def test_its_refusals_are_one_sentence(tmp_path: Path) -> None:
    unknown = alone(tmp_path, "--", "no-such-command")
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("error: there is no command 'no-such-command' on the PATH;")
    assert alone(tmp_path).returncode == 2
    assert "write the command that builds behind --" in alone(tmp_path).stderr
    wrong = alone(tmp_path, "--memory", "lots", "--", "true")
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: ") and "Traceback" not in wrong.stderr


def test_its_project_file_says_what_that_of_fewbits_says() -> None:
    own = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for name in ("version", "requires-python", "license"):
        assert own["project"][name] == whole["project"][name]
    assert set(own["project"]["dependencies"]) <= set(whole["project"]["dependencies"])
    data = "package-data"
    assert own["tool"]["setuptools"][data]["fewjobs"] == whole["tool"]["setuptools"][data]["fewjobs"]
