"""A build predicted from a profile: time and peak on a machine, and the plain settings that fit there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fewjobs.budget import read_budget
from fewjobs.errors import BadInput
from fewjobs.replay import items_of, plan, recommend, units_of
from fewjobs.trace import FORMAT
from fewjobs.words import size

GIB = 2**30
MEMORIES = tuple(n * GIB for n in (8, 16, 24, 32, 48, 64, 96, 128))


def read_profile(path: Path) -> dict[str, Any]:
    """A profile that ``fewbits build --profile`` has written."""
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path} is not JSON ({error}); give a file that --profile has written.") from error
    if not isinstance(profile, dict) or profile.get("format") != FORMAT:
        raise BadInput(f"{path} is no profile of this version; write one with the option --profile.")
    return profile


def plan_text(profile: dict[str, Any], *, memory_bytes: int | None, jobs: int | None) -> str:
    """The prediction, as lines."""
    budget = memory_bytes or read_budget().available_bytes
    slots = jobs or len(os.sched_getaffinity(0))
    items = items_of(profile)
    if not items:
        return "the profile holds no stage that was measured to its end."
    outcome = plan(items, budget_bytes=budget, slots=slots)
    largest = max(items, key=lambda item: item.peak_bytes)
    lines = [
        f"fewbits build with {size(budget)} and {slots} processors: about {outcome.seconds:.0f} s, peak "
        f"{size(outcome.peak_bytes)}",
        f"largest stage: {largest.unit} {largest.name} {largest.arch}, {size(largest.peak_bytes)}",
    ]
    if largest.peak_bytes > budget:
        lines.append("it is larger than the memory and would go through the disk, at the disk's speed")
    plain = recommend(units_of(items), budget, cpus=slots)
    if plain is None:
        lines.append("without fewbits build: not even MAX_JOBS=1 fits")
    else:
        lines.append(
            f"without fewbits build: MAX_JOBS={plain.jobs} NVCC_THREADS={plain.threads}, about "
            f"{plain.seconds:.0f} s, peak {size(plain.peak_bytes)}"
        )
    return "\n".join(lines)
