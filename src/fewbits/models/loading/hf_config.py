"""The formats that a packed model's config.json spells out: another version reads the same numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from fewbits.errors import SpecMismatch
from fewbits.formats.base import Format
from fewbits.recipes import Recipe


def formats_of(recipe: Recipe) -> list[Format]:
    """Every format that a recipe names, once."""
    formats: dict[Format, None] = {}

    def walk(value: object) -> None:
        if isinstance(value, Format):
            formats[value] = None
        elif isinstance(value, tuple):
            for item in value:
                walk(item)
        elif dataclasses.is_dataclass(value):
            for f in dataclasses.fields(value):
                walk(getattr(value, f.name))

    walk(recipe)
    return list(formats)


def spell_out(format: Format) -> dict[str, Any]:
    """Every field of a format as plain data."""

    def plain(value: Any) -> Any:
        if isinstance(value, Format):
            return spell_out(value)
        if isinstance(value, (tuple, list)):
            return [plain(v) for v in value]
        return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)

    return {f.name: plain(getattr(format, f.name)) for f in dataclasses.fields(format)}


def check_formats(recipe: Recipe, written: list[dict[str, Any]] | None) -> None:
    """Compare the formats of a recipe with those that a checkpoint was written in.

    Raises:
        SpecMismatch: one has other fields here.
    """
    ours = [spell_out(f) for f in formats_of(recipe)]
    for format in written or []:
        if format not in ours:
            raise SpecMismatch(
                f"the checkpoint's format {format.get('name')!r} has other fields than this version's "
                "format of that name, so its codes would decode to other numbers; use the fewbits version "
                "that wrote it."
            )
