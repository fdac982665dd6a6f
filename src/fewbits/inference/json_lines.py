"""Files of one JSON object a line that grow as figures come, and are read again after a kill."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def parsed_line(line: str, *, needs: Sequence[str] = ()) -> dict[str, Any] | None:
    """The object in a line; None if there is none, or one that lacks a key that it ``needs``."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and set(needs) <= set(entry) else None


def append_line(path: Path | None, entry: Mapping[str, Any]) -> None:
    """Add an object as the file's last line; without a path nothing is kept."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def drop_last_line(path: Path, lines: Sequence[str]) -> None:
    """Write the file anew without the last of its lines, which a kill has cut short."""
    path.write_text("".join(f"{line}\n" for line in lines[:-1]), encoding="utf-8")
