"""Which kernel computes a decode step's products, by how many rows they have.

One or two rows: few_rows.py. From three rows on: batch_rows.py, up to 64 rows a launch. The library with
decoded weights: where these may stay (`DecodedWeights`) and the weights are packed, from `_FEWEST_KEPT` rows
on; where each step decodes them, from `_FEWEST_DECODED` rows on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import Unsupported
from fewbits.formats.base import Packed
from fewbits.kernels.generation.batch_rows import MOST_ROWS, BatchRows, Workspace
from fewbits.kernels.generation.cut import max_rows
from fewbits.kernels.generation.few_rows import FewRows
from fewbits.kernels.generation.operands import Product
from fewbits.models.generation.products import DecodedWeights, ManyRows

# A step of the 8B shape in NF4 on an H200, context 128: 2 rows by few_rows.py 2.69 ms, by batch_rows.py 2.98;
# 4 rows 3.44 and 3.00. Context 300: 64 rows by batch_rows.py 5.18, by the library with weights that stay
# 6.47; 96 rows, 64 and 32, 8.61 and 6.99; 128 rows 9.95 and 7.53; 256 rows 10.8, with decoding 17.7.
_FEWEST_OF_A_BATCH, _FEWEST_KEPT, _FEWEST_DECODED = 3, 65, 129


class StepProducts:
    """Makes the products of a step of ``batch`` rows.

    Attributes:
        decoded: the decoded weights that stay; None if each launch decodes them, or none does.
        by_batch_rows: whether batch_rows.py computes them.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        early: bool,
        decoded: DecodedWeights | None = None,
        keep: bool = True,
    ) -> None:
        """Choose.

        Args:
            model: the step's; its caches have their memory already.
            batch: rows of each product.
            dtype: the model's 16 bits.
            device: where it is.
            early: whether kernels start before those in front of them have ended.
            decoded: those of another step of this model, which this one shares.
            keep: whether decoded weights may stay.
        """
        self._batch, self._dtype, self._early = batch, dtype, early
        self._workspace = Workspace(device)
        self.decoded = decoded
        if decoded is None and keep and batch >= _FEWEST_KEPT:
            own = DecodedWeights(model, dtype, device)
            self.decoded = own if own.kept else None
        fewest = _FEWEST_DECODED if self.decoded is None else _FEWEST_KEPT
        self._by_library = batch >= fewest
        self.by_batch_rows = not self._by_library and batch >= _FEWEST_OF_A_BATCH

    def of(self, weights: Sequence[Packed | Tensor]) -> tuple[Callable[[Product], Any], int]:
        """What makes a call of a product with these weights (N_i, K), and for how many rows at a time."""
        rows = min(max_rows(w) for w in weights)
        if rows == 0:
            raise Unsupported(f"the kernel for few rows does not read {described(weights[0])}.")
        if self._by_library:
            return partial(ManyRows, dtype=self._dtype, decoded=self.decoded), self._batch
        if self.by_batch_rows:
            return partial(BatchRows, workspace=self._workspace, early=self._early), MOST_ROWS
        return partial(FewRows, early=self._early), rows


def described(weight: Packed | Tensor) -> str:
    """A weight's shape and format in words."""
    kind = weight.format.name if isinstance(weight, Packed) else str(weight.dtype)
    return f"weights of {tuple(weight.shape)} in {kind}"
