"""A tensor as the rows of a matrix."""

from __future__ import annotations

import math

from torch import Tensor


def rows_of(x: Tensor) -> Tensor:
    """``x`` (..., K) as (M, K), a view where its strides allow one.

    ``reshape(-1, K)`` cannot tell M where K is 0: a layer without outputs has a gradient of that shape.
    """
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def dense_rows(x: Tensor) -> Tensor:
    """``x`` (M, N) with the values of each row side by side; copied only if they are not."""
    return x if x.stride(1) == 1 else x.contiguous()
