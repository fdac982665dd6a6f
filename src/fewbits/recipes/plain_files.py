"""Plain values in YAML or JSON files: read with one sentence about what is wrong, and written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fewbits.errors import BadInput
from fewbits.text_files import read_text

T = TypeVar("T")


def read_plain(path: Path, parse: Callable[[Any], T]) -> T:
    """What ``parse`` makes of a file's value: JSON where the name ends so, else YAML.

    Raises:
        BadInput: it cannot be read, or ``parse`` refuses it; the sentence begins with the file's name.
    """
    text = read_text(path)
    try:
        plain = json.loads(text) if path.suffix == ".json" else _yaml(text)
    except ValueError as error:
        raise BadInput(f"{path} cannot be read ({_first_line(error)}); give a YAML or JSON file.") from error
    try:
        return parse(plain)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error


def write_plain(path: Path, plain: Any, *, flow: bool | None = False) -> None:
    """Write a value as YAML, or as JSON where the name ends so.

    Args:
        path: the file.
        plain: mappings, lists, texts and numbers.
        flow: YAML's ``default_flow_style``: False for a line a value, None for inner lists in one line.
    """
    if path.suffix == ".json":
        path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        return
    import yaml

    text = yaml.safe_dump(plain, sort_keys=False, default_flow_style=flow, width=110)
    path.write_text(text, encoding="utf-8")


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ValueError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
