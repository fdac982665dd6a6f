"""Run folders with one file damaged in every way, tried through the public doors: a sentence each.

    python -m tests.training.damaged_runs [--every N] [--only WORD] [--kinds KIND ...] [--seconds S]

makes a run that was killed and one that has ended, damages each of their files in turn, tries `--resume`, the
report, merge and generate on it, each in a process of its own, and prints the outcomes that are no sentence
("raw", "hang"), resumed runs that end with other weights ("wrong") and the counts, as JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.models.corrupt_folders import command, outcome
from tests.training.killed_runs import import_all

DAMAGES = ("truncated", "emptied", "flipped", "removed", "a folder", "other json", "nested json", "binary")
OTHER = ("[]", "3", "null", '"x"', '{"data": 3}', "[[1]]", '{"status": []}')
ADAPTER = "final/adapter_model.safetensors"
Door = Callable[[Path], None]


def damage(path: Path, kind: str, choose: random.Random) -> bool:
    """Damage one file; whether the kind applies to it."""
    data = path.read_bytes()
    if kind == "removed":
        path.unlink()
    elif kind == "a folder":
        path.unlink()
        path.mkdir()
    elif kind == "emptied":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(data[: choose.randrange(len(data))] if data else b"")
    elif kind == "flipped":
        changed = bytearray(data)
        changed[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        path.write_bytes(changed)
    elif kind == "binary":
        path.write_bytes(choose.randbytes(len(data)))
    elif path.suffix not in (".json", ".jsonl", ".yaml"):
        return False
    elif kind == "nested json":
        path.write_text("[" * 100_000)
    else:
        path.write_text(choose.choice(OTHER))
    return True


def make_runs(place: Path) -> None:
    """``whole``, which has ended, and ``killed``, without its last checkpoint and all that comes after it."""
    from tests.training.conftest import make_tiny_folder, write_tiny_data

    make_tiny_folder(place / "model")
    write_tiny_data(place / "rows.jsonl")
    _train(place / "whole", resume=False)
    shutil.copytree(place / "whole", place / "killed")
    as_if_killed(place / "killed")


def settings(model: Path, data: Path, folder: Path) -> dict[str, Any]:
    """A run of six steps with an adapter, a sample, a report and four checkpoints kept."""
    return {
        "model": str(model),
        "train_data": str(data),
        "eval_fraction": 0.2,
        "output_dir": str(folder),
        "max_steps": 6,
        "learning_rate": 5e-3,
        "eval_steps": 2,
        "save_steps": 1,
        "samples": 1,
        "sample_tokens": 2,
        "load_in_4bit": False,
        "lora_r": 2,
        "batch_size": 4,
        "device": "cpu",
        "keep_checkpoints": 4,
    }


def as_if_killed(folder: Path) -> None:
    """What a run of these settings leaves that is killed in its last step."""
    shutil.rmtree(folder / "checkpoints/checkpoint-6")
    shutil.rmtree(folder / "final")
    (folder / "report.html").unlink()
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "status": "running", "ended": None}))


def _train(folder: Path, *, resume: bool) -> None:
    from rich.console import Console

    from fewbits.training.config import TrainConfig
    from fewbits.training.run import train

    config = settings(folder.parent / "model", folder.parent / "rows.jsonl", folder)
    train(TrainConfig.from_mapping(config), resume=resume, console=Console(file=io.StringIO()))


# The doors.


def resume(folder: Path) -> None:
    """``fewbits train --resume``."""
    _train(folder, resume=True)


def report(folder: Path) -> None:
    """``fewbits report``."""
    from fewbits.training.report.page import write_report

    write_report(folder)


def merge(folder: Path) -> None:
    """``fewbits merge``."""
    command("merge", folder, folder.parent / "merged")


def generate(folder: Path) -> None:
    """``fewbits generate``."""
    command("generate", "--model", folder, "--prompt", "2 plus 2 is ", "--max-new-tokens", "2", "--quiet")


def doors(name: str) -> list[Door]:
    """Those that read this file, or what lies beside it; resume changes the run and comes last."""
    return [report, resume] if name.startswith("checkpoints/") else [report, merge, generate, resume]


def is_sentence(text: str) -> bool:
    """One line that says something; it may end with the command that helps."""
    return "\n" not in text and 20 < len(text) < 1500


def names_of(folder: Path) -> list[str]:
    """Every file of a run."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def cases(place: Path, kinds: tuple[str, ...] = DAMAGES) -> Iterator[tuple[str, str, str]]:
    """(which run, file, kind of damage) for all of them."""
    for which in ("killed", "whole"):
        for name in names_of(place / which):
            for kind in kinds:
                yield which, name, kind


def same_adapter(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same weights, bit for bit."""
    return (one / ADAPTER).read_bytes() == (other / ADAPTER).read_bytes()


def tried(place: Path, case: tuple[str, str, str], seconds: int) -> Iterator[tuple[str, str, str]]:
    """(door, outcome, what it said) for the doors of one case; nothing where the damage does not apply."""
    which, name, kind = case
    folder = place / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place / which, folder)
    if not damage(folder / name, kind, random.Random(f"{which} {name} {kind}")):
        return
    for door in doors(name):
        found, said = outcome(door, folder, seconds, is_sentence)
        shutil.rmtree(place / "merged", ignore_errors=True)
        # A damaged adapter of a finished run is not written again; other settings are another run.
        compared = door is resume and which == "killed" and name not in ("run.json", "config.yaml")
        if found == "fine" and compared and not same_adapter(folder, place / "whole"):
            found = "wrong"
        yield door.__name__, found, said


def run(
    every: int = 1, only: str = "", kinds: tuple[str, ...] = DAMAGES, seconds: int = 60
) -> dict[str, Any]:
    """Every case at its doors: counts by outcome, and what was neither fine nor a sentence."""
    counts: Counter[str] = Counter()
    folders, bad, slowest, began = 0, [], 0.0, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if (made := outcome(lambda _: make_runs(place), place, 300, is_sentence)) != ("fine", ""):
            raise RuntimeError(made)
        for number, case in enumerate(cases(place, kinds)):
            if number % every or only not in " ".join(case):
                continue
            start, results = time.monotonic(), list(tried(place, case, seconds))
            slowest = max(slowest, (time.monotonic() - start) / max(1, len(results)))
            folders += bool(results)
            for door, found, said in results:
                counts[found] += 1
                if found not in ("fine", "sentence"):
                    bad.append({"case": case, "door": door, "outcome": found, "said": said})
                    sys.stderr.write(json.dumps(bad[-1]) + "\n")
    return {
        "folders": folders,
        "tries": sum(counts.values()),
        "outcomes": dict(counts),
        "slowest_s": round(slowest, 1),
        "seconds": round(time.monotonic() - began),
        "bad": bad,
    }


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--kinds", nargs="+", choices=DAMAGES, default=DAMAGES)
    parser.add_argument("--seconds", type=int, default=60)
    args = parser.parse_args()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    import_all()  # once, and for every process that is forked
    result = run(args.every, args.only, tuple(args.kinds), args.seconds)
    sys.stdout.write(json.dumps(result) + "\n")
    return bool(result["bad"])


if __name__ == "__main__":
    sys.exit(main())
