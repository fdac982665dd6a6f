"""By the name of Unsloth's module: its trainer, and its collator of rows with images.

Importing this loads neither torch nor TRL.
"""

from __future__ import annotations

from typing import Any

from fewbits.front import unsloth_trainer
from fewbits.front.vision_rows import UnslothVisionDataCollator


def __getattr__(name: str) -> Any:
    return getattr(unsloth_trainer, name)


__all__ = ["UnslothVisionDataCollator"]
