"""Parameters as slices of the whole model's, however it is spread: what checkpoints are written from.

FSDP2's parameters say where their slices lie. Those that tensor parallelism has cut do not: to each rank they
are small parameters of its own. Here each gets its place along both axes, as a DTensor over all ranks that
shares its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from fewbits.training.ranks.fsdp import local, place_of
from fewbits.training.ranks.tensor_parallel import TensorParallel, tensor_parallel_of

if TYPE_CHECKING:
    from torch import nn

Place = tuple[tuple[int, ...], tuple[int, ...]]  # where a slice begins in the whole tensor, and its shape


@dataclass(frozen=True)
class Pieces:
    """Rows of a tensor that lie in several places of the whole one.

    Attributes:
        places: of each piece; in this rank's slice they lie one behind the other.
        parts: rows of the whole tensor's parts, of which each rank of a layer has an equal share.
        ranks: of a layer.
    """

    places: tuple[Place, ...]
    parts: tuple[int, ...]
    ranks: int

    def mark(self, view: Any) -> Tensor:
        """Let torch's checkpoints of ``view`` (a DTensor, any shape) know the pieces."""
        part = view._local_tensor
        part.pieces = self
        part.__create_chunk_list__ = self._chunks
        part.__create_write_items__ = self._items
        part.__get_tensor_shard__ = lambda index: self.split(part)[self._number(index)]
        marked: Tensor = view
        return marked

    def split(self, part: Tensor) -> tuple[Tensor, ...]:
        """The pieces of this rank's slice.

        ``part`` is (rows, ...), the pieces are cut along the rows.
        """
        return torch.split(part, [sizes[0] for _, sizes in self.places])

    def in_order(self, whole: Tensor) -> Tensor:
        """Sort rows from the order of the ranks into the order of the whole tensor.

        ``whole`` is (rows, ...): all rows that rank 0 holds, then all of rank 1, and so on. The result has
        the same shape.
        """
        share = sum(self.parts) // self.ranks
        rows = torch.arange(whole.shape[0], device=whole.device).view(self.ranks, share)
        parts = rows.split([size // self.ranks for size in self.parts], dim=1)
        return whole[torch.cat([part.reshape(-1) for part in parts])]

    def _number(self, index: Any) -> int:
        return [offsets for offsets, _ in self.places].index(tuple(index.offset))

    def _chunks(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes in self.places
        ]

    def _items(self, name: str, view: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(view.to_local())
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=view.size()),
            )
            for chunk in self._chunks()
        ]


def whole_views(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter by name, once, in the shape of a model on one device; every rank calls."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    state = tensor_parallel_of(model)
    if state is None:
        return named
    data = next((p.device_mesh for p in named.values() if hasattr(p, "device_mesh")), None)
    mesh = _mesh(state, data, next(iter(named.values())).device.type)
    return {name: _view(name, p, state, mesh) for name, p in named.items()}


def slice_like(view: Tensor, part: Tensor) -> Tensor:
    """A tensor of the view's shape and slices, of which ``part`` is this rank's."""
    from torch.distributed.tensor import DTensor

    if not isinstance(view, DTensor):
        return part
    sharded = DTensor.from_local(
        part, view.device_mesh, view.placements, run_check=False, shape=view.shape, stride=view.stride()
    )
    pieces = pieces_of(view)
    return sharded if pieces is None else pieces.mark(sharded)


def pieces_of(view: Any) -> Pieces | None:
    """What `Pieces.mark` left on a view; None: its rows are one slice."""
    return getattr(getattr(view, "_local_tensor", None), "pieces", None)


def places_of(view: Tensor) -> tuple[Place, ...]:
    """Where this rank's rows lie in the whole tensor; neighbouring rows share a place.

    A place is an offset and a size for each axis of the whole tensor's shape.
    """
    pieces = pieces_of(view)
    return (place_of(view),) if pieces is None else pieces.places


def gathered(view: Any) -> Tensor:
    """The whole tensor, in the shape of a model on one device, on every rank; every rank calls."""
    if not hasattr(view, "full_tensor"):
        plain: Tensor = view
        return plain
    whole: Tensor = view.full_tensor()
    pieces = pieces_of(view)
    return whole if pieces is None else pieces.in_order(whole)


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


def _view(name: str, parameter: Tensor, state: TensorParallel, mesh: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    cut = state.cuts.get(name)
    shape = list(parameter.shape)  # of what FSDP2 has sliced, whole
    if cut is not None:
        shape[cut] *= state.group.size
    stride = torch.empty(shape, device="meta", dtype=torch.float32).stride()
    along_tensor = Replicate() if cut is None else Shard(cut)
    along_data = Shard(0) if isinstance(parameter, DTensor) else Replicate()
    view = DTensor.from_local(
        local(parameter),
        mesh,
        (along_tensor, along_data),
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )
    if name not in state.parts:
        return view
    return Pieces(_pieces(parameter, state, name), state.parts[name], state.group.size).mark(view)


def _pieces(parameter: Tensor, state: TensorParallel, name: str) -> tuple[Place, ...]:
    """Of what FSDP2 left of a rank's rows: those of each part."""
    (first, *others), (count, *sizes) = place_of(parameter)
    pieces, begin, before = [], 0, 0  # in the whole tensor, and in this rank's rows of it
    for size in state.parts[name]:
        length = size // state.group.size
        low, high = max(first, before), min(first + count, before + length)
        if low < high:
            at = begin + state.group.rank * length + low - before
            pieces.append(((at, *others), (high - low, *sizes)))
        begin, before = begin + size, before + length
    return tuple(pieces)


__all__ = ["Pieces", "gathered", "pieces_of", "places_of", "slice_like", "whole_views"]
