"""What a terminal shows of a build that runs: its stages, memory against the budget, what is done."""

from __future__ import annotations

import re
import time

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fewjobs.controller import Controller
from fewjobs.stage import State
from fewjobs.words import size

SHOW_S = 0.5
SHOWN_STAGES = 12
_STEP = re.compile(rb"\[\s*(\d+)/(\d+)\]|\[\s*(\d+)%\]")


class LiveTable:
    """Running stages, memory against the budget, what is done; the build's own output scrolls above."""

    def __init__(self, screen: Console) -> None:
        self.screen = screen
        self.live = Live(console=screen, auto_refresh=False, transient=True)
        self.shown_s = 0.0
        self.done = self.total = 0
        self._held = b""

    def __enter__(self) -> LiveTable:
        self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._held:
            self.output(b"\n")
        self.live.stop()

    def output(self, data: bytes) -> None:
        """Lines of the build."""
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            step = _STEP.search(line)
            if step is not None and step[2]:
                self.done, self.total = int(step[1]), int(step[2])
            self.live.console.print(Text.from_ansi(line.decode(errors="replace")), soft_wrap=True)

    def tick(self, controller: Controller) -> None:
        """Draw again, if it is time."""
        now = time.monotonic()
        if now - self.shown_s >= SHOW_S:
            self.shown_s = now
            self.live.update(self.table(controller), refresh=True)

    def table(self, controller: Controller) -> Group:
        """What there is to see now."""
        stages = sorted(controller.stages, key=lambda s: (s.state is State.WAITING, -s.memory.rss_bytes))
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
        for name in ("unit", "stage", "memory", "supposed", "time", ""):
            table.add_column(name, justify="left" if name in ("unit", "stage", "") else "right", no_wrap=True)
        now = controller.now_s
        for stage in [s for s in stages if s.state is not State.WAITING][:SHOWN_STAGES]:
            table.add_row(
                Text(stage.unit[-48:]),
                Text(f"{stage.name} {stage.arch}".strip()),
                size(stage.memory.rss_bytes),
                size(stage.predicted.bytes),
                f"{now - stage.times.started_s:.0f} s",
                "" if stage.state is State.RUNNING else stage.state.value,
            )
        waiting = sum(s.state is State.WAITING for s in stages)
        total = f"{self.done} of {self.total} steps, " if self.total else ""
        left = ""
        if self.total and self.done:
            left = f", about {now / self.done * (self.total - self.done):.0f} s left"
        line = (
            f"{size(controller.used_bytes)} of {size(controller.budget_bytes)} ({controller.budget.why}), "
            f"{total}{waiting} waiting, {now:.0f} s{left}"
        )
        return Group(table, Text(line, style="bold"))
