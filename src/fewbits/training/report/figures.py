"""Numbers as people read them."""

from __future__ import annotations

from fewbits.words import three_digits

_SI = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def count(n: float) -> str:
    """12,345 as it is; from 100,000 on in three digits: 123k, 3.15M."""
    if abs(n) < 100_000:
        return f"{round(n):,}" if n == round(n) else three_digits(n)
    return _scaled(n)


def rate(n: float) -> str:
    """Three digits: 950, 1.2k, 12.3k."""
    return _scaled(n) if abs(n) >= 1000 else three_digits(n)


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


def _scaled(n: float) -> str:
    for factor, name in _SI:
        if abs(n) >= factor * 0.9995:
            return f"{three_digits(n / factor)}{name}"
    return three_digits(n)
