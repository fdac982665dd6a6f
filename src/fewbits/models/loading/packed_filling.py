"""Filling packed layers straight from a packed folder's tensors, past transformers' loop over weights.

That loop makes a pattern, a thread's job and an entry of several tables for each tensor. A packed 8B model
has 900 of them that need none of it: they lie in the files under the names, in the shapes and in the dtypes
that the layers have.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fewbits.models.folders.checkpoint import TensorEntry
from fewbits.models.loading.streamed_weights import DTYPES, StreamedWeights
from fewbits.nn.linear import QuantizedLinear

Place = tuple[nn.Module, str]


def packed_places(model: nn.Module, entries: Mapping[str, TensorEntry]) -> dict[str, Place]:
    """The parts of packed layers on the meta device that the files hold as they are, by full name.

    Args:
        model: the model, whose packed layers are empty.
        entries: what the files hold, in `DTYPES`.
    """
    places: dict[str, Place] = {}
    for path, module in model.named_modules():
        if not isinstance(module, QuantizedLinear):
            continue
        for part in module.part_names:
            name, leaf = f"{path}.weight_{part}", f"weight_{part}"
            entry, empty = entries.get(name), getattr(module, leaf)
            if entry is not None and empty.is_meta and _fits(entry, empty):
                places[name] = (module, leaf)
    return places


def _fits(entry: TensorEntry, empty: Tensor) -> bool:
    return entry.shape == tuple(empty.shape) and DTYPES[entry.dtype] == empty.dtype


def fill(places: Mapping[str, Place], weights: StreamedWeights) -> None:
    """Put each tensor in its place, frozen, in the order in which they come."""
    for name in sorted(places, key=weights.place):
        module, leaf = places[name]
        module.register_parameter(leaf, nn.Parameter(weights.take(name), requires_grad=False))


__all__ = ["fill", "packed_places"]
