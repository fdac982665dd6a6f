"""`shard`: FSDP2 over a model as it is, packed weights, adapters, fused decoder and all.

Every decoder layer is one group, the embedding another, the rest (final norm, output head) the root's. Each
rank holds a slice along the first axis of every parameter: codes and scales of packed weights too, as they
are, so that a layer travels in the bits that it is stored in: 4.5 a weight in NF4, 4.1 with the double
quantisation of qlora_nf4. What the fused nodes read in their forward and backward passes are the gathered
tensors, which FSDP2 fills again under the same storage before the backward pass.

* Parts of different dtypes travel in one all-gather, as bytes; parameters that train must have one dtype
  within a group, because their gradients are reduced together.
* Adapters are sharded like all else: their gradients are averaged by the same reduce-scatter.
* Uneven slices are padded by FSDP2 while they travel. A frozen vector shorter than there are ranks (the one
  offset of a double-quantised weight) stays whole on all of them.
* `compute_dtype` casts what is gathered (float32 weights that train, bfloat16 products); with packed weights
  it is refused, because it would cast their scales.

The tests run it over gloo; a 70B shape was trained with it on two H200s (docs/guide/several-gpus.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fewbits.errors import Unsupported
from fewbits.host.receipt import Change, Receipt
from fewbits.host.record import part_of, put_part
from fewbits.host.sharding import Sharding
from fewbits.host.spec import find, layer_names, locate, spec_for
from fewbits.nn.experts import QuantizedExperts
from fewbits.nn.linear import QuantizedLinear


def shard(
    model: Any,
    mesh: Any = None,
    *,
    reshard_after_forward: bool = True,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    float8_all_gather: bool = False,
) -> Receipt:
    """Spread the parameters over the ranks of ``mesh`` (FSDP2), in place; before the optimizer is made.

    Args:
        model: the module that is called in training: with adapters the PeftModel itself, which calls what is
            inside it past FSDP2's hooks. One on the meta device stays there.
        mesh: a device mesh of one dimension, or of two (replicas, shards); None: all ranks.
        reshard_after_forward: gather each layer again for the backward pass; False keeps it.
        compute_dtype: what float parameters are cast to while they travel.
        reduce_dtype: in which gradients are averaged; None: their own.
        float8_all_gather: the weights of linears that train travel in E4M3
            (`fewbits.training.ranks.float8_gather`).

    Returns:
        What is sharded how; its notes say how many bytes stay on this rank.

    Raises:
        Unsupported: the model is sharded already, or lies on several devices, or a group has trained
            parameters of several dtypes, or ``compute_dtype`` would cast packed scales.
    """
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    mesh = data_mesh() if mesh is None else mesh
    groups = _groups(model)
    _refuse(model, groups, compute_dtype)
    whole = _bytes(model)
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype),
        "ignored_params": _whole(model, mesh),
    }
    copies, ranks = (mesh.shape[0] if mesh.ndim > 1 else 1), mesh.shape[-1]
    how = f"sharded over {ranks} ranks" if copies == 1 else f"in {copies} copies over {ranks} ranks each"
    receipt = Receipt(f"{spec_for(model).model_type}, {how} (FSDP2)")
    receipt.changes.extend(_group_change(name, groups) for name in groups)
    whole_numbers = _view_as_floats(model)
    for name, module in groups.items():
        fully_shard(module, reshard_after_forward=reshard_after_forward and name != "", **options)
    _view_as_whole_numbers(model, whole_numbers)
    put_part(model, Sharding(receipt, stays_gathered=not reshard_after_forward))
    for module in groups.values():
        if isinstance(module, nn.Embedding) and not module.weight.requires_grad:
            module.set_unshard_in_backward(False)  # type: ignore[operator]
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")
    if float8_all_gather:
        from fewbits.training.ranks.float8_gather import gather_in_float8

        receipt.notes.append(gather_in_float8(model))
    receipt.notes.append(
        f"parameters: {whole / 2**20:,.2f} MiB in all, {local_bytes(model) / 2**20:,.2f} MiB on this rank"
    )
    return receipt


def _whole(model: nn.Module, mesh: Any) -> set[nn.Parameter]:
    """Frozen vectors of which some ranks would hold nothing: whole, on the ranks' device."""
    parameters = {
        p for p in model.parameters() if not p.requires_grad and p.dim() < 2 and p.numel() < mesh.shape[-1]
    }
    for p in parameters:
        p.data = p.data if p.is_meta else p.data.to(mesh.device_type)
    return parameters


# Torch 2.11 makes each sharded parameter with a gradient first and takes it away after, which only floats may
# have: codes are floats of as many bytes while `fully_shard` looks at them. It takes up what stands in a
# module's place when the first pass begins.
_FLOATS = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def _view_as_floats(model: nn.Module) -> dict[str, torch.dtype]:
    """Parameters of whole numbers become views of floats; their names and dtypes."""
    dtypes = {name: p.dtype for name, p in model.named_parameters() if not p.is_floating_point()}
    for name, dtype in dtypes.items():
        data = model.get_parameter(name).data
        _set_parameter(model, name, data.view(_FLOATS[dtype.itemsize]))
    return dtypes


def _view_as_whole_numbers(model: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """What `_view_as_floats` found, sharded since, has its own dtype again."""
    from torch.distributed.tensor import DTensor

    for name, dtype in dtypes.items():
        p: Any = model.get_parameter(name)
        part = p.to_local().view(dtype).clone()  # with a storage of its own FSDP2 sees that it is another
        whole = DTensor.from_local(
            part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )
        _set_parameter(model, name, whole)


def _set_parameter(model: nn.Module, name: str, data: torch.Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, nn.Parameter(data, requires_grad=False))


def data_mesh(device_type: str | None = None) -> Any:
    """All ranks in a row.

    Raises:
        Unsupported: there is no process group.
    """
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    if not distributed.is_initialized():
        raise Unsupported(
            "there is no process group, and FSDP shards over its ranks; start with torchrun and call "
            "torch.distributed.init_process_group first."
        )
    kind = device_type or ("cuda" if "nccl" in str(distributed.get_backend()) else "cpu")
    return init_device_mesh(kind, (distributed.get_world_size(),), mesh_dim_names=("data",))


def is_sharded(model: nn.Module) -> bool:
    """True if FSDP2 holds this model's parameters."""
    return next(sharded_modules(model), None) is not None


def sharded_modules(model: nn.Module) -> Iterator[Any]:
    """The modules that FSDP2 gathers one by one: where a communication of few bits is set."""
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def keep_gathered(model: nn.Module, *, on: bool) -> None:
    """Layers stay gathered from the forward to the backward pass from now on, or not."""
    _, *groups = sharded_modules(model)  # the root's parameters stay in any case
    for module in groups:
        module.set_reshard_after_forward(not on, recurse=False)
    sharding = part_of(model, Sharding)
    if sharding is not None:
        put_part(model, replace(sharding, stays_gathered=on))


def reshard(model: nn.Module) -> None:
    """Let go of gathered parameters: after a forward pass alone the root's still stand in for its slices."""
    for module in sharded_modules(model):
        module.reshard()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor; a plain one is all here.

    The tensor may have any shape, and its slice the same number of axes.
    """
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's slice begins in the whole tensor, and its shape.

    Offsets and sizes are tuples with a number for each axis of the tensor's shape.
    """
    if not hasattr(tensor, "__create_chunk_list__"):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def local_bytes(model: nn.Module) -> int:
    """Bytes of the parameters on this rank."""
    return sum(local(p.detach()).nbytes for p in model.parameters())


def _groups(model: Any) -> dict[str, nn.Module]:
    """What is gathered together, by full name; the root, "", comes last."""
    spec = spec_for(model)
    groups = {name: model.get_submodule(name) for name in layer_names(model, spec)}
    embed, head = (locate(model, spec, path) for path in (spec.embed, spec.head))
    embedding, output = find(model, embed), find(model, head)
    tied = output is not None and getattr(output, "weight", None) is getattr(embedding, "weight", None)
    if isinstance(embedding, nn.Embedding) and not tied:  # a tied weight is the head's, so the root's, too
        groups[embed] = embedding
    return {**groups, "": model}


def _held(name: str, groups: dict[str, nn.Module]) -> list[nn.Parameter]:
    """The parameters of a group; the root has what is in no other."""
    if name:
        return list(groups[name].parameters())
    inner = {id(p) for other, module in groups.items() if other for p in module.parameters()}
    return [p for p in groups[name].parameters() if id(p) not in inner]


def _group_change(name: str, groups: dict[str, nn.Module]) -> Change:
    held = _held(name, groups)
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in held})
    trained = sum(p.requires_grad for p in held)
    after = f"sharded ({', '.join(kinds)}; {trained} of {len(held)} parameters train)"
    size = sum(p.nbytes for p in held)
    return Change(name or "(root)", type(groups[name]).__name__, after, size, size)


def _bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def _refuse(model: Any, groups: dict[str, nn.Module], compute_dtype: torch.dtype | None) -> None:
    if is_sharded(model):
        raise Unsupported("this model is sharded already; load it again to shard it in another way.")
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise Unsupported(
            f"the model lies on {', '.join(sorted(map(str, devices)))}, and sharding starts from one device; "
            "load it without device_map."
        )
    if compute_dtype is not None and any(
        isinstance(m, (QuantizedLinear, QuantizedExperts)) for m in model.modules()
    ):
        raise Unsupported(
            f"compute_dtype={compute_dtype} would cast the scales of packed weights too; leave it out:"
            " products are computed in the dtype of the activations."
        )
    for name in groups:
        dtypes = {p.dtype for p in _held(name, groups) if p.requires_grad}
        if len(dtypes) > 1:
            listed = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
            raise Unsupported(
                f"{name or 'the model'} trains parameters of {listed}, and FSDP2 reduces one dtype at a time;"
                " bring the parameters that train to one dtype."
            )


__all__ = [
    "data_mesh",
    "is_sharded",
    "keep_gathered",
    "local",
    "local_bytes",
    "place_of",
    "reshard",
    "shard",
    "sharded_modules",
]
