"""What each test did, one line of JSON a test: name, outcome, the exception, where it was raised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MOST = 4000  # characters of one message


def read(path: str | Path) -> dict[str, dict[str, Any]]:
    """The lines of a record by the test's name; of a test's several lines the failed one."""
    rows: dict[str, dict[str, Any]] = {}
    for row in map(json.loads, Path(path).read_text(encoding="utf-8").splitlines()):
        if row["test"] not in rows or row["outcome"] == "failed":
            rows[row["test"]] = row
    return rows


class Recorder:
    """Collects the outcome of each test and writes them to ``path`` as they come."""

    def __init__(self, path: Path, notes: dict[str, Any], *, keep: bool = False) -> None:
        self.path = path
        if not keep or not path.exists():
            path.write_text("")
        self.notes = notes  # what others add to the line of the test that runs; emptied after each

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One line for a test's call, and one for a set-up or an end that was not passed."""
        if report.when != "call" and report.passed:
            return
        line = {"test": report.nodeid, "when": report.when, "outcome": report.outcome}
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            line["why"] = (str(report.longrepr) if crash is None else crash.message)[:_MOST]
            line["places"] = _places(report.longrepr)
        if report.skipped and isinstance(report.longrepr, tuple):
            line["why"] = report.longrepr[2]
        line |= self.notes
        self.notes.clear()
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _places(longrepr: Any) -> list[str]:
    """The files and lines of the traceback, outermost first."""
    entries = getattr(getattr(longrepr, "reprtraceback", None), "reprentries", [])
    files = (getattr(entry, "reprfileloc", None) for entry in entries)
    return [f"{file.path}:{file.lineno}" for file in files if file is not None]
