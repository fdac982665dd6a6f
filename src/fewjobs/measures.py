"""Carrying out what `pressure` decides, and what happens to a stage that was stopped or killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fewjobs import pressure
from fewjobs.client import Client
from fewjobs.options import Options
from fewjobs.pressure import Kind
from fewjobs.stage import Stage, State
from fewjobs.trace import Trace
from fewjobs.verdict import Verdict, judge, mean_rate
from fewjobs.watch import BudgetWatch, Others

# Of what it had: so little is left, or half and it grows again; then it has come out of the pager.
PAGED_SHARE, HALF_SHARE = 0.08, 0.5
PAGING_TIMEOUT_S, FUTILE_S, FUTILE_TIMES = 60.0, 3.0, 8
RETRIES = 3
SAMPLE_S = 0.025  # between two samples near the limit, where they come in time
_KILLED = re.compile(r"[Kk]illed signal|died due to signal 9|signal 9|Killed\b|\(program \w+\).*Killed")


class Build(Protocol):
    """What the measures see of the controller."""

    options: Options
    trace: Trace
    budget: BudgetWatch
    others: Others
    verdicts: list[Verdict]
    budget_bytes: int
    late_s: float

    @property
    def now_s(self) -> float:
        """Seconds since the build began."""
        ...


class Measures:
    """Pauses, hibernates, requeues, stops."""

    def __init__(self, controller: Build) -> None:
        self.controller = controller
        self._orders: dict[Stage, Kind] = {}  # why we have killed it
        self._oom_kills = _oom_kills()

    def take(self, present: Sequence[Stage]) -> None:
        """Look at the stages and do what is needed."""
        c, now = self.controller, self.controller.now_s
        for stage in present:
            if stage.state is State.PAGING:
                self._finish_paging(stage, now)
        limit = c.options.stage_limit_bytes
        actions = pressure.runaways(present, now_s=now, limit_bytes=limit)
        if not actions:
            actions = pressure.relieve(
                [s for s in present if s not in self._orders],
                budget_bytes=c.budget_bytes,
                other_bytes=c.others.rss_bytes,
                now_s=now,
                fixed=c.budget.fixed,
                horizon_s=max(pressure.HORIZON_S, pressure.SAMPLES_AHEAD * (SAMPLE_S + c.late_s)),
            )
        for action in actions:
            if action.stage not in self._orders and action.stage.pid:
                self._do(action.kind, action.stage, now)

    def _do(self, kind: Kind, stage: Stage, now: float) -> None:
        self.controller.trace.event(now, kind.value, stage)
        if kind is Kind.PAUSE:
            _signal_group(stage, signal.SIGSTOP)
            self._enter(stage, State.PAUSED, now)
            stage.counts.pauses += 1
        elif kind is Kind.RESUME:
            stage.times.paused_s += now - stage.times.since_s
            _signal_group(stage, signal.SIGCONT)
            self._enter(stage, State.RUNNING, now)
        elif kind is Kind.HIBERNATE:
            # A stopped process handles no signal: it wakes into the pager's handler, and is stopped after it.
            stage.paging.paged_bytes = stage.paging.lowest_bytes = stage.memory.anon_bytes
            stage.counts.hibernations += 1
            _signal(stage.memory.leaf, signal.SIGURG)
            _signal(stage.memory.leaf, signal.SIGCONT)
            stage.times.paused_s += now - stage.times.since_s
            self._enter(stage, State.PAGING, now)
        elif kind is Kind.PAGE:
            self._page(stage, now)
        else:
            self._orders[stage] = kind
            stage.memory.growth = mean_rate(stage)  # afterwards its curve falls
            stage.counts.requeues += kind is Kind.REQUEUE
            _signal_group(stage, signal.SIGKILL)

    def _enter(self, stage: Stage, state: State, now: float) -> None:
        stage.state, stage.times.since_s = state, now
        stage.memory.rate = 0.0

    def _page(self, stage: Stage, now: float) -> None:
        """It goes on, but out of the disk. If that gives nothing back, it is not tried again."""
        paging = stage.paging
        futile = stage.counts.pageouts > 0 and paging.lowest_bytes > 0.9 * paging.paged_bytes > 8 * 2**20
        paging.futile = paging.futile + 1 if futile else 0
        paging.failed = paging.futile > FUTILE_TIMES
        paging.paged_bytes = paging.lowest_bytes = stage.memory.anon_bytes
        stage.counts.pageouts, stage.times.since_s = stage.counts.pageouts + 1, now
        _signal(stage.memory.leaf, signal.SIGURG)

    def _finish_paging(self, stage: Stage, now: float) -> None:
        anon_bytes, paging = stage.memory.anon_bytes, stage.paging
        falls = anon_bytes <= 1.02 * paging.lowest_bytes
        done = anon_bytes < PAGED_SHARE * paging.paged_bytes
        done = done or (not falls and paging.lowest_bytes < HALF_SHARE * paging.paged_bytes)
        took = now - stage.times.since_s
        if not done and took < FUTILE_S:
            return
        if done or took > PAGING_TIMEOUT_S or anon_bytes > 0.9 * paging.paged_bytes:
            _signal_group(stage, signal.SIGSTOP)
            paging.failed = not done
            self._enter(stage, State.HIBERNATED if done else State.PAUSED, now)

    def again(
        self, client: Client, stage: Stage, code: int, printed: tuple[int, int], *, signal_seen: bool
    ) -> bool:
        """After a stage has ended: whether it is to run once more. May hold it back as failed."""
        kind = self._orders.pop(stage, None)
        if signal_seen or code == 0:
            return False
        c, now = self.controller, self.controller.now_s
        if kind is Kind.REQUEUE and stage.counts.requeues <= RETRIES:
            stage.predicted.bytes = max(stage.predicted.bytes, int(1.2 * stage.memory.most_bytes))
            return True
        if kind is None and not self._killed(client, code, printed):
            if not self._capped(stage):
                return False
            kind = Kind.RUNAWAY
        elif kind is None and stage.counts.kills < RETRIES - 1:
            stage.counts.kills += 1
            stage.alone = True
            stage.predicted.bytes = max(stage.predicted.bytes, int(1.2 * stage.memory.most_bytes))
            c.trace.event(now, "killed by the kernel", stage)
            return True
        verdict = judge(
            stage,
            kind,
            budget_bytes=c.budget_bytes,
            toolkit=c.trace.toolkit,
            why=c.budget.why,
            has_pager=stage.paging.can_page,
        )
        c.verdicts.append(verdict)
        c.trace.event(now, "stopped", stage)
        stage.state, stage.times.since_s = State.HELD, now
        client.message = f"fewbits build: {verdict.sentence}\n"
        return False

    def _killed(self, client: Client, code: int, printed: tuple[int, int]) -> bool:
        """Whether somebody has killed it, the kernel most likely; a compiler's driver only reports it."""
        if code == -signal.SIGKILL:
            return True
        text = (client.printed(printed[1]) or "")[-4000:]
        count = _oom_kills()
        grown, self._oom_kills = count > self._oom_kills, count
        return bool(_KILLED.search(text)) or (grown and code in (1, 4, 255) and not text.strip())

    def _capped(self, stage: Stage) -> bool:
        """Whether it failed at the hard cap on its private memory."""
        c = self.controller
        bound = c.options.stage_limit_bytes or stage.class_bytes
        return c.options.caps and stage.memory.most_bytes > 1.5 * bound


def _oom_kills() -> int:
    """How often the kernel has killed for memory, on the machine."""
    try:
        text = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(text.partition("\noom_kill ")[2].split("\n", 1)[0] or 0)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        return


def _signal_group(stage: Stage, number: int) -> None:
    try:
        os.killpg(stage.pid, number)
    except OSError:
        return
