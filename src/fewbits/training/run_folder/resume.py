"""From which checkpoint a run goes on: the newest, if all of its bytes are what they were; else a sentence.

Nothing is chosen silently. A damaged checkpoint is named, with what is wrong with it, and the newest whole
one before it is offered with the command that goes on from there. What the run was begun with, the data and
the base model's weights, must be what it was. `fewbits.training.run` calls `resumable` and goes on.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fewbits.errors import BadCheckpoint, SpecMismatch
from fewbits.training.checkpoints.folders import PREFIX, checkpoints, step_of
from fewbits.training.checkpoints.manifest import FILE, fault_of, has_manifest
from fewbits.training.config import TrainConfig
from fewbits.training.ranks.processes import Ranks
from fewbits.training.run_folder.layout import RunFolder

STATE_FILE = "trainer_state.json"  # as the host calls it
_SAMPLES, _SAMPLE_BYTES = 64, 16384
Tell = Callable[[str], None]


def resumable(folder: RunFolder, ranks: Ranks, tell: Tell) -> list[Path]:
    """The checkpoints of a run that goes on, oldest first; the newest is whole. Every rank calls.

    Raises:
        BadCheckpoint: the newest, or the best that the run is to end with, is damaged.
    """
    names = ranks.led("checkpoints", lambda: [path.name for path in checkpoints(folder.checkpoints)])
    earlier = [folder.checkpoints / name for name in names]
    if not earlier:
        return []
    check_whole(earlier[-1], folder, ranks, tell)
    best = ranks.led("best checkpoint", lambda: best_of(earlier[-1]))
    if best is not None and best != earlier[-1].name and best in names:
        check_best(folder.checkpoints / best, folder, ranks, tell)
    return earlier


def check_whole(checkpoint: Path, folder: RunFolder, ranks: Ranks, tell: Tell) -> None:
    """Compare a checkpoint's bytes with its manifest; every rank reads a share.

    Raises:
        BadCheckpoint: they differ; with the command that goes on from the one before.
    """
    fault = _fault(checkpoint, ranks, tell)
    if fault is None:
        return
    earlier = ranks.led(
        "earlier checkpoints",
        lambda: [path.name for path in checkpoints(checkpoint.parent) if step_of(path) < step_of(checkpoint)],
    )
    damaged, whole = [checkpoint], None
    for name in reversed(earlier):
        if _fault(checkpoint.with_name(name), ranks) is None:
            whole = name
            break
        damaged.append(checkpoint.with_name(name))
    way = (
        f"{whole} before it is whole, and the run goes on from there with"
        if whole
        else "no whole one is before it, so the run can only begin anew, with"
    )
    raise BadCheckpoint(f"{checkpoint} is damaged: {fault}; {way}: {_without(damaged, folder)}")


def check_best(checkpoint: Path, folder: RunFolder, ranks: Ranks, tell: Tell) -> None:
    """The same for the best checkpoint, with whose weights the run is to end.

    Raises:
        BadCheckpoint: its bytes differ; with the command that ends the run with its newest weights.
    """
    if fault := _fault(checkpoint, ranks, tell):
        raise BadCheckpoint(
            f"{checkpoint}, the best one so far, is damaged: {fault}; without it the run ends with its newest"
            f" weights, unless a better one comes: {_without([checkpoint], folder)}"
        )


def best_of(checkpoint: Path) -> str | None:
    """The name of the best checkpoint so far, as the host's state in this one tells."""
    state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    step = state.get("best_global_step")
    return f"{PREFIX}{step}" if step else None


def check_unchanged(folder: RunFolder, config: TrainConfig, facts: Mapping[str, str | None]) -> None:
    """What a run was begun with must be what it goes on with.

    Args:
        folder: the run folder, whose record holds the same facts of the beginning.
        config: the run.
        facts: hashes of "train_data", "eval_data" (None: there is none) and "weights" (None: not known).

    Raises:
        SpecMismatch: one differs.
    """
    data = folder.read().get("data", {})
    earlier = data.get("fingerprints") or {"train_data": data.get("fingerprint")}
    named = {"train_data": config.train_data, "eval_data": config.eval_data, "weights": config.model}
    for name, value in facts.items():
        before = earlier.get(name)
        if before is None or value is None or before == value:
            continue
        what = "the weights in" if name == "weights" else "the evaluation data" if not named[name] else ""
        place = f"{what} {named[name] or config.train_data}".strip()
        also = "" if name == "weights" else " or its tokenizer"
        raise SpecMismatch(
            f"{place}{also} has changed since the run in {folder.path} began; bring back what it was, or"
            " begin in another output_dir."
        )


def weights_of(model: str) -> str | None:
    """A hash of a model folder's weight files: sizes, headers and samples; None: it is no folder."""
    files = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(size * index // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest() if files else None


def _without(damaged: list[Path], folder: RunFolder) -> str:
    """The command line that removes checkpoints and goes on with the run."""
    names = " ".join(shlex.quote(str(path)) for path in damaged)
    return f"rm -r {names} && fewbits train {shlex.quote(str(folder.config))} --resume"


def _fault(checkpoint: Path, ranks: Ranks, tell: Tell | None = None) -> str | None:
    faults: list[Any] = ranks.exchange("damage", fault_of(checkpoint, ranks.rank, ranks.size))
    fault = next((str(fault) for fault in faults if fault), None)
    if fault is None and tell and not ranks.led("manifest", lambda: has_manifest(checkpoint)):
        tell(
            f"{checkpoint} has no {FILE} (an earlier version of fewbits wrote it): its files can be opened,"
            " but whether their bytes are those that were written cannot be seen."
        )
    return fault
