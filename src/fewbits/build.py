"""The former name of `fewjobs`, the build runner: its names still come from here, with a warning."""

from __future__ import annotations

import warnings
from typing import Any

import fewjobs

__all__ = ["Budget", "Limit", "parse_bytes", "read_budget"]  # noqa: F822 - by __getattr__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; the build runner is fewjobs")
    warnings.warn(f"fewbits.build is called fewjobs; import {name} from there.", DeprecationWarning, 2)
    return getattr(fewjobs, name)
