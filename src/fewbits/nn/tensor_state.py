"""Whether tensors hold what they held before: the key of values that are made from weights and kept.

An address is not enough: a merge writes other values to the same one, and a freed one is given to the next
tensor. So the key names the storage itself, which no later one is ever equal to, and the version, which every
in-place operation raises. What it cannot see is a write through ``tensor.data`` (PEFT's own layers merge so)
and that of torch's fused optimizers, which raises no version. Hence a weight that trains keeps nothing, and
whoever else writes so lets go of what was kept (`fewbits.decoder.fuse.forget_weights`).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

TensorState = tuple[object, ...]


class _Storage:
    """A tensor's memory, held by nobody here; a copy or a pickle of it names no memory at all.

    Torch's own reference copies the number of a pointer and not the reference: both are given back, and the
    process dies.
    """

    def __init__(self, tensor: Tensor | None = None) -> None:
        self._reference = None if tensor is None else StorageWeakRef(tensor.untyped_storage())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Storage) or self._reference is None or other._reference is None:
            return False
        return bool(self._reference == other._reference)

    def __hash__(self) -> int:
        return 0 if self._reference is None else hash(self._reference)

    def __reduce__(self) -> tuple[type[_Storage], tuple[()]]:
        return _Storage, ()


def state_of(tensors: Iterable[Tensor]) -> tuple[TensorState, ...]:
    """A key that is equal to an earlier one while all tensors are the same memory, unwritten since.

    Each tensor may have any shape.

    The key holds no memory: a tensor that is let go of is freed, and no later one is taken for it.
    """
    return tuple(
        (
            _Storage(t),
            t.storage_offset(),
            t.shape,
            t.stride(),
            t.dtype,
            0 if t.is_inference() else t._version,
        )
        for t in tensors
    )
