"""Tests of every format: those that a family lists beside its typical ones run every night."""

from __future__ import annotations

import pytest

from fewbits.formats import ALIKE, FORMATS

every_format = pytest.mark.parametrize(
    "format",
    [
        pytest.param(format, id=name, marks=pytest.mark.nightly if name in ALIKE else ())
        for name, format in FORMATS.items()
    ],
)
