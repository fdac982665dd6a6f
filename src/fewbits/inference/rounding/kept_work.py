"""What long work has done is kept beside its destination: the same call goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fewbits.errors import BadCheckpoint, BadInput
from fewbits.models.folders.checkpoint import inspect_folder

_STATE, LOSSES = "state.json", "losses.json"
_OURS = re.compile(r"(layer-\d{5}|state|losses)\.(safetensors|json|partial)$")


class KeptWork:
    """What is done, beside the destination, until all is.

    Args:
        target: the destination.
        fingerprint: what the call is known by; what another call has kept is removed.
        suffix: of the folder's name.
    """

    def __init__(self, target: Path, fingerprint: str, *, suffix: str = ".calibration") -> None:
        target = target.resolve() if target.is_dir() else target.absolute()  # "." has no name of its own
        self.folder = target.with_name(target.name + suffix)
        state = self.folder / _STATE
        if self.folder.exists() and self._of(state) != fingerprint:
            self.remove()  # of another call
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = state.with_suffix(".partial")
        partial.write_text(json.dumps({"of": fingerprint}) + "\n", encoding="utf-8")
        partial.replace(state)

    def _of(self, state: Path) -> str:
        """What the work in the folder is of; "" if that cannot be told."""
        try:
            return str(json.loads(state.read_text(encoding="utf-8"))["of"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def layer(self, number: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """A layer's tensors, weights (N, K) or their parts, and errors; None if it is still to be done."""
        file = self._file(number)
        if not file.is_file():
            return None
        try:
            numbers: dict[str, Any] = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
            return load_file(file), numbers
        except (OSError, ValueError, SafetensorError) as error:
            raise BadCheckpoint(
                f"{file} cannot be read ({type(error).__name__}); remove {self.folder} and start again."
            ) from error

    def save(self, number: int, tensors: Mapping[str, Tensor], numbers: dict[str, Any]) -> None:
        """Keep a finished layer: the tensors come last, by one rename, so that what is there is whole.

        Args:
            number: of the layer.
            tensors: weights (N, K) or their parts, and what else the layer has, by name.
            numbers: its errors, which belong to no other tensors than these.
        """
        file = self._file(number)
        file.with_suffix(".json").write_text(json.dumps(numbers), encoding="utf-8")
        partial = file.with_suffix(".partial")
        save_file({n: t.contiguous() for n, t in tensors.items()}, partial)
        partial.replace(file)

    def remove(self) -> None:
        """Take away what was kept, and nothing else.

        Raises:
            BadInput: there is something else in the folder.
        """
        try:
            others = [path.name for path in self.folder.iterdir() if not _OURS.match(path.name)]
        except OSError as error:
            raise BadInput(f"{self.folder} cannot be read ({error.strerror}); move it away.") from error
        if others:
            raise BadInput(
                f"{self.folder}, where the work is kept, holds {min(others)}, which is none of it; move that"
                " away, or choose another destination."
            )
        shutil.rmtree(self.folder)

    def _file(self, number: int) -> Path:
        return self.folder / f"layer-{number:05d}.safetensors"


def fingerprint(source: Any, format: str, method: str, windows: Tensor) -> str:
    """What a call is known by: the files of its source, its format and method, its text (windows, T)."""
    facts = [
        folder_facts(source),
        format,
        method,
        hashlib.sha256(windows.numpy().tobytes()).hexdigest(),
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def folder_facts(folder: Any) -> str:
    """Where a model folder lies and what its files are, so that one put in its place is told from it."""
    files = [*inspect_folder(folder).files, *sorted(Path(folder).glob("*.json"))]
    stats = [(file.name, file.stat()) for file in files]
    of_files = (f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    return "\n".join([str(Path(folder).resolve()), *of_files])
