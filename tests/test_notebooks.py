"""The notebooks are whole, and their cells run in their order as a reader would run them, on a tiny model."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[str]:
    return ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_whole(path):
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4 and notebook["cells"][0]["cell_type"] == "markdown"
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert all(not cell.get("outputs") for cell in notebook["cells"])
    for cell in cells(path):
        ast.parse(cell)
        assert all(len(line) <= 120 for line in cell.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")
def test_a_notebook_runs(path, shared, tmp_path, monkeypatch, capsys):
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    model = shared / "data" / "models" / "stories260k"
    names: dict[str, object] = {}
    for cell in cells(path):
        cell = re.sub(r'MODEL = "[^"]*"', f"MODEL = {str(model)!r}", cell)
        exec(compile(re.sub(r"STEPS = \d+", "STEPS = 3", cell), path.name, "exec"), names)  # noqa: S102
    shown = capsys.readouterr().out
    written = {place.name for place in tmp_path.iterdir()}
    assert {"fine_tune": {"adapter"}, "grpo": {"grpo-adapter"}, "export": {"merged", "packed"}}[
        path.stem
    ] <= written
    assert shown.strip()


def test_there_are_the_three_most_wanted():
    assert [path.stem for path in NOTEBOOKS] == ["export", "fine_tune", "grpo"]
