"""`GroupedQuantizedTensor`: the quantised weights of several experts as one parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.te.tensors.operand import Operand
from fewbits.te.tensors.quantized_tensor import QuantizedTensor


class GroupedQuantizedTensor(QuantizedTensor):
    """Quantised matrices (N, K), each with scales of its own, that torch takes for one real tensor (G, N, K).

    Attributes:
        members: the matrices, of one shape, type and kind of quantiser.
    """

    members: list[QuantizedTensor]

    @staticmethod
    def __new__(cls, members: Sequence[QuantizedTensor]) -> GroupedQuantizedTensor:
        """Of the type and device of its members (N, K)."""
        first = members[0]
        tensor: GroupedQuantizedTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (len(members), *first.shape), dtype=first.dtype, device=first.device, requires_grad=False
        )
        tensor.members, tensor.quantizer = list(members), first.quantizer
        return tensor

    @property
    def quantized_tensors(self) -> list[QuantizedTensor]:
        """The members, (N, K) each."""
        return self.members

    def operand(self) -> Operand:
        """Refused: each member has its own.

        Raises:
            BadInput: always.
        """
        raise BadInput("several weights in one parameter are no operand: multiply by those of its members.")

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """The real tensor (G, N, K), in ``dtype`` (its own by default)."""
        return torch.stack([member.dequantize(dtype=dtype) for member in self.members])

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> GroupedQuantizedTensor:
        """As `QuantizedTensor.quantize_`, for a tensor (G, N, K)."""
        if tensor.shape != self.shape:
            raise BadInput(
                f"a tensor of {tuple(tensor.shape)} cannot be written to one of {tuple(self.shape)}."
            )
        source = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
        for member, value in zip(self.members, source, strict=True):
            member.quantize_(value, noop_flag=noop_flag)
        return self

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """As `QuantizedTensor.update_usage`, for all members."""
        for member in self.members:
            member.update_usage(rowwise_usage, columnwise_usage)

    def moved(self, move: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """See `QuantizedTensor.moved`."""
        return GroupedQuantizedTensor([member.moved(move) for member in self.members])

    def take_codes_of(self, other: QuantizedTensor) -> None:
        """See `QuantizedTensor.take_codes_of`; ``other`` is of this shape."""
        assert isinstance(other, GroupedQuantizedTensor)
        for member, source in zip(self.members, other.members, strict=True):
            member.take_codes_of(source)

    def layout_of_codes(self) -> tuple[Any, ...]:
        """See `QuantizedTensor.layout_of_codes`."""
        return (type(self), *(member.layout_of_codes() for member in self.members))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickles: the members, and whether gradients are wanted."""
        return rebuild_grouped, (list(self.members), self.requires_grad)


def rebuild_grouped(members: list[QuantizedTensor], requires_grad: bool) -> GroupedQuantizedTensor:
    """A tensor from its pickle; see `GroupedQuantizedTensor.__reduce_ex__`."""
    tensor = GroupedQuantizedTensor(members)
    tensor.requires_grad_(requires_grad)
    return tensor


class _Members(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: GroupedQuantizedTensor) -> tuple[Tensor, ...]:
        return tuple(member.moved(lambda part: part) for member in whole.members)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.stack(gradients)


def members_of(weight: Tensor) -> tuple[Tensor, ...]:
    """The matrices (N, K) of a weight (G, N, K), quantised or plain, whose gradients are the weight's."""
    if isinstance(weight, GroupedQuantizedTensor):
        matrices: tuple[Tensor, ...] = _Members.apply(weight)
        return matrices
    return weight.unbind(0)
