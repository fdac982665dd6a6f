"""Norms and scaling of many tensors in one call, under Transformer Engine's names, by torch on lists.

They are called by `multi_tensor_applier`: ``applier(op, noop_flag, [tensors, ...], *args)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput


class MultiTensorApply:
    """Calls an operation with lists of tensors of which the empty ones are left out.

    Args:
        chunk_size: taken and not needed.
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: list[list[Tensor]], *args: Any
    ) -> Any:
        """``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``; None if all tensors are empty.

        ``noop_flag_buffer`` is (1,) int32; tensors may have any shape. Of a DTensor its own part is taken.

        Raises:
            BadInput: lists of different lengths.
        """
        if any(len(tensors) != len(tensor_lists[0]) for tensors in tensor_lists):
            raise BadInput(f"lists of tensors have one length, not {[len(part) for part in tensor_lists]}.")
        local = [[t.to_local() if hasattr(t, "to_local") else t for t in part] for part in tensor_lists]
        is_full = [tensor.numel() > 0 for tensor in local[0]]
        lists = [[t for t, full in zip(part, is_full, strict=True) if full] for part in local]
        return op(self.chunk_size, noop_flag_buffer, lists, *args) if lists[0] else None


multi_tensor_applier = MultiTensorApply(2048 * 32)


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float
) -> None:
    """Write sources times ``scale``, in float32 and rounded once, to targets.

    Args:
        chunk_size: taken and not needed.
        noop_flag: (1,) int32; becomes 1 where a source is not finite.
        tensor_lists: sources and targets, of any shapes.
        scale: a number.
    """
    sources, targets = tensor_lists
    wide = [source.float() for source in sources]
    finite = torch.stack([part.isfinite().all() for part in wide]).all()
    noop_flag.masked_fill_(~finite.to(noop_flag.device), 1)
    torch._foreach_copy_(targets, [part * scale for part in wide])


def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: Tensor
) -> None:
    """`multi_tensor_scale` with a scale (1,) that is not read by the host; ``noop_flag`` is (1,) int32."""
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale.reshape(()))  # type: ignore[arg-type]


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The length of all tensors together, and of each.

    Args:
        chunk_size: taken and not needed.
        noop_flag: taken and not needed.
        tensor_lists: one list, of any shapes.
        per_tensor: whether the second is wanted.

    Returns:
        (1,) float32, and (n,) float32 or, if it is not wanted, (0,).
    """
    (tensors,) = tensor_lists
    each = torch.stack(torch._foreach_norm([tensor.float() for tensor in tensors]))
    return each.norm().view(1), each if per_tensor else each.new_empty(0)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    inv_scale: Tensor,
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm` of the tensors times ``inv_scale`` (1,); ``noop_flag`` is not needed."""
    (tensors,) = tensor_lists
    wide = [tensor.float() * inv_scale for tensor in tensors]
    return multi_tensor_l2norm(chunk_size, noop_flag, [wide], per_tensor)
