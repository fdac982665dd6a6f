"""Random sequences of calls, fused beside plain: a few seeds here, thousands by hand; see the module."""

from __future__ import annotations

import pytest

from tests.models.fused_sequences import run_seed


@pytest.mark.parametrize("seed", range(12))
def test_a_sequence(seed: int) -> None:
    problem, _, calls = run_seed(seed)
    assert problem is None, f"{problem} after {' | '.join(calls)}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "count", [pytest.param(8, marks=pytest.mark.slow), pytest.param(400, marks=pytest.mark.nightly)]
)
def test_many_sequences(count: int) -> None:
    problems = {seed: run_seed(seed)[0] for seed in range(12, 12 + count)}
    assert not {seed: why for seed, why in problems.items() if why is not None}
