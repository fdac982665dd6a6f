"""A matrix as products see it: by rows, by columns, or both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.base import Packed


@dataclass(frozen=True, eq=False)
class Operand:
    """A matrix (M, K) as products see it; what is not asked for is None.

    Attributes:
        rows: of shape (M, K); a plain tensor where nothing is quantised.
        columns: of shape (K, M).
    """

    rows: Packed | Tensor | None
    columns: Packed | Tensor | None


def plain(operand: Packed | Tensor | None, dtype: torch.dtype) -> Tensor:
    """What an operand stands for, as a real tensor of ``dtype``.

    A packed one is (M, K); the result has its shape.
    """
    if operand is None:
        raise BadInput("this operand was not asked for when it was quantised: call set_usage first.")
    return operand.dequantize(dtype) if isinstance(operand, Packed) else operand.to(dtype)
