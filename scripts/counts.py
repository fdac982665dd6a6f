"""Kills, corrupt folders, random sequences of calls and builds in little memory: run, counted, one line each.

    python scripts/counts.py                      all of them; an hour or two on two cores
    python scripts/counts.py kills corrupt        these alone
    python scripts/counts.py sequences --sequences 200 --first 7

Seeds are fresh in every run and are printed; a failure names its own. Ends with status 1 if anything was
lost, mixed, raw, hanging or different. Needs what the tests need; builds need a C++ compiler and ninja.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "kills": (
        "tests/training/test_resume.py::test_killed_many_times",
        "tests/training/test_several_ranks.py::test_ranks_killed_at_random_moments",
        "tests/models/test_whole_folder.py::test_killed_at_random_moments",
        "tests/models/test_export_interrupted.py",
        "tests/fewjobs/test_scenarios.py::test_killed_at_thirty_moments",
    ),
    "builds": (
        "tests/fewjobs/test_scenarios.py::test_fourteen_units_in_a_box",
        "tests/fewjobs/test_gigabytes.py",
    ),
}


def environment() -> dict[str, str]:
    """One thread a process, and no network."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def tests(name: str) -> bool:
    """The nightly tests of this name, with what each counted."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-m", "nightly or slow", "-o", "junit_family=xunit1", f"--junitxml={report}", *TESTS[name]]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--tb=short", *words],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
        )
        cases = [] if not report.is_file() else list(ElementTree.parse(report).iter("testcase"))
    for case in cases:
        told = {p.get("name"): p.get("value") for p in case.iter("property")}
        bad = next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "ok")
        counted = ", ".join(f"{key}: {value}" for key, value in told.items())
        say(f"  {case.get('name')}: {bad}, {float(case.get('time', 0)):.0f} s; {counted}")
    if done.returncode or not cases:
        say(done.stdout[-5000:] + done.stderr[-2000:])
    return done.returncode == 0 and bool(cases)


def corrupt(args: argparse.Namespace) -> bool:
    """Every corrupt folder at its doors."""
    words = ["-W", "ignore", "-m", "tests.models.corrupt_folders", "--seconds", "60"]
    done = subprocess.run(
        [sys.executable, *words, "--every", str(args.every)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    if not done.stdout.strip():
        say(done.stderr[-3000:])
        return False
    found = json.loads(done.stdout.splitlines()[-1])
    for bad in found.pop("bad"):
        say(f"  {bad}")
    say(f"  {found}")
    return done.returncode == 0


def sequences(args: argparse.Namespace) -> bool:
    """The fused decoder beside the plain one, on as many processes as there are cores."""
    jobs = args.jobs or os.cpu_count() or 1
    bounds = [args.first + args.sequences * i // jobs for i in range(jobs + 1)]
    say(f"  seeds {bounds[0]} to {bounds[-1]}")
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.models.sequences.run", str(first), str(last)],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for first, last in pairwise(bounds)
    ]
    told = [process.communicate()[0] for process in running]
    for line in "".join(told).splitlines():
        if re.match(r"seed \d|    |\d+ sequences|  [cl]", line):
            say(f"  {line}")
    return all(process.returncode == 0 for process in running)


def say(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """See the head of this file."""
    counts: dict[str, Callable[[argparse.Namespace], bool]] = {
        "kills": lambda args: tests("kills"),
        "corrupt": corrupt,
        "sequences": sequences,
        "builds": lambda args: tests("builds"),
    }
    parser = argparse.ArgumentParser(description="Rerun the counts; see the head of this file.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(counts)} (default: all)")
    parser.add_argument("--sequences", type=int, default=2000, metavar="N", help="default: %(default)s")
    parser.add_argument("--first", type=int, default=int(time.time()), metavar="SEED", help="default: now")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th corrupt folder")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(counts)):
        parser.error(f"there is no count {unknown[0]}; the counts are {', '.join(counts)}")
    failed = []
    for name in args.names or counts:
        say(f"{name}:")
        began = time.monotonic()
        if not counts[name](args):
            failed.append(name)
        say(f"{name}: {'FAILED' if name in failed else 'ok'}, {time.monotonic() - began:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
