"""``fewbits build``: the arguments, the live table, the last lines. Imports nothing that needs torch."""

from __future__ import annotations

import re
import time
from argparse import Namespace
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fewbits.cli.console import console
from fewbits.words import size
from fewjobs.budget import parse_bytes
from fewjobs.controller import Controller
from fewjobs.plan import plan_text, read_profile
from fewjobs.report import write_report
from fewjobs.runner import Result, Settings, run_build, usable_root
from fewjobs.stage import State
from fewjobs.trace import write_profile

SHOW_S = 0.5
SHOWN_STAGES = 12
_STEP = re.compile(rb"\[\s*(\d+)/(\d+)\]|\[\s*(\d+)%\]")


def build(args: Namespace) -> int:
    """``fewbits build``."""
    memory = None if args.memory in (None, "auto") else parse_bytes(args.memory)
    if args.plan is not None:
        profile = read_profile(Path(args.plan))
        console().print(escape(plan_text(profile, memory_bytes=memory, jobs=args.jobs)), highlight=False)
        return 0
    keep = Path(args.keep) if args.keep is not None else None
    folder = (keep or usable_root()) / "last"
    folder.mkdir(parents=True, exist_ok=True)
    log = Path(args.log) if args.log is not None else folder / "build.log"
    log.unlink(missing_ok=True)
    settings = Settings(
        memory_bytes=memory,
        keep=keep,
        jobs=args.jobs,
        log=log.absolute(),
        pager=not args.no_paging,
        cache=not args.no_cache,
        exact_jobs=args.exact_jobs,
        stage_limit_bytes=parse_bytes(args.stage_limit) if args.stage_limit is not None else None,
    )
    screen = console(stderr=True)
    if screen.is_terminal and not args.quiet:
        with LiveTable(screen) as table:
            result = run_build(args.run, settings, on_tick=table.tick, output=table.output)
    else:
        result = run_build(args.run, settings)
    try:
        _finish(result, args, screen, folder)
    except OSError as error:  # a full disk: the build's own code counts, and it has been built
        where = f"{error.filename}: " if error.filename else ""
        said = f"fewbits build: report and profile could not be written: {where}{error.strerror}"
        screen.print(escape(said), highlight=False, soft_wrap=True)
    return result.code


def _finish(result: Result, args: Namespace, screen: Console, folder: Path) -> None:
    """Write report and profile; say what mattered."""
    if not result.profile:
        return
    report = Path(args.report) if args.report is not None else folder / "report.html"
    write_report(result.profile, report)
    write_profile(result.profile, Path(args.profile) if args.profile is not None else folder / "profile.json")
    if args.quiet:
        return
    p = result.profile
    done = sum(stage["code"] == 0 for stage in p["stages"])
    counts = ", ".join(f"{n} {what}" for what, n in p["counts"].items())
    lines = [
        f"fewbits build: {done} stages in {p['seconds']:.1f} s, peak {size(p['peak_bytes'])} of "
        f"{size(p['budget_bytes'])}{f'; {counts}' if counts else ''}",
        *(f"fewbits build: {note}" for note in result.notes),
        f"fewbits build: report {report}",
    ]
    for line in lines:
        screen.print(escape(line), highlight=False, soft_wrap=True, style="dim")


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
