"""Who may start: what fits in the budget, the biggest first, smaller ones in the gaps."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from fewjobs.stage import Stage, State

PATIENCE_S = 20.0  # a stage that was passed over for so long lets nobody pass any more
RESTING_S = 2.0
EARLY, LATE = 0.92, 1.12  # how much faster or slower than last time a stage may go
MARGIN_SHARE, MARGIN_BYTES = 0.04, 12 * 2**20


def margin(budget_bytes: int) -> int:
    """What is left free, as figures are up to a twentieth of a second old."""
    return max(min(MARGIN_BYTES, budget_bytes // 10), int(budget_bytes * MARGIN_SHARE))


def admit(
    waiting: Sequence[Stage],
    present: Sequence[Stage],
    *,
    budget_bytes: int,
    other_bytes: int,
    slots: int,
    now_s: float,
    pace: float = 1.0,
) -> list[Stage]:
    """The waiting stages that may start now.

    Args:
        waiting: stages that have asked.
        present: stages whose processes exist, paused ones included.
        budget_bytes: memory of the whole build.
        other_bytes: what the build's other processes hold.
        slots: how many may run at once.
        now_s: the time.
        pace: how much slower stages go than on a processor of their own.
    """
    if any(stage.alone for stage in present):
        return []
    room = budget_bytes - margin(budget_bytes) - other_bytes
    course = [stage_course(stage, now_s, pace) for stage in present]
    busy = sum(stage.is_at_work for stage in present)
    started: list[Stage] = []
    for stage in _in_order(waiting):
        count = len(present) + len(started)
        if busy + len(started) >= slots:
            break
        if stage.alone:
            # Retried after a kill: it waits until everybody else has gone, and keeps newcomers out.
            if count == 0:
                return [stage]
            continue
        fresh = Course(stage.predicted.bytes, stage.predicted.parts, 0.0, stage.predicted.seconds * pace)
        if fits(fresh, course, room) or (count == 0 and not started):
            started.append(stage)
            course.append(fresh)
        elif now_s - stage.times.queued_s > PATIENCE_S + 2 * stage.predicted.seconds:
            break
    if any(stage.alone for stage in waiting):
        oldest = min(s.times.queued_s for s in waiting if s.alone)
        return [s for s in started if now_s - oldest < PATIENCE_S]
    return started


def _in_order(waiting: Sequence[Stage]) -> list[Stage]:
    """The biggest first; of those of whose kind nothing is known, the one of median input, then the smallest.

    These end soon, and tell how the need follows from the input.
    """
    inputs = sorted(s.input_bytes for s in waiting if s.predicted.source == "prior")
    middle = inputs[len(inputs) // 2] if len(inputs) > 2 else -1

    def rank(stage: Stage) -> tuple[int, int, float]:
        unknown = stage.predicted.source == "prior" and stage.input_bytes != middle
        return -stage.predicted.bytes, stage.input_bytes if unknown else 0, stage.times.queued_s

    return sorted(waiting, key=rank)


class Course(NamedTuple):
    """The memory that a stage is predicted to hold from now until it ends.

    Attributes:
        most: bytes, the most that it will hold.
        parts: bytes in each of equal parts (eighths) of the stage's time; empty: ``most`` all the time, and
            when it ends is unknown.
        done: the share of its time that is over, 0 to 1.
        seconds: the predicted length of the whole stage.
        held: bytes that it holds now.
    """

    most: int
    parts: tuple[int, ...]
    done: float
    seconds: float
    held: int = 0

    def highest(self, from_s: float, to_s: float) -> int:
        """The most between two moments from now, whether it goes a little faster or slower than supposed."""
        if not self.parts:
            return self.most
        count = len(self.parts)
        slowest = int(self.done * count / LATE + from_s * count / (self.seconds * LATE))
        fastest = count if to_s == inf else int(self.done * count + to_s * count / (self.seconds * EARLY))
        if slowest >= count:
            return 0
        soon = from_s <= self.seconds / count
        return max(self.held if soon else 0, *self.parts[slowest : fastest + 1], 0)


def stage_course(stage: Stage, now_s: float, pace: float = 1.0) -> Course:
    """What a present stage will still need."""
    most = max(stage.expected_bytes, stage.memory.rss_bytes)
    patience = RESTING_S + 2 * stage.predicted.seconds  # then newcomers leave it room to go on
    if stage.state is State.HIBERNATED and now_s - stage.times.since_s < patience:
        return Course(stage.memory.rss_bytes, (), 0.0, 0.0)
    as_predicted = stage.state is State.RUNNING and stage.memory.size_bytes <= stage.predicted.bytes
    if not as_predicted or not stage.follows_course:
        return Course(most, (), 0.0, 0.0)
    # Its memory says how far it has come, too: on a busy machine that is less far than the clock says.
    parts = stage.predicted.parts
    reached = sum(part <= stage.memory.rss_bytes for part in parts) / len(parts)
    done = min(stage.done_share(now_s), reached + 1 / len(parts))
    if done >= 1:
        return Course(most, (), 0.0, 0.0)
    return Course(most, stage.predicted.parts, done, stage.predicted.seconds * pace, stage.memory.rss_bytes)


def fits(fresh: Course, present: Sequence[Course], room: int) -> bool:
    """Whether a stage may begin now: at no moment of its course all of them together pass the room."""
    if not fresh.parts:
        return fresh.most + sum(c.highest(0.0, inf) for c in present) <= room
    step = fresh.seconds / len(fresh.parts)
    for i, part in enumerate(fresh.parts):
        begins, ends = step * i * EARLY, step * (i + 1) * LATE
        if part + sum(c.highest(begins, ends) for c in present) > room:
            return False
    return True
