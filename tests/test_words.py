"""One unit for bytes and one rule for plurals, everywhere."""

from __future__ import annotations

import pytest

from fewbits.words import counted, size


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0"),
        (600, "600 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (2_811_904, "2.68 MiB"),
        (2**20 - 1, "1 MiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (139 * 2**30, "139 GiB"),
        (-(2**21), "-2 MiB"),
        (2**41, "2 TiB"),
    ],
)
def test_sizes(num_bytes: float, shown: str) -> None:
    assert size(num_bytes) == shown


@pytest.mark.parametrize(
    ("n", "shown"),
    [(0, "0 epochs"), (0.8, "0.8 epochs"), (1, "1 epoch"), (1.0001, "1 epoch"), (12_345.0, "12,345 epochs")],
)
def test_plurals(n: float, shown: str) -> None:
    assert counted(n, "epoch") == shown
