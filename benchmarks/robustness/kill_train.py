"""Runs that are killed at any moment and resumed, by one process or by several: how do they end?

    python -m benchmarks.robustness.kill_train [--ranks N] [--moments N] [--signal KILL] [--seed N]

from the top of the repository. A tiny model with LoRA adapters is trained as `fewbits train` trains it,
once without a kill. Every further run gets SIGKILL up to three times, each time at a moment of its own, and
goes on with `--resume`; then it is let to its end, and all that it leaves (weights, optimizer, metrics,
samples, facts, names of files) must be equal, bit for bit, to what the first one left. Half of the moments
are drawn from the run's whole length, the other half follow the beginning of some checkpoint's writing.
With --ranks one rank gets the signal, and the time is taken until the other ones have ended by themselves.
Goes on until --moments kills (30) have hit a living run. Prints one line for each, and the counts as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.models.corrupt_folders import outcome
from tests.training import killed_runs

WRITTEN = (".checkpoint-", ".final.")
END_S = 120.0  # a rank that has not ended so long after another one's death hangs


@dataclass
class Trial:
    """What is the same for every run."""

    place: Path
    ranks: int
    whole_s: float = 0.0

    def config(self, name: str) -> dict[str, Any]:
        """The run ``name``: twelve steps, a checkpoint at every second, an evaluation at every third."""
        from tests.training.test_resume import LORA, settings

        more = {"max_steps": 12, "epochs": 1, "logging_steps": 1, "save_steps": 2}
        return settings(
            self.place / "model", self.place / "rows.jsonl", self.place / name, **{**LORA, **more}
        )

    def start(self, name: str, *, resume: bool = True) -> list[killed_runs.Run]:
        """The processes of one run."""
        with socket.socket() as store:
            store.bind(("127.0.0.1", 0))
            port = str(store.getsockname()[1])
        order = {"config": self.config(name), "resume": resume}
        if self.ranks == 1:
            return [killed_runs.Run(order, {})]
        size = str(self.ranks)
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
        }
        return [
            killed_runs.Run(order, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(self.ranks)
        ]


def alive(pid: int) -> bool:
    """Whether a child has not ended."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def being_written(folder: Path) -> set[tuple[str, int]]:
    """Checkpoints and final models of which a part is written: names until they are whole, and inodes."""
    found = set()
    for parent in (folder / "checkpoints", folder):
        with contextlib.suppress(OSError):
            found |= {(e.name, e.inode()) for e in os.scandir(parent) if e.name.startswith(WRITTEN)}
    return found


def wait_for_moment(trial: Trial, folder: Path, pid: int, choose: random.Random) -> str:
    """Waits until the run is to be killed; how the moment was chosen."""
    kind, before = choose.choices(("whole", "checkpoint", "final"), (45, 45, 10))[0], being_written(folder)
    if kind == "whole":
        seconds = choose.uniform(0.02, trial.whole_s)
        time.sleep(seconds)
        return f"{seconds:.2f} s after its start"
    # A whole run writes at most nine checkpoints; one that goes on writes fewer.
    wanted = choose.randrange(1, 4 if folder.exists() else 9) if kind == "checkpoint" else 1
    seen: set[tuple[str, int]] = set()
    while alive(pid) and len(seen) < wanted:
        seen |= {entry for entry in being_written(folder) - before if entry[0].startswith(f".{kind}")}
        time.sleep(0.0005)
    delay = choose.uniform(0, 0.03)
    time.sleep(delay)
    return f"{1000 * delay:.0f} ms into {kind} {wanted}"


def kill_one(trial: Trial, name: str, number: int, choose: random.Random) -> dict[str, Any]:
    """One attempt at a run that gets a signal: where that fell, and how long the other ranks went on."""
    folder = trial.place / name
    before = being_written(folder)  # what an earlier kill has left, until a run removes it
    runs = trial.start(name)
    victim = choose.randrange(trial.ranks)
    moment = wait_for_moment(trial, folder, runs[victim].pid, choose)
    hit, began = alive(runs[victim].pid), time.monotonic()
    os.kill(runs[victim].pid, number)  # a child that has ended is still there to be asked for its status
    inside = sorted(entry[0] for entry in being_written(folder) - before)  # other ranks will tidy up
    others = [run for rank, run in enumerate(runs) if rank != victim]
    waited = others or (runs if number == signal.SIGTERM else [])
    while any(alive(run.pid) for run in waited) and time.monotonic() < began + END_S:
        time.sleep(0.02)
    ended_s, hangs = time.monotonic() - began, any(alive(run.pid) for run in waited)
    for run in runs:
        if alive(run.pid) and (hangs or number == signal.SIGSTOP):
            os.kill(run.pid, signal.SIGKILL)
    found = [run.outcome() for run in runs]
    hit &= number != signal.SIGKILL or found[victim]["status"] == -number  # it may have been about to end
    said = [f["error"].split("\n")[0] for f in found if f["error"]]
    return {"moment": moment, "victim": victim, "hit": hit, "hangs": hangs, "ended_s": round(ended_s, 1),
            "inside": inside, "status": [f["status"] for f in found], "said": said}  # fmt: skip


def compare(one: Path, other: Path) -> None:
    """Raises AssertionError where two runs have left something different."""
    from tests.training.test_resume import assert_same, remains

    assert_same(remains(one), remains(other))


def run_one(trial: Trial, name: str, number: int, choose: random.Random) -> list[dict[str, Any]]:
    """One run, killed and resumed to its end: one entry for each kill, the last with "end"."""
    found = [kill_one(trial, name, number, choose)]
    while len(found) < 3 and found[-1]["hit"]:
        found.append(kill_one(trial, name, number, choose))
    results = [run.outcome() for run in trial.start(name)]
    end = "not resumed: " + " | ".join(r["error"][:300] for r in results)
    if all(r["status"] == 0 for r in results):
        kind, said = outcome(lambda folder: compare(folder, trial.place / "whole"), trial.place / name, 120)
        end = "bit-equal" if kind == "fine" else f"differs: {said}"
    if left := being_written(trial.place / name):
        end += f", leaves {sorted(left)}"
    found[-1]["end"] = end
    return found


def prepare(place: Path) -> None:
    """The model and the data, made in a process of their own: this one must compute nothing."""
    from tests.training.conftest import make_tiny_folder, write_tiny_data

    make_tiny_folder(place / "model")
    write_tiny_data(place / "rows.jsonl")


def measure(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """All runs; the counts."""
    if (made := outcome(prepare, place, 120)) != ("fine", ""):
        raise RuntimeError(made)
    trial, choose = Trial(place, args.ranks), random.Random(args.seed)
    began = time.monotonic()
    if any(run.outcome()["status"] for run in trial.start("whole", resume=False)):
        raise RuntimeError("the run that nobody kills has failed")
    trial.whole_s = time.monotonic() - began
    kinds: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    longest = 0.0
    while kinds["hit a living run"] < args.moments:
        number = ends.total()
        entries = run_one(trial, f"run{number}", getattr(signal, f"SIG{args.signal}"), choose)
        for entry in entries:
            sys.stderr.write(f"run {number}: {json.dumps(entry)}\n")
            kinds["hit a living run" if entry["hit"] else "after its end"] += 1
            kinds["inside the writing of a checkpoint"] += entry["hit"] and any(
                "checkpoint" in n for n in entry["inside"]
            )
            kinds["inside the writing of the final model"] += entry["hit"] and any(
                "final" in n for n in entry["inside"]
            )
            kinds["hangs"] += entry["hangs"]
            longest = max(longest, entry["ended_s"] if args.ranks > 1 else 0.0)
        ends[entries[-1]["end"]] += 1
        shutil.rmtree(place / f"run{number}")
    return {"ranks": args.ranks, "signal": args.signal, "runs": ends.total(),
            "whole_s": round(trial.whole_s, 1), **kinds, "ends": dict(ends), "longest_end_s": longest,
            "seconds": round(time.monotonic() - began)}  # fmt: skip


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--moments", type=int, default=30)
    parser.add_argument("--signal", choices=("KILL", "STOP", "TERM"), default="KILL")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    killed_runs.import_all()
    with tempfile.TemporaryDirectory() as name:
        result = measure(args, Path(name))
    sys.stdout.write(json.dumps(result) + "\n")
    return list(result["ends"]) != ["bit-equal"] or bool(result["hangs"])


if __name__ == "__main__":
    sys.exit(main())
