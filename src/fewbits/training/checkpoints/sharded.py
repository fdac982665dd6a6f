"""Checkpoints of models spread over ranks: each rank writes its slices, any number of ranks reads them.

The tensors are in torch.distributed.checkpoint's format, under ``sharded/``; what is small and not a tensor
(the optimizer's settings, the caller's own facts) is JSON beside it. Nothing is gathered: a slice is read by
whoever needs a part of it, so 2 ranks go on where 4 stopped, and one process without a process group too.

* With adapters the trained parameters are kept, without any all parameters and persistent buffers.
* `AdamW8bit`'s codes are slices as the parameters are; its scales, whose blocks begin at a slice's first
  value, stand beside them under the slice's place. Read by the same slices they come back to the bit; other
  slices decode what overlaps theirs and round it once more.
* Layers that ranks share (`fewbits.training.ranks.tensor_parallel`) are written as slices of the whole ones,
so
  that another way to share them, or none, goes on from there. Of linears that were cut part by part
  `AdamW8bit`'s moments are written in float32: their blocks go from one part into the next.
* Scales of delayed float8 are those of each rank; another number of ranks goes on from their maximum.

`export` writes one Hugging Face (or PEFT) folder, tensor by tensor: no rank holds the whole model, and rank 0
holds one file's worth of it in host memory.

Written whole or not at all: the caller gives the folder of `fewbits.training.checkpoints.folders.staged`, or
calls `write_sharded`, which does. A failure of one rank is an error in all of them.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed

from fewbits.decoder.fuse import load_scales, scales_of
from fewbits.errors import BadCheckpoint, SpecMismatch
from fewbits.kernels.optimizer.adamw import dequantize_moment, quantize_moment
from fewbits.kernels.optimizer.adamw_triton import BLOCK
from fewbits.models.folders.checkpoint import INDEX, WEIGHTS
from fewbits.training.checkpoints.folders import misfit, staged
from fewbits.training.checkpoints.manifest import Writers, fault_of, has_manifest
from fewbits.training.checkpoints.whole_views import gathered, pieces_of, places_of, slice_like, whole_views
from fewbits.training.optimizer import AdamW8bit
from fewbits.training.ranks.fsdp import local, place_of, reshard

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from transformers import PreTrainedTokenizerBase

_SCALES = ("m_scales", "v_scales")  # of AdamW8bit
FOLDER, FACTS = "sharded", "sharded.json"


def write_sharded(
    final: Path, model: nn.Module, optimizer: Optimizer | None = None, extra: Mapping[str, Any] | None = None
) -> None:
    """`save_sharded` into a folder that takes the name ``final`` when it is whole; every rank calls."""
    writers = Writers(_rank(), _world_size(), _everyones)
    with staged(final, leader=_rank() == 0, barrier=_barrier, writers=writers) as folder:
        save_sharded(folder, model, optimizer, extra)


def save_sharded(
    folder: Path, model: nn.Module, optimizer: Any = None, extra: Mapping[str, Any] | None = None
) -> None:
    """Write weights and the optimizer's state; every rank calls, with one folder that all of them see.

    Args:
        folder: where; it exists.
        model: sharded or not.
        optimizer: its optimizer, or None.
        extra: more facts, as JSON; rank 0's are kept.

    Raises:
        RuntimeError: some rank could not write; on every rank.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    reshard(model)
    optimizer = _inner(optimizer)
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in tensors_of(model).items()}
    if optimizer is not None:
        state |= _optimizer_state(model, optimizer)
    state |= {f"scales.{_rank()}.{name}": tensor for name, tensor in scales_of(model).items()}
    with _Together(f"{folder} could not be written"):
        save(state, checkpoint_id=str(folder / FOLDER), no_dist=not distributed.is_initialized())
    if _rank() == 0:
        groups = [] if optimizer is None else [_settings(group) for group in optimizer.param_groups]
        facts = {"ranks": _world_size(), "optimizer": groups, "extra": dict(extra or {})}
        (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        _save_configuration(model, folder)


def load_sharded(
    folder: Path, model: nn.Module, optimizer: Any = None, *, compare: bool = True
) -> dict[str, Any]:
    """Put a checkpoint's weights and the optimizer's state where they belong; every rank calls.

    Args:
        folder: what `save_sharded` wrote, with any number of ranks.
        model: of the same architecture and adapters, sharded in any way or not at all.
        optimizer: as in `save_sharded`.
        compare: first compare all bytes with the folder's manifest, if it has one.

    Returns:
        ``extra``.

    Raises:
        BadCheckpoint: the folder is no such checkpoint, or is damaged.
        SpecMismatch: it is of another model, or has no optimizer's state.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    reshard(model)
    optimizer = _inner(optimizer)
    if compare and has_manifest(folder):
        faults = _everyones(fault_of(folder, _rank(), _world_size()))
        if fault := next((fault for fault in faults if fault), None):
            raise BadCheckpoint(f"{folder} is damaged: {fault}; remove it to resume from the one before.")
    facts, sizes = _read(folder)
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in tensors_of(model).items()}
    _check(folder, state, sizes)
    if optimizer is not None:
        if not facts["optimizer"]:  # the settings of its groups; SGD has these and no tensor
            raise SpecMismatch(
                f"{folder} has no optimizer's state; load it without an optimizer to begin anew."
            )
        state |= _empty_optimizer_state(folder, model, sizes)
    ranks = [_rank()] if facts["ranks"] == _world_size() else range(facts["ranks"])
    scales = {k: v for k, v in sizes.items() if any(k.startswith(f"scales.{rank}.") for rank in ranks)}
    state |= {key: torch.empty(meta.size, dtype=meta.properties.dtype) for key, meta in scales.items()}
    with _Together(f"{folder} could not be read"), torch.no_grad():
        load(state, checkpoint_id=str(folder / FOLDER), no_dist=not distributed.is_initialized())
    if optimizer is not None:
        fill_optimizer(model, optimizer, state, facts["optimizer"], sizes)
    if scales:
        names = dict.fromkeys(key.split(".", 2)[2] for key in scales)
        by_name = {n: [t for k, t in state.items() if k in scales and k.endswith(f".{n}")] for n in names}
        load_scales(model, {name: torch.stack(each).amax(0) for name, each in by_name.items()})
    return dict(facts["extra"])


def is_sharded_checkpoint(folder: Path) -> bool:
    """True for a folder that `save_sharded` has written."""
    return (folder / FACTS).is_file()


# 1. What is kept.


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of the model, of any shape: what trains, with adapters; else all, once."""
    views = whole_views(model)
    if hasattr(model, "peft_config"):
        return {name: views[name] for name, p in model.named_parameters() if p.requires_grad}
    persistent = model.state_dict().keys()
    return {**views, **{name: b.detach() for name, b in model.named_buffers() if name in persistent}}


def _inner(optimizer: Optimizer) -> Any:
    """The optimizer in accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _named(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, parameter, and the parameter as a slice of the whole one."""
    names, views = {id(p): name for name, p in model.named_parameters()}, whole_views(model)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in names:
                raise SpecMismatch(
                    "the optimizer steps a parameter that the model does not have; make it after the model is"
                    " sharded."
                )
            yield names[id(param)], param, views[names[id(param)]]


def whole_slices(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """Names of the parameters that an optimizer steps, in its order; each (n,), a slice of the whole one."""
    return [(name, view) for name, _, view in _named(model, _inner(optimizer))]


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Every tensor of the state under its parameter's name; moments are sliced as the parameter is."""
    state: dict[str, Tensor] = {}
    for name, param, view in _named(model, optimizer):
        held = optimizer.state.get(param, {})
        in_pieces = pieces_of(view) is not None
        for key, value in held.items():
            tensor = torch.as_tensor(value)
            if key in _SCALES:
                if tensor.numel() and not in_pieces:
                    state[f"optimizer.{name}.{key}{_place(view)}"] = tensor
            elif key == "step":
                state[f"optimizer.{name}.{key}"] = tensor
            else:
                part = local(tensor)
                if in_pieces and part.dtype == torch.uint8:
                    part = dequantize_moment(part, held[f"{key}_scales"], signed=key == "m").view(part.shape)
                state[f"optimizer.{name}.{key}"] = slice_like(view, part)
    return state


def _place(view: Tensor) -> str:
    return "@" + "_".join(map(str, place_of(view)[0]))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    plain = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
    return {k: v for k, v in plain.items() if isinstance(v, (int, float, str, list, tuple, type(None)))}


def _save_configuration(model: Any, folder: Path) -> None:
    if hasattr(model, "peft_config"):
        for config in model.peft_config.values():
            config.save_pretrained(str(folder))
    else:
        model.config.save_pretrained(str(folder))


# 2. Reading.


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts, and shape and dtype of every tensor."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        metadata = FileSystemReader(str(folder / FOLDER)).read_metadata()
    except (OSError, ValueError, EOFError, RuntimeError) as error:
        raise BadCheckpoint(
            f"{folder} holds no sharded checkpoint, or was damaged ({type(error).__name__}: {error}); remove"
            " it to resume from the one before."
        ) from error
    return facts, dict(metadata.state_dict_metadata)


def _check(folder: Path, state: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> None:
    stored = {key for key in sizes if key.startswith("model.")}
    odd = sorted(stored ^ state.keys())
    odd = odd or sorted(key for key in state if tuple(sizes[key].size) != tuple(state[key].shape))
    if odd:
        raise SpecMismatch(misfit(folder, odd[0].removeprefix("model."), state, stored))


def _empty_optimizer_state(folder: Path, model: nn.Module, sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    stored = {key: meta for key, meta in sizes.items() if key.startswith("optimizer.")}
    params = whole_views(model)
    state = {}
    for key, meta in stored.items():
        name = key.removeprefix("optimizer.").rpartition(".")[0]
        if name not in params:
            raise SpecMismatch(
                f"{folder} has the state of an optimizer of another model ({name} is not here)."
            )
        param, dtype = params[name], meta.properties.dtype
        if tuple(meta.size) == tuple(param.shape) and not key.endswith(".step"):
            state[key] = slice_like(param, torch.empty_like(local(param), dtype=dtype))
        else:
            state[key] = torch.empty(meta.size, dtype=dtype)
    return state


def fill_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Tensor],
    groups: list[Any],
    sizes: Mapping[str, Any],
) -> None:
    """Give the optimizer its settings and state.

    A moment is of the shape of this rank's slice of its parameter.

    Args:
        model: its model.
        optimizer: what steps it.
        state: "optimizer.<parameter>.<key>": tensors, moments as slices of this rank.
        groups: the settings of each group.
        sizes: for each moment the ``chunks`` that it was written in (of `AdamW8bit`).
    """
    optimizer = _inner(optimizer)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    # fused and captured steps read their number on the device
    on_device = {
        id(p): bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for name, param, view in _named(model, optimizer):
        prefix = f"optimizer.{name}."
        if f"{prefix}step" not in state:
            continue  # it had no gradient yet
        held: dict[str, Any] = {
            k.rpartition(".")[2]: t for k, t in state.items() if k.rpartition(".")[0] + "." == prefix
        }
        if isinstance(optimizer, AdamW8bit):
            packs = param.numel() >= optimizer.min_8bit_size
            held = {"step": int(held["step"]), **_moments(held, view, sizes[f"{prefix}m"].chunks, packs)}
        else:  # sliced as the optimizer has made them, on this rank's own mesh
            same = {k: slice_like(param, local(t)) for k, t in held.items() if t.shape == view.shape}
            held |= {k: t for k, t in same.items() if k != "step"}
            if on_device[id(param)]:
                held["step"] = held["step"].to(param.device)
        optimizer.state[param] = held


def _moments(held: Mapping[str, Tensor], view: Tensor, chunks: Any, packs: bool) -> dict[str, Tensor]:
    """`AdamW8bit`'s moments of this rank's slice, from codes of it and the scales of the slices that were.

    Those in float32, which pieces of linears are written in, are packed if this optimizer packs them.
    """
    places = places_of(view)
    moments: dict[str, Tensor] = {}
    for key in ("m", "v"):
        codes = local(held[key])
        moments[key] = codes
        if codes.dtype != torch.uint8:
            if packs and codes.numel():
                moments[key], moments[f"{key}_scales"] = quantize_moment(codes, signed=key == "m")
            continue
        if not codes.numel():
            moments[f"{key}_scales"] = torch.zeros(0, device=codes.device, dtype=torch.float32)
            continue
        ones = torch.ones(-(-codes.numel() // BLOCK), device=codes.device, dtype=torch.float32)
        values = dequantize_moment(codes, ones, signed=key == "m").view(codes.shape)
        moment = torch.empty_like(values)
        rows = [shape[0] for _, shape in places] if len(places) > 1 else [len(values)]
        for chunk in chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            scales = held.get(f"{key}_scales@" + "_".join(map(str, offsets)))
            if scales is None:
                continue  # an empty slice
            if ((offsets, sizes),) == places:
                moments[f"{key}_scales"] = scales.to(codes.device)
                break
            each = scales.to(codes.device).repeat_interleave(BLOCK)[: math.prod(sizes)].view(sizes)
            for place, piece, into in zip(places, values.split(rows), moment.split(rows), strict=True):
                mine, theirs = _overlap(*place, offsets, sizes)
                into[mine] = piece[mine] * each[theirs]
        else:
            moments[key], moments[f"{key}_scales"] = quantize_moment(moment, signed=key == "m")
    return moments


def _overlap(
    place: tuple[int, ...], shape: tuple[int, ...], other: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """What two slices of one tensor share, as indices of the first and of the second."""
    mine, theirs = [], []
    for a, n, b, m in zip(place, shape, other, sizes, strict=True):
        begin, end = max(a, b), max(min(a + n, b + m), max(a, b))
        mine.append(slice(begin - a, end - a))
        theirs.append(slice(begin - b, end - b))
    return tuple(mine), tuple(theirs)


# 3. One folder of it all.


def export(
    model: Any,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write the model as one Hugging Face folder, or its adapters as PEFT's; every rank calls.

    Args:
        model: sharded or not.
        folder: where; it exists. Rank 0 writes.
        tokenizer: goes there too.
        shard_bytes: size of a file, which rank 0 holds in host memory.
    """
    reshard(model)
    if hasattr(model, "peft_config"):
        adapters = dict(_gathered(model, adapters_only=True))
        if _rank() == 0:
            model.save_pretrained(str(folder), state_dict=adapters, save_embedding_layers=False)
    else:
        _export_whole(model, folder, shard_bytes)
    if _rank() == 0 and tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def _gathered(model: nn.Module, *, adapters_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer, whole; on the host of rank 0, elsewhere empty."""
    persistent = model.state_dict().keys()
    buffers = [] if adapters_only else [(n, b) for n, b in model.named_buffers() if n in persistent]
    views, trained = whole_views(model), {n for n, p in model.named_parameters() if p.requires_grad}
    for name, tensor in [*views.items(), *buffers]:
        marks = (".lora_", ".modules_to_save.")
        if adapters_only and name not in trained and not any(mark in name for mark in marks):
            continue
        whole = gathered(tensor)
        yield name, whole.cpu() if _rank() == 0 else whole.new_empty(0)


def _export_whole(model: Any, folder: Path, shard_bytes: int) -> None:
    held: dict[str, Tensor] = {}
    files: list[list[str]] = []
    total = 0

    def write() -> None:
        save_file(held, str(folder / f"part-{len(files)}"), metadata={"format": "pt"})
        files.append(list(held))
        held.clear()

    for name, tensor in _gathered(model):
        if _rank() == 0:
            if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > shard_bytes:
                write()
            held[name] = tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
            total += tensor.nbytes
    if _rank() != 0:
        return
    write()
    weight_map = {}
    for number, names in enumerate(files):
        final = WEIGHTS if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(str(folder))
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(str(folder))


# 4. Ranks.


class _Together:
    """An error of any rank, which torch tells to all of them, with one sentence and its cause."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from torch.distributed.checkpoint.api import CheckpointException

        if isinstance(error, CheckpointException):
            rank, (cause, _) = next(iter(error.failures.items()))
            raise RuntimeError(f"{self.what}: rank {rank} had {type(cause).__name__}: {cause}") from cause


def _rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def _world_size() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def _everyones(value: Any) -> list[Any]:
    """What each rank has, by rank."""
    if not distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * _world_size()
    distributed.all_gather_object(values, value)
    return values


def _barrier() -> None:
    if distributed.is_initialized():
        distributed.barrier()


__all__ = ["export", "is_sharded_checkpoint", "load_sharded", "save_sharded", "write_sharded"]
