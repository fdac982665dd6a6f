"""Parameters as slices of the whole model's, however it is spread: what checkpoints are written from.

FSDP2's parameters say where their slices lie. Those that tensor parallelism has cut do not: to each rank they
are small parameters of its own. Here each gets its place along both axes, as a DTensor over all ranks that
shares its memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from fewbits.training.fsdp import local
from fewbits.training.tensor_parallel import TensorParallel, tensor_parallel_of


def whole_views(model: Any) -> dict[str, Tensor]:
    """Every parameter by name, once, with the shape it has in a model on one device; every rank calls."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    state = tensor_parallel_of(model)
    if state is None:
        return named
    data = next((p.device_mesh for p in named.values() if hasattr(p, "device_mesh")), None)
    mesh = _mesh(state, data, next(iter(named.values())).device.type)
    return {name: _view(p, state.cuts.get(name), state.group.size, mesh) for name, p in named.items()}


def slice_like(view: Tensor, part: Tensor) -> Tensor:
    """A tensor of the view's shape and slices, of which ``part`` is this rank's."""
    from torch.distributed.tensor import DTensor

    if not isinstance(view, DTensor):
        return part
    return DTensor.from_local(
        part, view.device_mesh, view.placements, run_check=False, shape=view.shape, stride=view.stride()
    )


def _mesh(state: TensorParallel, data: Any, device_type: str) -> Any:
    """All ranks, by their place in the group that shares layers first; FSDP2 slices what that has cut."""
    from torch.distributed.device_mesh import DeviceMesh

    if state.mesh is None:
        place = (state.group.rank, 0 if data is None else data.get_local_rank())
        places: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(places, place)
        order = sorted(range(len(places)), key=lambda rank: (*places[rank], rank))  # replicas are equal
        ranks = torch.tensor(order).view(state.group.size, -1)
        state.mesh = DeviceMesh(device_type, ranks, mesh_dim_names=("tensor", "data"))
    return state.mesh


def _view(parameter: Tensor, cut: int | None, size: int, mesh: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape = list(parameter.shape)  # of what FSDP2 has sliced, whole
    if cut is not None:
        shape[cut] *= size
    stride = torch.empty(shape, device="meta").stride()
    along_tensor = Replicate() if cut is None else Shard(cut)
    along_data = Shard(0) if isinstance(parameter, DTensor) else Replicate()
    return DTensor.from_local(
        local(parameter),
        mesh,
        (along_tensor, along_data),
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


__all__ = ["slice_like", "whole_views"]
