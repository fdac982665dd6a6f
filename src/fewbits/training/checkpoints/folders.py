"""Folders and files that appear complete or not at all, and the weights and counters a run resumes from.

A checkpoint is written into a hidden sibling folder, every file and the folder are brought to the disk
(fsync), and one rename gives it its name; only then are older ones removed. So what is named ``checkpoint-N``
was whole when it was written; its manifest (`fewbits.training.checkpoints.manifest`) tells whether it still
is.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fewbits.decoder.fuse import load_scales, scales_of
from fewbits.errors import BadCheckpoint, SpecMismatch, TrainingStopped
from fewbits.models.folders.whole_folder import fsync, give_the_umasks_mode, is_disk_full, sync, take_place
from fewbits.training.checkpoints.manifest import PROMISE, Writers, write_manifest
from fewbits.training.ranks.processes import is_broken_connection

PREFIX = "checkpoint-"
PROGRESS_FILE = "fewbits.json"
SCALES_FILE = "float8_scales.safetensors"
TRAINABLE_FILE = "trainable.safetensors"
MODEL_FILE = "model.safetensors"
_WRITING, _OLD, _REPLACED = ".writing", ".old", ".replaced"


@dataclass
class Progress:
    """What a run counts besides the host's own state; each checkpoint keeps it."""

    tokens: int = 0
    seconds: float = 0.0
    evaluations_without_gain: int = 0
    stopped_early: bool = False

    def save(self, folder: Path) -> None:
        """Write into a checkpoint."""
        facts = {**asdict(self), PROMISE: True}
        (folder / PROGRESS_FILE).write_text(json.dumps(facts), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Progress:
        """Read from a checkpoint."""
        try:
            facts = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
            return cls(
                tokens=int(facts["tokens"]),
                seconds=float(facts["seconds"]),
                evaluations_without_gain=int(facts["evaluations_without_gain"]),
                stopped_early=bool(facts["stopped_early"]),
            )
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise BadCheckpoint(
                f"{folder} is not a checkpoint of this library or was damaged; remove it to resume from the"
                " one before."
            ) from error


def write_atomic(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a crash, sees the old text or the new one."""
    beside = path.with_name(f".{path.name}{_WRITING}")
    beside.write_text(text, encoding="utf-8")
    fsync(beside)
    beside.replace(path)
    fsync(path.parent)


def _nothing() -> None:
    pass


@contextmanager
def staged(
    final: Path,
    *,
    leader: bool = True,
    barrier: Callable[[], None] = _nothing,
    writers: Writers | None = None,
) -> Iterator[Path]:
    """A folder to write into, which takes the name ``final`` when the block ends well and vanishes otherwise.

    Args:
        final: the folder's name in the end; one that exists is replaced.
        leader: whether this process makes and names the folder, where several write into it.
        barrier: waits for the other processes.
        writers: the processes, where the folder gets a manifest; None: it gets none.
    """
    staging = final.with_name(f".{final.name}{_WRITING}")
    try:
        if leader:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        barrier()
        yield staging
        barrier()
        if writers is not None:
            write_manifest(staging, writers)
        if leader:
            _publish(staging, final)
        barrier()
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        if is_broken_connection(error):  # another rank is gone: the disk has nothing to do with it
            raise
        names = ", ".join(path.name for path in checkpoints(final.parent)) or "none yet"
        reason, way_out = _why(error)
        raise TrainingStopped(
            f"{final} could not be written because {reason}; the checkpoints before it are whole ({names}):"
            f" {way_out}, then go on with resume."
        ) from error


def _publish(staging: Path, final: Path) -> None:
    give_the_umasks_mode(staging)
    sync(staging)
    old = take_place(staging, final, aside=final.with_name(f".{final.name}{_REPLACED}"))
    fsync(final.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _why(error: BaseException) -> tuple[str, str]:
    """The reason, and what to do about it; room is made only where the disk has said that it is full."""
    if is_disk_full(error):
        return "the disk is full", "make room"
    # torch's writer of zip files does not pass on the system's reason.
    if any(name in str(error) for name in ("PytorchStreamWriter", "inline_container")):
        return "the disk took no more bytes", "see whether it is full or failing"
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"of {type(error).__name__}: {first}", "mend that"


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    numbered = [
        (int(m[1]), path) for path in folder.iterdir() if (m := re.fullmatch(rf"{PREFIX}(\d+)", path.name))
    ]
    return [path for _, path in sorted(numbered)]


def step_of(checkpoint: Path) -> int:
    """The optimizer step at which it was written."""
    return int(checkpoint.name.removeprefix(PREFIX))


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed run left half written."""
    for path in folder.glob(".*") if folder.is_dir() else ():
        if path.name.endswith(_REPLACED) and path.is_dir():
            place = path.with_name(path.name.removeprefix(".").removesuffix(_REPLACED))
            if not place.exists():  # killed before the new folder had its name: the old one has it again
                path.rename(place)
                continue
        if path.name.endswith((_WRITING, _OLD, _REPLACED)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def rotate(folder: Path, keep: int, best_step: int | None) -> None:
    """Remove all but the newest ``keep`` checkpoints and the best one."""
    for path in checkpoints(folder)[:-keep]:
        if step_of(path) != best_step:
            doomed = path.with_name(f".{path.name}{_OLD}")
            path.rename(doomed)  # first the name: a half removed checkpoint must not look like a whole one
            shutil.rmtree(doomed, ignore_errors=True)


def save_weights(model: Any, folder: Path, copies: Mapping[str, Tensor] | None = None) -> None:
    """The trained weights; with adapters also the files that PEFT loads, without any the whole model.

    Args:
        model: the model.
        folder: where to write.
        copies: of a model with `only_lora`, whose adapters train on meanwhile: what `trainable` gave, in the
            same shapes, on the host. Scales are written before, by `save_scales`.
    """
    if hasattr(model, "peft_config"):
        options: dict[str, Any] = {} if copies is None else {"state_dict": {**copies}}
        model.save_pretrained(str(folder), save_embedding_layers=False, **options)
        weights, name = trainable(model) if copies is None else copies, TRAINABLE_FILE
    else:
        model.config.save_pretrained(str(folder))
        weights, name = _whole(model), MODEL_FILE
    cpu = {key: tensor.detach().contiguous().cpu() for key, tensor in weights.items()}
    save_file(cpu, str(folder / name), metadata={"format": "pt"})
    if copies is None:
        save_scales(model, folder)


def only_lora(model: nn.Module, trained: Mapping[str, Tensor] | None = None) -> bool:
    """Whether PEFT's files of a model hold parameters of LoRA alone, which are known by their names.

    Args:
        model: the model.
        trained: what `trainable` gives for it, of any shape; that takes a walk. None: to be asked.
    """
    configs = list(getattr(model, "peft_config", {}).values())
    plain = [
        getattr(config.peft_type, "value", config.peft_type) == "LORA"
        and config.bias == "none"
        and not (config.modules_to_save or getattr(config, "trainable_token_indices", None))
        for config in configs
    ]
    if len(plain) != 1 or not all(plain):
        return False
    return all("lora_" in name for name in (trainable(model) if trained is None else trained))


def save_scales(model: nn.Module, folder: Path) -> None:
    """The scales of float8 products, where a model records any."""
    scales = scales_of(model)
    if scales:
        save_file(scales, str(folder / SCALES_FILE))


def load_weights(model: nn.Module, folder: Path) -> None:
    """Put a checkpoint's weights into the model; every one must be there and fit."""
    adapters = hasattr(model, "peft_config")
    path = folder / (TRAINABLE_FILE if adapters else MODEL_FILE)
    try:
        stored = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise BadCheckpoint(
            f"{path} cannot be read ({str(error).splitlines()[0]}); remove {folder} to resume from the one"
            " before."
        ) from error
    target = trainable(model) if adapters else _whole(model)
    odd = sorted(target.keys() ^ stored.keys())
    odd = odd or sorted(key for key in target if target[key].shape != stored[key].shape)
    if odd:
        raise SpecMismatch(misfit(folder, odd[0], target, stored))
    with torch.no_grad():
        for key, tensor in target.items():
            tensor.copy_(stored[key])
    if (folder / SCALES_FILE).is_file():
        load_scales(model, load_file(str(folder / SCALES_FILE)))


def misfit(folder: Path, odd: str, target: Iterable[str], stored: Iterable[str]) -> str:
    """Why a checkpoint is not of a model, in a sentence: where each has adapters, if that is not the same.

    Args:
        folder: the checkpoint.
        odd: the name of a weight that does not fit.
        target: names of the model's weights.
        stored: names of the checkpoint's.
    """
    now, then = _adapted(target), _adapted(stored)
    if not then or now == then or "experts" in then:  # which lora_targets does not take by this name
        return (
            f"{folder} was written for another model or other adapters ({odd} does not fit); resume with the"
            " configuration it was started with."
        )
    why = ": all-linear has come to mean the routed experts, too" if now - then == {"experts"} else ""
    return (
        f"{folder} has adapters on {', '.join(sorted(then))}, and the model on {', '.join(sorted(now))}{why};"
        f" set lora_targets: [{', '.join(sorted(then))}] in the config.yaml of the run, and resume with that"
        " file."
    )


def _adapted(names: Iterable[str]) -> set[str]:
    """The last names of the layers that have LoRA adapters; experts may have several in one."""
    layers = (name.partition(".lora_A.")[0] for name in names if ".lora_A." in name)
    return {layer.replace(".base_layer", "").rpartition(".")[2] for layer in layers}


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that train, of any shape, by their names."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _whole(model: nn.Module) -> dict[str, Tensor]:
    """The state without the second name of tied weights."""
    pointers: set[tuple[int, torch.Size]] = set()
    state = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and key in pointers:
            continue
        pointers.add(key)
        state[name] = tensor
    return state
