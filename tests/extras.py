"""Packages that only an extra brings: which of them are absent here, and which failures that explains."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IMPORTED_AS = {"cuda_bindings": "cuda", "nvidia_cuda_nvrtc": "nvidia", "pytest_xdist": "xdist"}
SAID = pytest.StashKey[list[str]]()  # of a test: what its commands wrote as errors
ALWAYS_THERE = {"fewbits", "pytest", "mypy", "ruff"}  # pytest runs the tests; the last two are commands


def _names(requirements: Iterable[str]) -> set[str]:
    """The import names of packages that are asked for."""
    found = {re.split(r"[\[<>=!~; ]", r)[0].replace("-", "_").lower() for r in requirements}
    return {IMPORTED_AS.get(name, name) for name in found if not name.startswith("types_")}  # mypy's alone


@cache
def packages_of_extras(*extras: str) -> frozenset[str]:
    """The import names of what these extras of pyproject.toml, or all, bring beyond the dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = project["optional-dependencies"]
    waiting, asked = list(extras or listed), list[str]()
    while waiting:
        for requirement in listed[waiting.pop()]:
            inner = re.fullmatch(r"fewbits\[(.*)\]", requirement)
            waiting += inner[1].split(",") if inner else ()
            asked += () if inner else (requirement,)
    return frozenset(_names(asked) - _names(project["dependencies"]) - ALWAYS_THERE)


@cache
def absent_packages() -> frozenset[str]:
    """What the extra ``test`` would bring and this environment has not: nothing, where CI runs.

    Packages of other extras are not among them: their absence, which is the rule, must hide no failure.
    ``pyarrow`` goes with ``datasets``, which brings it.
    """
    return frozenset(name for name in packages_of_extras("test") | {"pyarrow"} if find_spec(name) is None)


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
