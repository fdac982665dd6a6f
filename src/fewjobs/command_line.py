"""The command line: what ``fewbits build`` does, and ``fewjobs`` where this package is installed alone.

Exit codes are the build's own; 1 and a sentence on the error stream where it cannot begin, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from fewjobs.budget import parse_bytes
from fewjobs.doctor import memory, temporary_folder
from fewjobs.errors import JobsError
from fewjobs.flags import add_build_flags, split_command
from fewjobs.live_table import LiveTable
from fewjobs.plan import plan_text, read_profile
from fewjobs.report import write_report
from fewjobs.runner import Result, Settings, run_build, usable_root
from fewjobs.terminal import console
from fewjobs.trace import write_profile
from fewjobs.words import size

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line of ``fewjobs`` and return its exit code."""
    ours, behind = split_command(list(sys.argv[1:] if argv is None else argv))
    parser = argparse.ArgumentParser(
        prog="fewjobs",
        usage="fewjobs [--memory SIZE] [--keep DIR] [options] -- COMMAND...",
        description="Run a source build within the memory there is; the same as fewbits build.",
        allow_abbrev=False,
    )
    parser.add_argument("--doctor", action="store_true", help="say what memory may be used; runs nothing")
    add_build_flags(parser)
    args = parser.parse_args(ours)
    args.run = behind
    if args.doctor:
        return _say_findings()
    if not behind and args.plan is None:
        parser.error("write the command that builds behind --, as in fewjobs -- ninja -j8")
    try:
        return build(args)
    except JobsError as error:
        sentence = " ".join(str(error).split())
    except OSError as error:
        where = f": {error.filename}" if error.filename is not None else ""
        sentence = f"{(error.strerror or str(error)).lower()}{where}."
    except KeyboardInterrupt:
        sys.stderr.write("interrupted.\n")
        return INTERRUPTED
    sys.stderr.write(f"error: {sentence}\n")
    return FAILED


def _say_findings() -> int:
    """What there is to know of this machine's memory before a build."""
    findings = [memory(), temporary_folder()]
    for finding in findings:
        said = [f"{finding.name}: {finding.status}: {finding.what}", finding.why, finding.fix]
        sys.stdout.write("\n  ".join(filter(None, said)) + "\n")
    return FAILED if any(finding.status == "problem" for finding in findings) else 0


def build(args: Namespace) -> int:
    """Run, or plan, one build as these flags say; ``args.run`` is the command."""
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
