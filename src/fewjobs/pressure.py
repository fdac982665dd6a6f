"""What to do when memory runs short, in this order: pause, hibernate, requeue, run alone and page.

The youngest stage gives way first: it has the least to lose. Decisions are taken from figures alone, so that
tests can stage any situation; the controller carries them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from fewjobs.schedule import margin
from fewjobs.stage import PLATEAU_S, START_BYTES, Stage, State

HORIZON_S = 0.12  # growth is carried on for so long at least: the time of five samples near the limit
SAMPLES_AHEAD = 4  # for the time of so many samples where they come more slowly
SETTLE_S = 0.4  # between two measures against the same stage
REST_S = 0.1  # a pause lasts so long at least
KNOWN_SHARE = 0.02  # what a known stage may still surprise us with
SURE_SHARE = 0.75  # of the budget: a stage that is alone is not paged before that is used
RISING_S = 1.0  # growth without a step back for so long, beyond the class, is a runaway


class Kind(Enum):
    """A measure."""

    PAUSE = "paused"
    RESUME = "resumed"
    HIBERNATE = "hibernated"
    PAGE = "paged"
    REQUEUE = "requeued"
    TOO_LARGE = "too large"
    RUNAWAY = "runaway"


class Action(NamedTuple):
    """One measure against one stage."""

    kind: Kind
    stage: Stage


def runaways(present: Sequence[Stage], *, now_s: float, limit_bytes: int | None = None) -> list[Action]:
    """Stages past their class that have only grown for the last second."""
    actions = []
    for stage in present:
        bound = stage.class_bytes if limit_bytes is None else limit_bytes
        grows = now_s - stage.memory.rising_s >= RISING_S and now_s - stage.memory.grew_s <= PLATEAU_S
        if stage.memory.size_bytes > bound and (grows or stage.memory.size_bytes > 2 * bound):
            actions.append(Action(Kind.RUNAWAY, stage))
    return actions


def relieve(
    present: Sequence[Stage],
    *,
    budget_bytes: int,
    other_bytes: int,
    now_s: float,
    fixed: bool = True,
    horizon_s: float = HORIZON_S,
) -> list[Action]:
    """What to do now, if anything.

    Args:
        present: stages whose processes exist.
        budget_bytes: memory of the whole build.
        other_bytes: what the build's other processes hold.
        now_s: the time.
        fixed: the budget is the user's own, so waiting does not make it larger.
        horizon_s: how far growth is carried on.
    """
    spare = margin(budget_bytes)
    if all(is_known(stage) for stage in present if stage.is_at_work):
        spare //= 2  # what they will take is known: the other half is left free when one begins
    top = budget_bytes - spare
    used = other_bytes + sum(s.memory.rss_bytes for s in present)
    active = sorted((s for s in present if s.state is State.RUNNING), key=lambda s: -s.times.started_s)
    paging = [s for s in present if s.state is State.PAGING]
    resting = [s for s in present if s.state in (State.PAUSED, State.HIBERNATED)]
    growths = [growth(stage, now_s, horizon_s) for stage in active]
    ahead = used + sum(growths)
    if ahead <= top:
        return _resume(active, paging, resting, used=used, top=top, now_s=now_s)
    if len(active) > 1:
        # As many as it takes; beyond the top itself, all but the oldest.
        victims = []
        for stage, grows in zip(active[:-1], growths, strict=False):
            if ahead <= top and used <= top:
                break
            victims.append(Action(Kind.PAUSE, stage))
            ahead -= grows
        return victims
    return _squeeze(active, paging, resting, used=used, top=top, now_s=now_s, fixed=fixed)


def is_known(stage: Stage) -> bool:
    """Whether it goes on as is known of it, as far as can be seen."""
    predicted = stage.predicted
    is_measured = predicted.source == "history" or bool(predicted.parts)
    return is_measured and stage.memory.size_bytes < 1.1 * predicted.bytes


def growth(stage: Stage, now_s: float, horizon_s: float) -> float:
    """What it will take very soon: as it goes now, but no more than it is known to need."""
    begins = max(0, min(START_BYTES, stage.predicted.bytes) - stage.memory.size_bytes)
    soon = max(0.0, stage.memory.rate) * horizon_s + begins
    if is_known(stage):
        top = stage.predicted.bytes
        if stage.follows_course:
            done = stage.done_share(now_s, horizon_s) * len(stage.predicted.parts)
            top = max(stage.predicted.parts[: int(done) + 1])
        return min(soon, max(top - stage.memory.size_bytes, KNOWN_SHARE * stage.predicted.bytes))
    return soon


def _squeeze(
    active: list[Stage],
    paging: list[Stage],
    resting: list[Stage],
    *,
    used: int,
    top: int,
    now_s: float,
    fixed: bool,
) -> list[Action]:
    """One stage runs at most, and it is still too much."""
    smallest_gain = max(top // 50, 4 * 2**20)
    paused = [s for s in resting if s.state is State.PAUSED and s.memory.rss_bytes > smallest_gain]
    if paging:  # memory is on its way out: hold the rest until it has gone
        return [Action(Kind.PAUSE, stage) for stage in active if used > top]
    for stage in sorted(paused, key=lambda s: -s.memory.rss_bytes):
        if stage.paging.can_page and not stage.paging.failed:
            return [Action(Kind.HIBERNATE, stage)] + [Action(Kind.PAUSE, s) for s in active if used > top]
    if paused:
        return [Action(Kind.REQUEUE, max(paused, key=lambda s: s.times.started_s))]
    if not active:
        return []
    stage = active[0]
    if used < SURE_SHARE * top:
        return []  # a burst at its beginning; nobody else can make room, so there is time to see
    has_just_begun = stage.counts.pageouts and now_s - stage.times.since_s < SETTLE_S
    if has_just_begun and stage.paging.lowest_bytes > 0.8 * stage.paging.paged_bytes:
        return []  # the pager has hardly begun
    if stage.paging.can_page and not stage.paging.failed:
        return [Action(Kind.PAGE, stage)]
    if used <= top:
        return []
    return [Action(Kind.TOO_LARGE if fixed and not stage.paging.without_pager else Kind.REQUEUE, stage)]


def _resume(
    active: list[Stage], paging: list[Stage], resting: list[Stage], *, used: int, top: int, now_s: float
) -> list[Action]:
    if not resting or paging:
        return []
    oldest = min(resting, key=lambda s: s.times.started_s)
    if active and now_s - oldest.times.since_s < REST_S:
        return []
    promised = sum(max(0, s.expected_bytes - s.memory.rss_bytes) for s in active)
    needs = max(0, oldest.expected_bytes - oldest.memory.rss_bytes)
    if not active or used + promised + needs <= top:
        return [Action(Kind.RESUME, oldest)]
    return []
