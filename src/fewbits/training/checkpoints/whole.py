"""A checkpoint that one process wrote, or ranks that each held the whole model, into a model of slices.

Every rank reads its slices of the weights and of the optimizer's state; no rank holds all of either in memory
(files are read by slices, or mapped).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from fewbits.decoder.fuse import load_scales
from fewbits.errors import BadCheckpoint, SpecMismatch
from fewbits.training.checkpoints.folders import MODEL_FILE, SCALES_FILE, TRAINABLE_FILE, misfit
from fewbits.training.checkpoints.sharded import fill_optimizer, tensors_of, whole_slices
from fewbits.training.checkpoints.whole_views import places_of, slice_like
from fewbits.training.ranks.fsdp import local, reshard

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

OPTIMIZER_FILE = "optimizer.pt"  # as the host calls it
_SCALES = ("m_scales", "v_scales")  # of AdamW8bit: of a whole parameter's blocks


def load_whole(folder: Path, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Put a whole checkpoint's weights, and the optimizer's state, into a sharded model; every rank calls.

    Raises:
        BadCheckpoint: a file is missing or damaged.
        SpecMismatch: it is of another model.
    """
    reshard(model)
    path = folder / (TRAINABLE_FILE if hasattr(model, "peft_config") else MODEL_FILE)
    target = tensors_of(model)
    try:
        with safe_open(str(path), "pt") as file, torch.no_grad():
            _check(folder, file, target)
            for name, tensor in target.items():
                part = _rows(file.get_slice(name), tensor) if tensor.dim() else file.get_tensor(name)
                local(tensor).copy_(part)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error
    if (folder / SCALES_FILE).is_file():
        load_scales(model, load_file(str(folder / SCALES_FILE)))
    if optimizer is not None:
        _load_optimizer(folder / OPTIMIZER_FILE, model, optimizer)


def _check(folder: Path, file: Any, target: Mapping[str, Tensor]) -> None:
    odd = sorted(target.keys() ^ set(file.keys()))
    odd = odd or sorted(n for n, t in target.items() if file.get_slice(n).get_shape() != list(t.shape))
    if odd:
        raise SpecMismatch(misfit(folder, odd[0], target, file.keys()))


@dataclass(frozen=True)
class _Chunk:
    """A slice that was: here the whole parameter."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class _Chunks:
    """The slices in which a moment was written."""

    chunks: tuple[_Chunk, ...]


def _load_optimizer(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise _damaged(path, error) from error
    state: dict[str, Any] = {}
    sizes: dict[str, _Chunks] = {}
    views = whole_slices(model, optimizer)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(numbers) != len(views):
        raise SpecMismatch(
            f"{path} steps {len(numbers)} parameters, and here {len(views)} train; resume with the"
            " configuration it was started with."
        )
    for number, (name, view) in zip(numbers, views, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            tensor, full_name = torch.as_tensor(value), f"optimizer.{name}.{key}"
            if key in _SCALES:
                full_name += "@" + "_".join("0" * view.dim())
            elif tensor.shape == view.shape and key != "step":
                sizes[full_name] = _Chunks((_Chunk((0,) * view.dim(), tuple(view.shape)),))
                tensor = slice_like(view, _rows(tensor, view).to(local(view).device))
            state[full_name] = tensor
    groups = [{k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]]
    fill_optimizer(model, optimizer, state, groups, sizes)


def _rows(whole: Any, view: Tensor) -> Tensor:
    """This rank's rows of a tensor, or of a file's."""
    pieces = []
    for offsets, sizes in places_of(view):
        index = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        pieces.append(whole[index])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _damaged(path: Path, error: Exception) -> BadCheckpoint:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return BadCheckpoint(
        f"{path} cannot be read ({reason}); remove {path.parent} to resume from the one before."
    )


__all__ = ["load_whole"]
