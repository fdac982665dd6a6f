"""Packages that only an extra brings: which of them are absent here, and which failures that explains."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Generator, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IMPORTED_AS = {"cuda_bindings": "cuda", "nvidia_cuda_nvrtc": "nvidia"}
SAID = pytest.StashKey[list[str]]()  # of a test: what its commands wrote as errors
ALWAYS_THERE = {"fewbits", "pytest", "mypy", "ruff"}  # pytest runs the tests; the last two are commands


@cache
def packages_of_extras() -> frozenset[str]:
    """The import names of what pyproject.toml's extras bring beyond the dependencies of all."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [r for asked in project["optional-dependencies"].values() for r in asked]
    names, own = (
        {re.split(r"[\[<>=!~; ]", r)[0].replace("-", "_").lower() for r in listed}
        for listed in (extras, project["dependencies"])
    )
    return frozenset(IMPORTED_AS.get(name, name) for name in names - own - ALWAYS_THERE)


@cache
def absent_packages() -> frozenset[str]:
    """Those of them that this environment has not; ``pyarrow`` goes with ``datasets``, which brings it."""
    absent = {name for name in packages_of_extras() if find_spec(name) is None}
    return frozenset(absent | {name for name in ("pyarrow",) if find_spec(name) is None})


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__]


def absent_package_behind(error: BaseException, absent: Collection[str]) -> str | None:
    """The absent package whose import failed somewhere behind ``error``, or None: then it is a failure."""
    for one in _chain(error):
        if not isinstance(one, ImportError):
            continue
        if one.name:  # Python's own import
            package = one.name.partition(".")[0]
            if package in absent:
                return package
        else:  # a library's own sentence
            words = set(re.findall(r"\w+", str(one).replace("-", "_")))
            if found := sorted(words & set(absent)):
                return found[0]
    return None


def absent_package_said(sentences: Sequence[str], absent: Collection[str]) -> str | None:
    """The absent package that a command of ours told its user to install, or None."""
    for sentence in sentences:
        if "pip install" in sentence:
            words = set(re.findall(r"\w+", sentence.lower().replace("-", "_")))
            if found := sorted(words & set(absent)):
                return found[0]
    return None


def skipped_where_an_extra_is_absent(
    absent: Collection[str], said: Sequence[str] = ()
) -> Generator[None, object, object]:
    """Stands around a test: one that fails because an optional package is absent is skipped, by its name.

    ``said``: the errors that commands wrote in the test, filled while it runs.
    """
    try:
        return (yield)
    except Exception as error:
        package = absent_package_behind(error, absent) or absent_package_said(said, absent)
        if package is None:
            raise
        pytest.skip(f"needs {package}, which an extra of fewbits brings")
