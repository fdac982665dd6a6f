"""Random sequences of calls, fused beside plain: a few seeds here, thousands by hand; see the module."""

from __future__ import annotations

import pytest

from tests.models.fused_sequences import run_seed


@pytest.mark.parametrize("seed", range(12))
def test_a_sequence(seed: int) -> None:
    problem, _, calls = run_seed(seed)
    assert problem is None, f"{problem} after {' | '.join(calls)}"


@pytest.mark.slow
def test_two_hundred_sequences() -> None:
    problems = {seed: run_seed(seed)[0] for seed in range(12, 212)}
    assert not {seed: why for seed, why in problems.items() if why is not None}
