"""A decode step's product for more rows than batch_rows.py takes without reading the weights several times.

The same operands, the same result up to rounding to 16 bits: the weight is decoded once, the library
multiplies. Everything is a launch without the host, so that a CUDA graph can record it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbits.formats.base import Packed
from fewbits.host.walks import all_modules
from fewbits.kernels.codec.dequantize import dequantize
from fewbits.kernels.decoder.gated_activation import gated_activation
from fewbits.kernels.decoder.rmsnorm import rmsnorm_ref
from fewbits.kernels.generation.operands import LowRankSum, Product
from fewbits.kernels.product.matmul_packed import PLAIN
from fewbits.nn.experts import QuantizedExperts
from fewbits.nn.linear import QuantizedLinear


class ManyRows:
    """One prepared product over operands that stay where they are."""

    def __init__(self, product: Product, *, dtype: torch.dtype) -> None:
        """Prepare a product; ``dtype``: the 16 bits in which the library multiplies."""
        self.out, self._dtype, self._of = product.out, dtype, product
        none = [None] * len(product.weights)
        biases, branches = product.biases or none, product.branches or none
        self._parts = list(zip(product.weights, biases, branches, strict=True))

    def launch(self) -> Tensor:
        """Run it on the current stream; ``out`` (M, N)."""
        x, norm, activation = self._of.x, self._of.norm, self._of.activation
        if norm is not None:
            x, _ = rmsnorm_ref(x.float(), norm.weight, norm.eps, norm.offset)
        x = x.to(self._dtype)
        products = [self._product(x, *part) for part in self._parts]
        if activation is not None:
            y = gated_activation(products[0], products[1], activation=activation)
        else:
            y = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        return self.out.add_(y) if self._of.add else self.out.copy_(y)

    def _product(
        self, x: Tensor, weight: Packed | Tensor, bias: Tensor | None, branch: LowRankSum | None
    ) -> Tensor:
        dense = dequantize(weight, self._dtype) if isinstance(weight, Packed) else weight
        y = F.linear(x, dense, bias)
        if branch is not None:
            inner = branch.inner.to(self._dtype) if branch.a is None else x @ branch.a.t()
            y = torch.addmm(y, inner, branch.weight.t(), alpha=branch.scale)
        return y


@contextmanager
def products_in_16_bits(model: nn.Module) -> Iterator[None]:
    """Layers that round their inputs to 8 bits for speed take them as they are, as the step does."""
    kinds = (QuantizedLinear, QuantizedExperts)
    rounding = [m for m in all_modules(model) if isinstance(m, kinds) and m.operands != PLAIN]
    operands = [m.operands for m in rounding]
    try:
        for module in rounding:
            module.operands = PLAIN
        yield
    finally:
        for module, before in zip(rounding, operands, strict=True):
            module.operands = before
