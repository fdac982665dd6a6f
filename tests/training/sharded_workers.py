"""What the ranks of tests/training/test_sharded_checkpoint.py run."""

from __future__ import annotations

import resource
import signal
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fewbits.errors import TrainingStopped
from fewbits.formats import INT8, NF4, NF4_DQ
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes.recipe import LoRA, Recipe, Rule
from fewbits.training.checkpoints.sharded import export, load_sharded, write_sharded
from fewbits.training.optimizer import AdamW8bit
from fewbits.training.ranks.fsdp import local_bytes, shard
from fewbits.training.ranks.sharded_loading import load_sharded_model
from tests.training.fsdp_workers import build, full, mean_over_ranks, own_rows, train

KINDS = ("nf4_dq", "full")


def optimizer_of(kind: str, model: Any) -> Any:
    """8-bit moments over adapters, torch's AdamW over whole models."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return (
        AdamW8bit(trained, lr=1e-2, min_8bit_size=16)
        if kind == "nf4_dq"
        else torch.optim.AdamW(trained, lr=1e-2)
    )


def write(folder: str) -> dict[str, Any]:
    """Two steps, a checkpoint, two more; and an export."""
    found = {}
    for kind in KINDS:
        model = build(kind)
        shard(model)
        optimizer = optimizer_of(kind, model)
        train(model, 2, own_rows(), optimizer)
        with torch.no_grad():  # leaves the root's parameters gathered
            model(input_ids=torch.ones(1, 4, dtype=torch.long))
        path = Path(folder) / kind
        write_sharded(path / "checkpoint-2", model, optimizer, {"step": 2})
        saved = full(model)
        (path / "hf").mkdir(exist_ok=True)
        export(model, path / "hf", shard_bytes=20_000)
        losses, _ = train(model, 2, own_rows(), optimizer)
        found[kind] = {"saved": saved, "losses": losses, "weights": full(model)}
        found[kind]["error"] = failed_write(path / "checkpoint-4", model, optimizer)
    return found


def failed_write(final: Path, model: Any, optimizer: Any) -> str:
    """What a checkpoint ends with when the last rank's disk takes no more."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if distributed.get_rank() == distributed.get_world_size() - 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails with EFBIG, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        write_sharded(final, model, optimizer)
    except TrainingStopped as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "it was written"


def resume(folder: str) -> dict[str, Any]:
    """From that checkpoint, in a model with other numbers, two steps."""
    found = {}
    for kind in KINDS:
        model = build(kind)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(1)
        shard(model)
        optimizer = optimizer_of(kind, model)
        optimizer.param_groups[0]["lr"] = 7.0
        extra = load_sharded(Path(folder) / kind / "checkpoint-2", model, optimizer)
        loaded = full(model)
        losses, _ = train(model, 2, own_rows(), optimizer)
        found[kind] = {"loaded": loaded, "losses": losses, "weights": full(model), "extra": extra}
    return found


RECIPES = {"nf4": NF4, "nf4_dq": NF4_DQ, "int8": INT8}
SEEDS = {"int8": 7}  # of adapters; 0 for the others


def load(folder: str, steps: int) -> dict[str, Any]:
    """Models read by slices: their parameters, what a step makes of them."""
    found = {}
    for kind in (*RECIPES, "packed", "full"):
        recipe = Recipe(name=kind, linear=Rule(weight=RECIPES[kind])) if kind in RECIPES else None
        model, receipt = load_sharded_model(
            f"{folder}/{'packed' if kind == 'packed' else 'plain'}",
            recipe=recipe,
            lora=None if kind == "full" else LoRA(r=4),
            dtype=torch.float32,
            seed=SEEDS.get(kind, 0),
        )
        parameters = full(model, trained=False)
        share = local_bytes(model) / sum(p.nbytes for p in parameters.values())
        losses, _ = train(model, steps, own_rows())
        found[kind] = {"parameters": parameters, "share": share, "receipt": str(receipt)}
        found[kind]["losses"] = mean_over_ranks(losses)
    return found


class Allocations(TorchDispatchMode):
    """Bytes of host tensors that live while it is on, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.bytes = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                self.note(tensor.untyped_storage())
        return result

    def note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.bytes += size
            self.most = max(self.most, self.bytes)
            weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.bytes -= size


def peak(config: Any) -> dict[str, Any]:
    """Bytes of tensors that a random model took at most, what it then holds, its largest weight and all."""
    with Allocations() as allocations:
        model, _ = load_sharded_model(
            config, recipe=Recipe(name="nf4", linear=Rule(weight=NF4)), lora=LoRA(r=4)
        )
    dense = [2 * m.in_features * m.out_features for m in model.modules() if isinstance(m, QuantizedLinear)]
    return {"most": allocations.most, "held": local_bytes(model), "largest": max(dense), "dense": sum(dense)}
