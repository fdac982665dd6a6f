"""What an operation is: a module with one input and output, and perhaps further ones.

Operations of this library define `BasicOperation.compute` in plain torch, and autograd has their gradients.
One of the user's own may define instead ``op_forward(ctx, x, ...)`` and ``op_backward(ctx, dy)``, or with
further tensors ``fuser_forward`` and ``fuser_backward``, as in Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.launch.derivatives import once_differentiable


class OperationContext:
    """What an operation of the user's own keeps from its forward pass for its backward pass.

    Attributes:
        requires_grad: whether there will be a backward pass.
    """

    def __init__(self, requires_grad: bool = True) -> None:
        self._tensors: tuple[Tensor | None, ...] = ()
        self.requires_grad = requires_grad

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors of any shape."""
        self._tensors = tensors

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """What `save_for_backward` was given, tensors of any shape."""
        return self._tensors


class FusibleOperation(nn.Module):
    """Base of operations."""

    @property
    def is_fused_op(self) -> bool:
        """Whether this stands for several operations."""
        return False

    @property
    def basic_operations(self) -> list[BasicOperation]:
        """The operations that this is or stands for, in their order."""
        raise NotImplementedError


class BasicOperation(FusibleOperation):
    """One operation.

    Attributes:
        num_extra_inputs: tensors that it takes beside its input.
        num_extra_outputs: tensors that it returns beside its output.
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.input_channels: list[str | None] = [None] * self.num_extra_inputs
        self.output_channels: list[str | None] = [None] * self.num_extra_outputs
        self.returned_outputs: list[bool] = [True] * self.num_extra_outputs
        self._extra_tensor_channels_locked = False

    @property
    def basic_operations(self) -> list[BasicOperation]:
        """This one."""
        return [self]

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """The operation's definition.

        Args:
            x: (..., K).
            extra: ``num_extra_inputs`` tensors.
            words: further arguments, for those that take any.

        Returns:
            The output, or with ``num_extra_outputs`` a tuple of it and these.
        """
        parameters = [p for p in self.parameters() if p is not None]
        needs = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *extra, *parameters))
        outputs = _ByHand.apply(self, words, needs, len(extra), x, *extra, *parameters)
        return outputs if self.num_extra_outputs else outputs[0]

    def forward(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """As `compute`, for an operation outside of a `Sequential`.

        x is (..., K).
        """
        if len(extra) != self.num_extra_inputs:
            raise BadInput(
                f"{type(self).__name__} takes {self.num_extra_inputs} tensors beside its input, not "
                f"{len(extra)}: pass as many."
            )
        self.take_into_use()
        return self.compute(x, *extra, **words)

    # Tensors that go from one operation of a sequence to another

    def take_into_use(self) -> None:
        """From now on the channels stay as they are."""
        self._extra_tensor_channels_locked = True

    def _bind(self, channels: list[str | None], index: int, channel: str | None, kind: str) -> None:
        if not 0 <= index < len(channels):
            raise IndexError(
                f"Extra {kind} index {index} is out of range for {type(self).__name__} with {len(channels)} "
                f"extra {kind}s: count from 0."
            )
        if channel is not None and (not isinstance(channel, str) or not channel):
            raise BadInput(f"Extra {kind} channel must be a non-empty string or None, not {channel!r}.")
        if self._extra_tensor_channels_locked:
            raise RuntimeError(
                f"Cannot change extra tensor channels of {type(self).__name__}: a call has already captured "
                "its channel routing, so bind them to a new operation."
            )
        channels[index] = channel

    def set_extra_input_channel(self, index: int, channel: str | None) -> BasicOperation:
        """Take a further input from an earlier operation's output of that name instead of the caller."""
        self._bind(self.input_channels, index, channel, "input")
        return self

    def set_extra_output_channel(
        self, index: int, channel: str | None, *, output_to_caller: bool = True
    ) -> BasicOperation:
        """Give a further output a name, under which later operations of the sequence take it.

        ``output_to_caller`` returns it to the caller too.
        """
        if not isinstance(output_to_caller, bool):
            raise TypeError(f"output_to_caller must be a bool, not {output_to_caller!r}.")
        self._bind(self.output_channels, index, channel, "output")
        self.returned_outputs[index] = output_to_caller or channel is None
        return self


class FusedOperation(FusibleOperation):
    """Several operations under one name; they are computed one after the other.

    Args:
        basic_ops: the operations.
    """

    def __init__(self, basic_ops: Iterable[FusibleOperation]) -> None:
        super().__init__()
        self.basic_ops = nn.ModuleList(basic_ops)
        if not len(self.basic_ops):
            raise BadInput("FusedOperation has no operations: give it at least one.")

    @property
    def is_fused_op(self) -> bool:
        """True."""
        return True

    @property
    def basic_operations(self) -> list[BasicOperation]:
        """The operations that this stands for."""
        return [basic for op in self.basic_ops for basic in op.basic_operations]  # type: ignore[union-attr]

    def forward(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """All of them, for x (..., K)."""
        return run_operations(self.basic_operations, x, extra, {})


def run_operations(
    operations: Sequence[BasicOperation],
    x: Tensor,
    extra: Sequence[Tensor],
    words: Mapping[int, dict[str, Any]],
) -> Any:
    """Neighbouring operations one after the other.

    Args:
        operations: in their order.
        x: (..., K).
        extra: the further inputs that come from the caller.
        words: further arguments by an operation's ``id``.

    Returns:
        The output, or a tuple of it and the further outputs that go to the caller.
    """
    _check_channels(operations)
    waiting, returned = list(extra), []
    by_name: dict[str, Tensor] = {}
    for op in operations:
        op.take_into_use()
        if op.input_channels.count(None) > len(waiting):
            raise BadInput(
                f"{type(op).__name__} takes a further tensor, and none was given: pass it to the call."
            )
        inputs = [by_name[name] if name is not None else waiting.pop(0) for name in op.input_channels]
        y = op.compute(x, *inputs, **words.get(id(op), {}))
        x, *further = y if op.num_extra_outputs else (y,)
        for tensor, name, to_caller in zip(further, op.output_channels, op.returned_outputs, strict=True):
            if name is not None:
                by_name[name] = tensor
            if to_caller:
                returned.append(tensor)
    return (x, *returned) if returned else x


def _check_channels(operations: Sequence[BasicOperation]) -> None:
    names: set[str] = set()
    for op in operations:
        for name in op.input_channels:
            if name is not None and name not in names:
                raise BadInput(
                    f"the channel {name!r} that {type(op).__name__} takes has no producer before it: name an "
                    "earlier operation's output so."
                )
        for name in op.output_channels:
            if name in names:
                raise BadInput(f"two outputs have the channel name {name!r}: give each its own.")
            if name is not None:
                names.add(name)


class _ByHand(torch.autograd.Function):
    """An operation that brings its own forward and backward pass."""

    @staticmethod
    def forward(
        ctx: Any, op: Any, words: dict[str, Any], needs: bool, count: int, x: Tensor, *tensors: Tensor
    ) -> Any:
        own = OperationContext(needs)
        extra = tensors[:count]
        ctx.op, ctx.own, ctx.count, ctx.num_tensors = op, own, count, len(tensors)
        quantizers = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}
        if hasattr(op, "op_forward") and not (count or op.num_extra_outputs):
            y, further = op.op_forward(own, x, **quantizers, **words), ()
        elif hasattr(op, "fuser_forward"):
            y, by_op = op.fuser_forward(
                [own], x, basic_op_extra_inputs=[extra], basic_op_kwargs=[words], **quantizers
            )
            further = tuple(by_op[0])
        else:
            raise NotImplementedError(
                f"{type(op).__name__} defines neither compute nor op_forward and op_backward: write either."
            )
        return tuple(t.view_as(t) if t is x else t for t in (y, *further))

    @staticmethod
    @once_differentiable("an operation with its own backward pass")
    def backward(ctx: Any, dy: Tensor, *further: Tensor) -> Any:
        op, own = ctx.op, ctx.own
        if hasattr(op, "op_backward") and not (ctx.count or op.num_extra_outputs):
            dx, of_parameters = op.op_backward(own, dy)
            of_extra: Any = ()
        else:
            dx, by_op, extra_by_op = op.fuser_backward([own], dy, basic_op_grad_extra_outputs=[further])
            of_parameters, of_extra = by_op[0], extra_by_op[0]
        gradients = (*of_extra, *of_parameters)
        gradients += (None,) * (ctx.num_tensors - len(gradients))
        return (None, None, None, None, dx, *gradients)


def _refuse_fusion(*_: Any, **__: Any) -> None:
    raise Unsupported(
        "fusions of operations are not taken by fewbits.te.ops: a Sequential computes them one after the "
        "other, so put what a fusion computes into one BasicOperation."
    )


register_forward_fusion = register_backward_fusion = register_forward_backward_fusion = _refuse_fusion
