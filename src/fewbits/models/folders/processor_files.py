"""The files of the processor that turns images into a model's tensors, which lie beside its weights."""

from __future__ import annotations

import shutil
from pathlib import Path


def copy_processor(source: Path, folder: Path) -> None:
    """Bring the files of a processor into a folder that is written, where it has none of these names."""
    for file in source.glob("*processor*.json"):
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


__all__ = ["copy_processor"]
