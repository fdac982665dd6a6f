"""The checkpoint that a model was loaded from: where it lies, and if its weights are the original ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.errors import FewbitsError
from fewbits.models.folders.checkpoint import Checkpoint, inspect_folder

if TYPE_CHECKING:
    from torch import nn


def source_folder(model: nn.Module) -> Path | None:
    """The folder a model was loaded from, also in the hub's cache; None if there is none any more."""
    where = str(getattr(model.config, "name_or_path", "") or "")
    if not where:
        return None
    if Path(where).is_dir():
        return Path(where)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(where, local_files_only=True))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def files_read(model: nn.Module) -> list[Path]:
    """What a model was loaded from, and no export overwrites: its folder or its GGUF file; none if gone."""
    where = str(getattr(model.config, "name_or_path", "") or "")
    if where and Path(where).is_file():
        return [Path(where)]
    folder = source_folder(model)
    return [] if folder is None else [folder]


def original_of(model: nn.Module) -> tuple[Checkpoint | None, str]:
    """The unquantised checkpoint that the model was loaded from, or None and the reason."""
    where = str(getattr(model.config, "name_or_path", "") or "")
    if where and Path(where).is_file():
        return None, f"{where} is a GGUF file"
    folder = source_folder(model)
    if folder is None:
        return None, f"the original {where} is gone" if where else "the model was not loaded from a folder"
    try:
        checkpoint = inspect_folder(folder, remote_code=True)
    except FewbitsError as error:
        return None, str(error)
    if checkpoint.quant_method is not None:
        return None, f"{folder} is itself quantised"
    return checkpoint, ""
