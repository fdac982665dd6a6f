"""Tests can be collected where only fewbits and pytest are installed: what an extra brings is asked for."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORTED_AS = {"cuda_bindings": "cuda", "nvidia_cuda_nvrtc": "nvidia"}
ALWAYS_THERE = {"fewbits", "pytest", "mypy", "ruff"}  # pytest runs the tests; the last two are commands


def packages_of_extras() -> set[str]:
    """The import names of what pyproject.toml's extras bring beyond the dependencies of all."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [r for asked in project["optional-dependencies"].values() for r in asked]
    names, own = (
        {re.split(r"[\[<>=!~; ]", r)[0].replace("-", "_").lower() for r in listed}
        for listed in (extras, project["dependencies"])
    )
    return {IMPORTED_AS.get(name, name) for name in names - own - ALWAYS_THERE}


def imported_at_once(path: Path) -> set[str]:
    """The packages that a file imports when it is read, not when a test runs."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_no_test_file_needs_an_extra_to_be_read() -> None:
    extras = packages_of_extras()
    assert {"gguf", "datasets", "trl", "bitsandbytes", "torchao", "triton"} <= extras
    needing = {  # helpers below tests/ are imported after an importorskip
        str(path.relative_to(ROOT)): sorted(found)
        for path in (ROOT / "tests").rglob("*.py")
        if path.name.startswith(("test_", "conftest")) and (found := imported_at_once(path) & extras)
    }
    assert needing == {}, 'write pytest.importorskip("...") below the imports in place of these imports'
