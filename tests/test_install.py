"""What pip is told to install can be installed elsewhere, and lower bounds are tried: two scripts."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("uv")
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.nightly
def test_versions_that_the_index_has_not_together_are_found(tmp_path: Path) -> None:
    """Triton is pinned to another version than the one that the pinned torch asks for, as it once was."""
    text = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8")
    kept = [line for line in text.splitlines() if not line.startswith(("torch=", "torch>", "triton"))]
    pins = tmp_path / "constraints.txt"
    pins.write_text("\n".join([*kept, "torch==2.13.0", "triton==3.6.0"]) + "\n", encoding="utf-8")
    command = [sys.executable, str(ROOT / "scripts" / "check_install.py"), "--constraints", str(pins)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    if done.returncode == 77:
        pytest.skip(done.stdout)
    assert done.returncode == 1, done.stdout + done.stderr
    plain = [line for line in done.stdout.splitlines() if line.startswith("plain index")]
    assert len(plain) == 16 and all(line.endswith("FAILED") for line in plain)
    assert "triton" in done.stdout


def test_without_an_index_nothing_is_said_to_resolve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = importlib.import_module("check_install")
    unreachable = subprocess.CompletedProcess([], 2, "", "error: Failed to fetch")
    monkeypatch.setattr(script.Resolver, "run", lambda *_, **__: unreachable)
    monkeypatch.setattr(sys, "argv", ["check_install.py"])
    assert script.main() == 77
    assert capsys.readouterr().out.startswith("not proved: no index reachable")


def write_wheel(folder: Path, program: str, needs: str) -> Path:
    """A wheel ``app`` whose one module is ``program``."""
    info, path = "app-1.dist-info", folder / "app-1-py3-none-any.whl"
    about = f"Metadata-Version: 2.1\nName: app\nVersion: 1\n{needs}"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("app.py", program)
        wheel.writestr(f"{info}/METADATA", about)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"app.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


def test_a_wheel_runs_beside_what_it_asks_for_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """markdown-it-py asks for mdurl in turn; PyYAML is installed here, and nobody asks for it."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = importlib.import_module("check_wheel")
    wheel = write_wheel(tmp_path, "import markdown_it, mdurl\n", "Requires-Dist: markdown-it-py\n")
    python = script.install(wheel, tmp_path / "environment")
    said = script.run([str(python), "-c", "import app; print(app.__file__)"], tmp_path)
    assert said.startswith(str(tmp_path))
    assert importlib.util.find_spec("yaml") is not None
    with pytest.raises(SystemExit, match="No module named 'yaml'"):
        script.run([str(python), "-c", "import app, yaml"], tmp_path)


def test_packages_that_are_absent_or_of_another_version_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    declared = importlib.import_module("linked_packages").declared_packages
    with pytest.raises(SystemExit, match="nowhere-to-be-had is not installed here"):
        declared(["nowhere-to-be-had>=1"])
    with pytest.raises(SystemExit, match="'pytest<1' is asked for, and pytest"):
        declared(["pytest<1"])
    assert declared(["nowhere-to-be-had; python_version < '3'"]) == []
    for name in ("trl", "datasets", "matplotlib", "tensorboard"):
        pytest.importorskip(name)
    alone, more = ({p.name for p in declared([f"fewbits{extra}"])} for extra in ("", "[train]"))
    assert "trl" not in alone and more >= alone | {"trl", "datasets"}


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("version_matrix")


def test_a_python_that_is_not_here_is_named_and_replaced(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = {"3.11", "3.12", "3.13"}
    monkeypatch.setattr(matrix, "interpreter", lambda resolver, version: version in here)
    assert matrix.both_ends(None) == ["3.11", "3.13"]
    said = "Python 3.14 is not on this machine and none is downloaded: 3.13 takes its place\n"
    assert capsys.readouterr().out == said
    here -= {"3.11", "3.12"}
    assert matrix.both_ends(None) == ["3.13"]
    here.clear()
    with pytest.raises(SystemExit, match="is on this machine: install one"):
        matrix.both_ends(None)


def test_a_lower_bound_that_is_not_met_to_the_digit_is_seen(matrix: ModuleType) -> None:
    wanted = {"one": "one>=5", "two": "two>=1.0,!=1.15.0", "three": "three>=3.8"}
    assert matrix.above_bounds(wanted, {"one": "5.0.0", "two": "1.0.0", "three": "3.8.0"}) == []
    assert matrix.above_bounds(wanted, {"one": "5.0.1", "two": "1.16.0", "three": "3.8"}) == ["one", "two"]
    assert {"torch", "transformers", "datasets", "gguf", "pytest"} <= matrix.bounded().keys()


def test_the_nightly_run_refuses_steps_that_it_has_not() -> None:
    done = subprocess.run([ROOT / ".ci" / "nightly", "wheels"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == "there is no step wheels; the steps are: nightly matrix wheel bare suites users\n"
