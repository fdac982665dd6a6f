"""The number of commands that a build tool shows at once."""

from __future__ import annotations

from typing import Any

import pytest

from fewjobs.window import VARIABLES, widen
from tests.fewjobs.conftest import Workshop, write_ninja


@pytest.mark.parametrize(
    ("line", "shown", "units"),
    [
        ("ninja -j6", "ninja -j22", 6),
        ("/usr/bin/ninja -C out -j 2 all", "/usr/bin/ninja -C out -j 8 all", 2),
        ("ninja -j 64", "ninja -j 80", 64),
        ("ninja", "ninja -j8", None),
        ("ninja -C out", "ninja -j8 -C out", None),
        ("ninja -j1", "ninja -j1", 1),
        ("ninja -j0", "ninja -j0", 0),
        ("make --jobs=3 all", "make --jobs=12 all", 3),
        ("make -j all", "make -j all", None),
        ("make", "make", None),
        ("cmake --build out --parallel 4", "cmake --build out --parallel 16", 4),
        ("cmake --build out -- -j4", "cmake --build out -- -j16", 4),
        ("cmake -S . -B out", "cmake -S . -B out", None),
        ("pip wheel -j6", "pip wheel -j6", None),
        ("sh -c ninja", "sh -c ninja", None),
    ],
)
def test_commands(line: str, shown: str, units: int | None) -> None:
    window = widen(line.split(), {}, 2)
    assert (window.command, window.units) == (shown.split(), units)
    assert bool(window.note) == (units is not None and units > 1)
    assert window.variables == dict.fromkeys(VARIABLES, "8")


def test_variables() -> None:
    window = widen(["pip", "wheel", "x"], {"MAX_JOBS": "4"}, 2)
    assert window.variables == {"MAX_JOBS": "16", "CMAKE_BUILD_PARALLEL_LEVEL": "8"}
    assert (window.units, "MAX_JOBS=16" in window.note) == (4, True)
    assert widen(["pip", "wheel", "x"], {"MAX_JOBS": "1"}, 2).variables == {"CMAKE_BUILD_PARALLEL_LEVEL": "8"}
    assert widen(["cmake", "--build", "o"], {"CMAKE_BUILD_PARALLEL_LEVEL": "3"}, 2).units == 3
    assert widen(["ninja", "-j5"], {"MAX_JOBS": "4"}, 2).units == 5


def test_under_a_jobserver_ninja_takes_its_turns_from_there() -> None:
    assert widen(["ninja"], {"MAKEFLAGS": " -j2 --jobserver-auth=3,4"}, 2).command == ["ninja"]


@pytest.mark.parametrize("exact", [pytest.param(False, marks=pytest.mark.slow), True])
def test_more_are_seen_and_as_many_work_as_was_asked(workshop: Workshop, ninja: str, exact: bool) -> None:
    write_ninja(workshop, [workshop.unit(f"u{i}.cpp", 50) for i in range(6)])
    done = workshop.build(ninja, "-j2", memory_bytes=2_000_000_000, jobs=6, exact_jobs=exact)
    assert done.code == 0, done.err
    stages: list[dict[str, Any]] = done.profile["stages"]
    first_end = min(s["ended_s"] for s in stages)
    seen = sum(s["queued_s"] < first_end for s in stages)
    assert seen == 2 if exact else seen > 2
    for stage in stages:
        others = [s for s in stages if s["started_s"] <= stage["started_s"] < s["ended_s"]]
        assert len(others) <= 2
    assert [("of which 2 work" in note) for note in done.profile["notes"]] == ([] if exact else [True])
