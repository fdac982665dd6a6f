"""A model's weights back from a checkpoint, whole or sharded, and into one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fewbits.training.checkpoints.folders import load_weights, save_weights

if TYPE_CHECKING:
    from torch.optim import Optimizer


def read_weights(model: nn.Module, folder: Path, optimizer: Optimizer | None = None) -> None:
    """Put a checkpoint's weights into the model; where either is sharded the optimizer's state, too.

    Raises:
        BadCheckpoint, SpecMismatch: it is damaged, or of another model.
    """
    from fewbits.training.checkpoints.sharded import is_sharded_checkpoint, load_sharded

    if is_sharded_checkpoint(folder):
        load_sharded(folder, model, optimizer, compare=False)  # run_folder/resume.py has done so
    elif has_shards(model):
        from fewbits.training.checkpoints.whole import load_whole

        load_whole(folder, model, optimizer)
    else:
        load_weights(model, folder)


def write_weights(model: nn.Module, folder: Path, optimizer: Optimizer, *, leads: bool) -> None:
    """Write the weights into a checkpoint, of a sharded model the optimizer too; every rank calls."""
    if has_shards(model):
        from fewbits.training.checkpoints.sharded import save_sharded

        save_sharded(folder, model, optimizer)
    elif leads:
        save_weights(model, folder)


def write_copies(model: nn.Module, folder: Path, copies: Mapping[str, Tensor]) -> None:
    """`write_weights` of adapters that train on, from ``copies`` of them on the host, in the same shapes."""
    save_weights(model, folder, copies)


def has_shards(model: nn.Module) -> bool:
    """Whether a rank holds parts of the parameters only."""
    from fewbits.training.ranks.fsdp import is_sharded
    from fewbits.training.ranks.tensor_parallel import tensor_parallel_of

    return tensor_parallel_of(model) is not None or is_sharded(model)
