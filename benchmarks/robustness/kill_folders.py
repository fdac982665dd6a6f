"""`fewbits quantize` and `fewbits merge` over a folder that exists, killed at any moment: what is there then?

    python -m benchmarks.robustness.kill_folders [--moments N] [--seed N] [merge|quantize]

from the top of the repository. The base is the demo's trained model in shards. Two adapters (or two
recipes) take turns in writing one destination with `--overwrite`, and each attempt gets SIGKILL: a third of
them at a moment of the command's whole length, a third while its hidden folder is written, a third as soon
as the folders have changed places. After every kill the destination must be, byte for byte, what the one or
the other writes when nobody kills it, a file of the user's beside the weights must be there, and no byte of
the base may have changed. Then the same command is let to its end: the destination is the new one, and
nothing else is left. Prints one line for each kill, and the counts as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.models.corrupt_folders import command, outcome

NOTE = "notes.txt"
RECIPES = ("qlora_nf4", "int8")


def prepare(place: Path) -> None:
    """The base in shards and two adapters that differ, made in a process of their own."""
    from tests.models.loading import perturb

    from fewbits import FastLanguageModel, demo

    model, tokenizer = FastLanguageModel.from_pretrained(
        Path(demo.__file__).parent / "assets", load_in_4bit=False
    )
    model.save_pretrained(place / "base", max_shard_size="200KB")
    tokenizer.save_pretrained(place / "base")
    model, _ = FastLanguageModel.from_pretrained(place / "base", load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=4)
    for turn in (0, 1):
        perturb(model, seed=turn + 1).save_pretrained(place / f"adapter{turn}")


def write(what: str, turn: int, place: Path, to: str) -> None:
    """The command itself."""
    if what == "merge":
        words = ["merge", place / f"adapter{turn}", place / to, "--base", place / "base"]
    else:
        words = ["quantize", place / "base", place / to, "--recipe", RECIPES[turn]]
    command(*words, "--overwrite")


def contents(folder: Path) -> dict[str, str]:
    """A hash of every file in a folder."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def partials(place: Path) -> list[Path]:
    """The hidden folders in which a destination is being written."""
    return [Path(e.path) for e in os.scandir(place) if e.name.startswith(".") and e.name.endswith(".partial")]


def start(work: Callable[[], None]) -> int:
    """A child that does the work; its id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def alive(child: int) -> bool:
    """Whether a child has not ended."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def wait_for(child: int, place: Path, what: str) -> None:
    """Returns when the child begins to write its hidden folder, or has published it, or has ended."""
    before, inode = set(partials(place)), (place / "out").stat().st_ino

    def reached() -> bool:
        if what == "writing":
            return bool(set(partials(place)) - before)
        return what == "whole" or (place / "out").stat().st_ino != inode

    while alive(child) and not reached():
        time.sleep(0.0002)


def kill(work: Callable[[], None], place: Path, what: str, seconds: float) -> bool:
    """Kill a child so many seconds after the given event; whether it was still at work."""
    child = start(work)
    wait_for(child, place, what)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def lengths(work: Callable[[], None], place: Path) -> dict[str, float]:
    """Seconds of the command, of its writing, and of what it does after its folder is published."""
    began = time.monotonic()
    child, at = start(work), {}
    for what in ("writing", "publishing"):
        wait_for(child, place, what)
        at[what] = time.monotonic()
    os.waitpid(child, 0)
    end = time.monotonic()
    return {
        "whole": end - began,
        "writing": at["publishing"] - at["writing"],
        "publishing": end - at["publishing"],
    }


def finish(what: str, turn: int, place: Path, to: str) -> None:
    """Let the command run to its end."""
    found = outcome(lambda _: write(what, turn, place, to), place, 300)
    if found != ("fine", ""):
        raise RuntimeError(found)


def measure(what: str, moments: int, choose: random.Random) -> dict[str, Any]:
    """All kills of one command; the counts."""
    began, counts, faults = time.monotonic(), Counter[str](), []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if (made := outcome(prepare, place, 300)) != ("fine", ""):
            raise RuntimeError(made)
        base = contents(place / "base")
        wants = []
        for turn in (0, 1):
            shutil.rmtree(place / "out", ignore_errors=True)
            finish(what, turn, place, "out")
            (place / "out" / NOTE).write_text("the user's own")
            wants.append(contents(place / "out"))
        if wants[0] == wants[1]:
            raise RuntimeError("the two do not differ")
        seconds = lengths(lambda: write(what, 1, place, "out"), place)
        names = {p.name for p in place.iterdir()}
        turn = 0
        while counts["killed"] < moments:
            event = ("whole", "writing", "publishing")[counts["killed"] % 3]
            moment = choose.uniform(0, seconds[event])
            was_killed = kill(lambda: write(what, turn, place, "out"), place, event, moment)  # noqa: B023
            left, found = partials(place), contents(place / "out")
            state = ("new", "old")[wants.index(found) != turn] if found in wants else "mixed or damaged"
            counts["killed" if was_killed else "over before the kill"] += 1
            counts[state] += was_killed
            counts["a hidden folder left"] += bool(left)
            finish(what, turn, place, "out")
            facts = {
                "mixed": state not in ("old", "new"),
                "lost": contents(place / "out") != wants[turn],
                "base changed": contents(place / "base") != base,
                "leftovers": sorted(leftovers(place, names)),
            }
            line = {
                "what": what,
                "moment": f"{1000 * moment:.0f} ms into {event}",
                "killed": was_killed,
                "left": len(left),
                "found": state,
                **{k: v for k, v in facts.items() if v},
            }
            sys.stderr.write(f"kill: {json.dumps(line)}\n")
            faults += [line] if any(facts.values()) else []
            turn = 1 - turn
        finish(what, turn, place, "out")
        last = sorted(leftovers(place, names))
    return {
        "what": what,
        "files": len(wants[0]),
        "lengths_s": {k: round(v, 3) for k, v in seconds.items()},
        **counts,
        "faults": faults,
        "left at the end": last,
        "seconds": round(time.monotonic() - began),
    }


def leftovers(place: Path, names: set[str]) -> set[str]:
    """What lies beside the folders and should have been removed.

    A hidden folder that was killed before it said whose it is could be one that is just being made, so it is
    kept for a minute: it is made older here, and the next run has to remove it.
    """
    young = set()
    for partial in partials(place):
        is_old = partial.stat().st_mtime < 1
        if not is_old and {p.name for p in partial.iterdir()} <= {"owner.json"}:
            os.utime(partial, (0, 0))
            young.add(partial.name)
    return {p.name for p in place.iterdir()} - names - young


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", choices=("merge", "quantize"))
    parser.add_argument("--moments", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import fewbits.models.fast  # noqa: F401

    chosen = (args.what,) if args.what else ("merge", "quantize")
    results = [measure(what, args.moments, random.Random(args.seed)) for what in chosen]
    sys.stdout.write("".join(json.dumps(result) + "\n" for result in results))
    return any(result["faults"] or result["left at the end"] for result in results)


if __name__ == "__main__":
    sys.exit(main())
