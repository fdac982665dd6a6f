"""Operations without products: shapes, sums, norms, dropout, quantisation, and what is sent between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.te.layers import norm
from fewbits.te.layers.module import Module
from fewbits.te.ops.operation import BasicOperation
from fewbits.te.ranks.distributed import group_size
from fewbits.te.ranks.parallel import after_product, before_product, sum_over_ranks
from fewbits.te.tensors.quantized_tensor import QuantizedTensor
from fewbits.te.tensors.roles import QuantizerRole


class Identity(BasicOperation):
    """The input."""

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """x, of any shape."""
        return x


class Reshape(BasicOperation):
    """``x.reshape(shape)``."""

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """x (..., K) in the other shape."""
        return x.reshape(self.shape)


class ConstantScale(BasicOperation):
    """``x * scale``."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """The product, for x of any shape."""
        return x * self.scale


class Dropout(BasicOperation):
    """Zeros with probability ``p`` while training; what stays is divided by ``1 - p``."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout_probability = p

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """For x of any shape."""
        return F.dropout(in_autocast(x), self.dropout_probability, self.training) if self.training else x


class _IntoTarget(torch.autograd.Function):
    """The sum of two tensors, written to the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
        return target.detach().add_(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, dy


class AddExtraInput(BasicOperation):
    """The input plus a further one; ``in_place`` writes the sum to the further one."""

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """The sum of x (..., K) and another (..., K)."""
        return _IntoTarget.apply(x, extra[0]) if self.in_place else extra[0] + x


class MakeExtraOutput(BasicOperation):
    """The input, twice: as the output and as a further one. ``in_place`` saves no memory here."""

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """x, of any shape, and x."""
        return x, x.view_as(x)


class LayerNorm(norm.LayerNorm, BasicOperation):  # type: ignore[misc]
    """`fewbits.te.LayerNorm` as an operation; ``sm_margin`` changes nothing."""

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__(
            normalized_shape, eps, zero_centered_gamma=zero_centered_gamma, device=device, dtype=dtype
        )

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """The norm of x (..., K)."""
        return norm.LayerNorm.forward(self, x)


class RMSNorm(norm.RMSNorm, BasicOperation):  # type: ignore[misc]
    """`fewbits.te.RMSNorm` as an operation; ``sm_margin`` changes nothing."""

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__(
            normalized_shape, eps, zero_centered_gamma=zero_centered_gamma, device=device, dtype=dtype
        )

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """The norm of x (..., K)."""
        return norm.RMSNorm.forward(self, x)


class L2Normalization(norm.L2Normalization, BasicOperation):  # type: ignore[misc]
    """Vectors of length 1, as `fewbits.te.layers.norm.L2Normalization`."""

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """x (..., K) of length 1."""
        return norm.L2Normalization.forward(self, x)


class _Rounding(torch.autograd.Function):
    """x in a quantiser's codes, and the gradient in another's; either may be None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any) -> Any:
        ctx.quantizer = backward
        return x.view_as(x) if forward is None or isinstance(x, QuantizedTensor) else forward(x)

    @staticmethod
    @once_differentiable("te.ops.Quantize")
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, None, None]:
        rounds = ctx.quantizer is not None and not isinstance(dy, QuantizedTensor)
        return ctx.quantizer(dy) if rounds else dy, None, None


class Quantize(Module, BasicOperation):
    """The input as a quantised tensor, by the recipe that holds; without one it stays as it is.

    Args:
        forward: quantise the input.
        backward: quantise the gradient on its way back.
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self.quantizes_forward, self.quantizes_backward = forward, backward

    def roles(self, *, forward: bool) -> list[QuantizerRole | None]:
        """One slot each way."""
        return [QuantizerRole(self.module_type, "input" if forward else "grad_output", self.name or "")]

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """x, of any shape."""
        numerics = self.numerics()
        if not numerics.enabled or numerics.recipe is None:
            return x
        forward, backward = self.prepare(numerics, x.device)
        rounds_gradient = self.quantizes_backward and numerics.recipe.backward_override is None
        return _Rounding.apply(
            x, forward[0] if self.quantizes_forward else None, backward[0] if rounds_gradient else None
        )

    def forward(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """As `compute`: x may have any shape."""
        return BasicOperation.forward(self, x, *extra, **words)


class _Sent(BasicOperation):
    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.process_group = process_group
        self.process_group_size = group_size(process_group)


class AllGather(_Sent):
    """All ranks' tensors, one behind the other; gradients are summed and cut."""

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """(R M, ...) from each rank's x (M, ...)."""
        return before_product(x, "column", True, self.process_group, self.process_group_size)


class AllReduce(_Sent):
    """The sum over ranks; the gradient is each rank's own."""

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """The sum of all ranks' x (..., K)."""
        return sum_over_ranks(x, self.process_group, self.process_group_size)


class ReduceScatter(_Sent):
    """This rank's piece, by the first axis, of the sum over ranks; gradients are gathered."""

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """(M / R, ...) from x (M, ...)."""
        return after_product(x, "row", True, self.process_group, self.process_group_size)


def in_autocast(x: Tensor) -> Tensor:
    """x, of any shape, in torch.autocast's type within it."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
