"""Sizes in words, in powers of 1024. `fewbits.words` takes them from here, as this package stands alone."""

from __future__ import annotations

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def three_digits(x: float) -> str:
    """``x`` with three digits and no zeros behind them: 1.5, 12.3, 123, 1234."""
    decimals = 0 if abs(x) >= 99.95 else 1 if abs(x) >= 9.995 else 2
    text = f"{x:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def size(num_bytes: float) -> str:
    """A number of bytes: 600 B, 12.6 MiB, 1.42 GiB."""
    for factor, name in _UNITS:
        if abs(num_bytes) >= factor * 0.9995:
            return f"{three_digits(num_bytes / factor)} {name}"
    return f"{round(num_bytes)} B" if round(num_bytes) else "0"
