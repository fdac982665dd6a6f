"""Numbers as people read them."""

from __future__ import annotations

_SI = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def count(n: float) -> str:
    """12,345 as it is; from 100,000 on in three digits: 123k, 3.15M."""
    if abs(n) < 100_000:
        return f"{round(n):,}" if n == round(n) else _three(n)
    return _scaled(n)


def rate(n: float) -> str:
    """Three digits: 950, 1.2k, 12.3k."""
    return _scaled(n) if abs(n) >= 1000 else _three(n)


def size(n: float) -> str:
    """Bytes in decimal units: 12.6 MB, 1.42 GB."""
    for factor, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(n) >= factor * 0.9995:
            return f"{_three(n / factor)} {name}"
    return f"{round(n)} B" if round(n) else "0"


def duration(seconds: float) -> str:
    """4.2 s, 1 min 52 s, 2 h 03 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def small(x: float) -> str:
    """A learning rate: 0.01, 2e-3, 1.5e-5."""
    if x == 0 or abs(x) >= 0.00999:
        return f"{x:.3g}"
    digits, _, exponent = f"{x:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def decimal(x: float) -> str:
    """A loss or an axis value: as many digits as are needed, at most three decimals."""
    return f"{x:.3f}".rstrip("0").rstrip(".") if abs(x) < 1000 else rate(x)


def _three(x: float) -> str:
    decimals = 0 if abs(x) >= 99.95 else 1 if abs(x) >= 9.995 else 2
    text = f"{x:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _scaled(n: float) -> str:
    for factor, name in _SI:
        if abs(n) >= factor * 0.9995:
            return f"{_three(n / factor)}{name}"
    return _three(n)
