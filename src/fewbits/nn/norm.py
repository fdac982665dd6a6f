"""RMSNorm that calls the library's own op in place of a family's."""

from __future__ import annotations

from torch import Tensor, nn

from fewbits.kernels.decoder.rmsnorm import rmsnorm
from fewbits.nn.tensor_group import own_weight


class RMSNorm(nn.Module):
    """``y = x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last axis.

    Attributes:
        weight: (K,) the very parameter of the norm that this one replaces.
        offset: 1.0 where the model stores the weight's distance from one (Gemma), else 0.0.
    """

    def __init__(self, weight: nn.Parameter, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., K)."""
        return rmsnorm(x, own_weight(self), self.eps, offset=self.offset)

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}" + (
            f", offset={self.offset}" if self.offset else ""
        )
