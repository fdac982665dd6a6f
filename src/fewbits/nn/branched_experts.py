"""`BranchedExperts`: plain experts with adapters beside their weights, whose rows they are added to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.nn.experts import QuantizedExperts


class BranchedExperts(QuantizedExperts):
    """What an adapter makes of experts whose weights are plain: the products and sums of packed ones."""

    def __init__(self, host: Any, branches: Mapping[str, tuple[tuple[Tensor, Tensor, float], ...]]) -> None:
        """Take the place of ``host``, whose parameters stay the same.

        Args:
            host: experts as transformers has them.
            branches: of each weight with adapters (A, B, scaling), as PEFT has them.
        """
        nn.Module.__init__(self)
        self.become(host, tuple(name for name, p in host.named_parameters(recurse=False) if p.dim() == 3))
        self._parameters = dict(host._parameters)
        self.branches = dict(branches)

    def _values(self, name: str, dtype: torch.dtype, hit: Tensor | None) -> Tensor:
        """A weight (E, outputs, inputs), or with ``hit`` (P,) the matrices of those experts."""
        weight: Tensor = getattr(self, name).to(dtype)
        weight = weight.transpose(1, 2) if self.is_turned else weight
        return weight if hit is None else weight[hit]
