"""Paired differences: the quantile against tables, the interval against drawn numbers."""

from __future__ import annotations

import math
import random

import pytest

from fewbits.errors import BadInput
from fewbits.inference.paired import paired_interval, student_quantile


@pytest.mark.parametrize(
    ("confidence", "freedom", "printed"),
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 3, 3.182), (0.95, 4, 2.776), (0.95, 10, 2.228),
     (0.99, 5, 4.032), (0.99, 30, 2.750), (0.8, 7, 1.415), (0.95, 120, 1.980), (0.999, 9, 4.781)],
)  # fmt: skip
def test_quantiles_are_those_of_printed_tables(confidence, freedom, printed):
    assert student_quantile(confidence, freedom) == pytest.approx(printed, abs=6e-4)


def test_an_interval_holds_the_mean_as_often_as_it_says():
    draw = random.Random(0)
    tokens = [100, 100, 100, 100, 100, 60]
    held = 0
    for _ in range(2000):
        found = paired_interval([0.3 * t + draw.gauss(0, 5) for t in tokens], tokens, 0.9)
        held += found.low <= 0.3 <= found.high
    assert 0.88 < held / 2000 < 0.92


def test_edges_of_an_interval():
    one = paired_interval([5.0], [10])
    assert (one.mean, one.low, one.high, one.windows) == (0.5, -math.inf, math.inf, 1)
    same = paired_interval([1.0, 2.0], [10, 20])
    assert same.low == same.mean == same.high == pytest.approx(0.1)
    for differences, tokens in (([1.0], [1, 2]), ([], [])):
        with pytest.raises(BadInput, match="give one for each window"):
            paired_interval(differences, tokens)
    with pytest.raises(BadInput, match="a confidence of 1 with 3 degrees of freedom"):
        student_quantile(1.0, 3)
