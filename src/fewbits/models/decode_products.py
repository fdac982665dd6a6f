"""A decode step's product for so many rows that few_rows.py would read its weights several times.

The same operands, the same result up to rounding to 16 bits: the weight is decoded once, the library
multiplies. Everything is a launch without the host, so that a CUDA graph can record it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.formats.base import Packed
from fewbits.kernels.codec.dequantize import dequantize
from fewbits.kernels.decoder.gated_activation import gated_activation
from fewbits.kernels.generation.few_rows import LowRankSum, RowNorm


class ManyRows:
    """One prepared call over operands that stay where they are."""

    def __init__(
        self, x: Tensor, weights: Sequence[Packed | Tensor], out: Tensor, *, dtype: torch.dtype, **how: Any
    ) -> None:
        """Prepare ``out = ...`` (or ``out += ...``), as `FewRows` with the same arguments does.

        Args:
            x: (M, K).
            weights: of (N, K) each.
            out: (M, sum of N), or (M, N) with an activation.
            dtype: the 16 bits in which the library multiplies.
            how: ``biases``, ``branches``, ``norm``, ``activation`` and ``add``, as `FewRows` has them.
        """
        self.out, self._dtype, self._x = out, dtype, x
        self._norm: RowNorm | None = how.get("norm")
        self._activation: str | None = how.get("activation")
        self._add = bool(how.get("add"))
        none = [None] * len(weights)
        biases, branches = how.get("biases") or none, how.get("branches") or none
        self._parts = list(zip(weights, biases, branches, strict=True))

    def launch(self) -> Tensor:
        """Run it on the current stream; ``out``."""
        x = self._x
        if self._norm is not None:
            x = x.float()
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._norm.eps)
            x = x * (self._norm.weight.float() + self._norm.offset)
        x = x.to(self._dtype)
        products = [self._product(x, *part) for part in self._parts]
        if self._activation is not None:
            y = gated_activation(products[0], products[1], activation=self._activation)
        else:
            y = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        return self.out.add_(y) if self._add else self.out.copy_(y)

    def _product(
        self, x: Tensor, weight: Packed | Tensor, bias: Tensor | None, branch: LowRankSum | None
    ) -> Tensor:
        dense = dequantize(weight, self._dtype) if isinstance(weight, Packed) else weight
        y = F.linear(x, dense, bias)
        if branch is not None:
            y = torch.addmm(y, branch.inner.to(self._dtype), branch.weight.t(), alpha=branch.scale)
        return y
