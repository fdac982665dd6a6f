"""Differences of two evaluations on the same windows of text, and how sure they are.

Two settings see the same windows, so what is hard about a text cancels: a difference is far surer than either
figure. With differences d_w of summed negative log-likelihoods over windows of t_w scored tokens,

    mean   D = sum d_w / sum t_w                                      nats for a token
    error  s = sqrt(n / (n - 1) * sum (d_w - D t_w)^2) / sum t_w      windows are the units that vary
    interval   D -+ q s, q the quantile of Student's t with n - 1 degrees of freedom

which takes windows as independent draws of text and their differences as nearly normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fewbits.errors import BadInput


@dataclass(frozen=True)
class Interval:
    """A mean difference and what it lies in.

    Attributes:
        mean: nats for a token.
        low: lower end; minus infinity with fewer than two windows.
        high: upper end.
        windows: that it rests on.
    """

    mean: float
    low: float
    high: float
    windows: int


def paired_interval(
    differences: Sequence[float], tokens: Sequence[int], confidence: float = 0.95
) -> Interval:
    """The mean difference for a token, with its interval.

    Args:
        differences: of each window's summed negative log-likelihood.
        tokens: scored in each window.
        confidence: that the interval holds the mean.

    Raises:
        BadInput: lists of different lengths, nothing in them, or a confidence that is none.
    """
    if len(differences) != len(tokens) or not tokens or sum(tokens) <= 0:
        raise BadInput(f"{len(differences)} differences of {len(tokens)} windows; give one for each window.")
    total, n = sum(tokens), len(tokens)
    mean = math.fsum(differences) / total
    if n < 2:
        return Interval(mean, -math.inf, math.inf, n)
    squares = math.fsum((d - mean * t) ** 2 for d, t in zip(differences, tokens, strict=True))
    error = math.sqrt(n / (n - 1) * squares) / total
    reach = student_quantile(confidence, n - 1) * error
    return Interval(mean, mean - reach, mean + reach, n)


def student_quantile(confidence: float, freedom: int) -> float:
    """q with P(abs(T) < q) = ``confidence`` for Student's t; by bisection of its closed form.

    Raises:
        BadInput: a confidence outside of 0 to 1, or no degrees of freedom.
    """
    if not 0 < confidence < 1 or freedom < 1:
        raise BadInput(
            f"a confidence of {confidence:g} with {freedom} degrees of freedom is refused; give a number "
            "between 0 and 1, and at least two windows."
        )
    low, high = 0.0, math.pi / 2  # the angle whose tangent is t / sqrt(freedom)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(high)


def _inside(angle: float, freedom: int) -> float:
    """P(abs(T) < sqrt(freedom) tan(angle)): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    cosine, sine = math.cos(angle), math.sin(angle)
    term = total = cosine if freedom % 2 else 1.0
    for i in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= cosine * cosine * (i - 1) / i
        total += term
    if freedom % 2:
        return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))
    return sine * total
