"""RMSNorm that calls the library's own op in place of a family's."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.kernels.decoder.rmsnorm import rmsnorm, rmsnorm_ref
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


def computes_rmsnorm(module: Any, eps: float | None, offset: float) -> bool:
    """Whether a module computes `RMSNorm` of its one weight (K,), found out by trying a copy on the CPU.

    Args:
        module: on any device, the meta device included.
        eps: what the module says that it adds; None: it says nothing, and the answer is False.
        offset: as in `RMSNorm`.
    """
    parameters = dict(module.named_parameters())
    if eps is None or list(parameters) != ["weight"] or parameters["weight"].dim() != 1:
        return False
    width = parameters["weight"].shape[0]
    with torch.no_grad(), torch.device("cpu"):
        tried = copy.deepcopy(module).to_empty(device="cpu").float()
        tried.weight.copy_(torch.linspace(0.5, 1.5, width, dtype=torch.float32))
        x = torch.linspace(-2.0, 3.0, 3 * width, dtype=torch.float32).view(3, width).sin() + 0.1
        expected, _ = rmsnorm_ref(x, tried.weight, eps, offset)
        try:
            output = tried(x)
        except (RuntimeError, TypeError, ValueError):  # it takes something else as well
            return False
    return isinstance(output, Tensor) and torch.allclose(output, expected, rtol=1e-4, atol=1e-5)
