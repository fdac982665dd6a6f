"""Packed linears of a model's own modules by decoding's kernels, while a step of these modules runs.

A packed linear's own product decodes the whole weight first, which for one row of x moves nine times the
bytes of an NF4 weight. The kernels of a decode step read each weight once. They want operands that stay where
they are: each linear gets a place for its rows of x and one for what comes out, for each number of rows.

Linears that the kernels do not take, and rows that are not in 16 bits, go the linear's own way. Adapters
around such a linear call it, and add their branches themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput, Unsupported
from fewbits.host.walks import all_modules
from fewbits.kernels.generation.batch_rows import MOST_ROWS, BatchRows, Workspace
from fewbits.kernels.generation.cut import max_rows
from fewbits.kernels.generation.few_rows import FewRows
from fewbits.kernels.generation.operands import Product
from fewbits.nn.lasting import lasting_tensors
from fewbits.nn.linear import QuantizedLinear

_FEWEST_OF_A_BATCH = 3  # rows, as in a decode step
_HALVES = (torch.bfloat16, torch.float16)


class ModuleProducts:
    """The kernels' products of a model's packed linears.

    Attributes:
        linears: those that the kernels take.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.linears: list[Any] = [m for m in all_modules(model) if _is_taken(m)]
        self._workspace = Workspace(device)
        self._calls: dict[tuple[int, int, torch.dtype], Any] = {}
        self._refused: set[int] = set()
        self._called: set[int] = set()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the linears computed so."""
        self._called.clear()
        try:
            for number, linear in enumerate(self.linears):
                vars(linear)["forward"] = partial(self._forward, number)
            yield
        finally:
            for linear in self.linears:
                vars(linear).pop("forward", None)

    def _forward(self, number: int, x: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        linear = self.linears[number]
        rows = x.shape[:-1].numel()
        again = number in self._called  # in one step: the place of its output is another one's already
        if again or number in self._refused or x.dtype not in _HALVES or not 1 <= rows <= MOST_ROWS:
            return type(linear).forward(linear, x)  # type: ignore[no-any-return]
        key = (number, rows, x.dtype)
        if key not in self._calls:
            try:
                with lasting_tensors():
                    self._calls[key] = self._prepared(linear, rows, x)
            except (Unsupported, BadInput):
                self._refused.add(number)
                return type(linear).forward(linear, x)  # type: ignore[no-any-return]
        place, call = self._calls[key]
        place.copy_(x.reshape(rows, -1))
        # Another call of the same linear would write there again.
        return call.launch().clone().view(*x.shape[:-1], -1)  # type: ignore[no-any-return]

    def _prepared(
        self, linear: QuantizedLinear, rows: int, like: Tensor
    ) -> tuple[Tensor, FewRows | BatchRows]:
        """The place of x (rows, K), and the product."""
        place = torch.empty(rows, linear.in_features, dtype=like.dtype, device=like.device)
        out = torch.empty(rows, linear.out_features, dtype=like.dtype, device=like.device)
        product = Product(place, [linear.packed], out, biases=[linear.bias])
        if rows < _FEWEST_OF_A_BATCH and max_rows(linear.packed) >= rows:
            return place, FewRows(product)
        return place, BatchRows(product, self._workspace)


def _is_taken(module: nn.Module) -> bool:
    if type(module) is not QuantizedLinear or "forward" in vars(module):
        return False
    return max_rows(module.packed) > 0
