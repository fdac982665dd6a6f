"""Files that the command line is given."""

from __future__ import annotations

import sys
from pathlib import Path

from fewbits.errors import BadInput


def read_text(path: str) -> str:
    """A file's text, or standard input's for "-"."""
    if path == "-":
        return sys.stdin.read()
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text (byte {error.start}); convert it first.") from error
