"""Tests run where only fewbits and pytest are installed: what needs an extra skips and says which package.

`.ci/nightly bare` runs them all in such an environment.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from fewbits.errors import Unsupported
from tests.extras import (
    absent_package_behind,
    absent_package_said,
    absent_packages,
    packages_of_extras,
    skipped_where_an_extra_is_absent,
)

ROOT = Path(__file__).resolve().parents[1]
ABSENT = {"gguf", "compressed_tensors", "no_such_package"}


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


def test_files_that_skip_as_a_whole_are_imported_by_no_other() -> None:
    """What another file needs of them would be missing where they skip: helpers stand apart."""
    files = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    skipping = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path, text in files.items()
        if path.name.startswith("test_") and re.search(r"^(\w+ = )?pytest\.importorskip", text, re.MULTILINE)
    }
    assert "tests.models.test_compressed_folder" in skipping
    importing = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path, text in files.items()
        for module in re.findall(r"^ *from (tests\.[\w.]+) import", text, re.MULTILINE)
        if module in skipping
    ]
    assert not importing


def _raised(code: str) -> BaseException:
    with pytest.raises(Exception, check=lambda error: True) as caught:
        exec(code, {"Unsupported": Unsupported})  # noqa: S102
    return caught.value


FROM_IMPORT = "try:\n    import no_such_package.part\nexcept ImportError as error:\n    "


@pytest.mark.parametrize(
    ("code", "package"),
    [
        ("import no_such_package.part", "no_such_package"),
        (FROM_IMPORT + "raise Unsupported('install it') from error", "no_such_package"),
        (FROM_IMPORT + "raise AssertionError('other words were asked for')", "no_such_package"),
        (
            "raise ImportError('this needs `compressed-tensors`: pip install compressed-tensors')",
            "compressed_tensors",
        ),
        ("import another_package_that_is_not_there", None),  # a name that is misspelt fails
        ("from pathlib import gguf", None),
        ("raise ImportError('ggufs are not read')", None),
        ("assert 1 == 2, 'gguf'", None),
    ],
)
def test_a_failure_is_explained_by_an_absent_package_alone(code: str, package: str | None) -> None:
    assert absent_package_behind(_raised(code), ABSENT) == package
    assert absent_package_behind(_raised(code), ()) is None  # where all is installed, nothing is explained


def test_what_is_installed_is_not_absent() -> None:
    tested = packages_of_extras("test")
    assert {"trl", "gguf", "torchao", "xdist"} <= tested < packages_of_extras()
    assert not tested & {"lm_eval", "xllamacpp", "torch"}
    assert absent_packages() <= tested | {"pyarrow"}
    assert not absent_packages() & {name.partition(".")[0] for name in sys.modules}


def test_a_failure_becomes_a_skip_only_where_it_is_explained() -> None:
    around = skipped_where_an_extra_is_absent(ABSENT)
    next(around)
    with pytest.raises(pytest.skip.Exception, match="needs gguf"):
        around.throw(_raised("raise ImportError('gguf', name='gguf')"))
    told = ["error: writing GGUF needs the package gguf, not installed; run: pip install 'x[export]'."]
    around = skipped_where_an_extra_is_absent(ABSENT, told)
    next(around)
    with pytest.raises(pytest.skip.Exception, match="needs gguf"):
        around.throw(AssertionError("1 == 0"))
    assert absent_package_said(told, {"trl"}) is None
    assert absent_package_said(["error: g.gguf is not GGUF"], ABSENT) is None
    around = skipped_where_an_extra_is_absent(ABSENT)
    next(around)
    with pytest.raises(AssertionError, match=r"^a wrong number$"):
        around.throw(AssertionError("a wrong number"))
