"""A decode step's products by the library, for more rows than kernels of ours take at once.

The same operands, the same result up to rounding to 16 bits: the weight is decoded, the library multiplies.
Everything is a launch without the host, so that a CUDA graph can record it. Decoding 8 billion weights takes
5 ms of an H200 and multiplying 256 rows with them 6: so a step keeps the decoded weights where there is
memory for them (`DecodedWeights`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbits.formats.base import Packed
from fewbits.host.memory import free_bytes
from fewbits.host.walks import all_modules
from fewbits.kernels.codec.dequantize import dequantize
from fewbits.kernels.decoder.gated_activation import gated_activation
from fewbits.kernels.decoder.rmsnorm import rmsnorm_rows
from fewbits.kernels.generation.operands import LowRankSum, Product
from fewbits.kernels.product.matmul_packed import PLAIN
from fewbits.nn.experts import QuantizedExperts
from fewbits.nn.linear import QuantizedLinear

_MOST = 0.5  # of the memory that is free, for decoded weights: prompts and other work want some too


class DecodedWeights:
    """Packed weights in 16 bits, as long as a step lives.

    Attributes:
        kept: whether there was memory for them.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Decide for all packed linear layers of a model, whose caches have their memory already."""
        linears = [m for m in all_modules(model) if isinstance(m, QuantizedLinear)]
        needed = sum(m.in_features * m.out_features for m in linears) * dtype.itemsize
        self._dtype = dtype
        self.kept = 0 < needed <= _MOST * free_bytes(device)
        # By the packed weights side by side, which live as long as this does.
        self._dense: dict[tuple[int, ...], tuple[Sequence[Packed | Tensor], Tensor]] = {}
        self._writes: dict[tuple[int, ...], int] = {}  # how many torch had counted when they were decoded

    def of(self, weights: Sequence[Packed | Tensor]) -> Tensor | None:
        """Weights (N_i, K) in one (sum of N_i, K); None if they are not kept, or not packed."""
        if not self.kept or not all(isinstance(w, Packed) for w in weights):
            return None
        key = tuple(map(id, weights))
        if key not in self._dense:
            dense = [dequantize(w, self._dtype) for w in weights if isinstance(w, Packed)]
            self._dense[key] = weights, dense[0] if len(dense) == 1 else torch.cat(dense)
            self._writes[key] = _writes_into(weights)
        return self._dense[key][1]

    @torch.no_grad()
    def refresh(self) -> None:
        """Decode anew, in its place, what somebody has written into (``load_state_dict``)."""
        for key, (weights, dense) in self._dense.items():
            writes = _writes_into(weights)
            if writes != self._writes[key]:
                places = dense.split([w.shape[0] for w in weights])
                for place, w in zip(places, weights, strict=True):
                    place.copy_(dequantize(w, self._dtype) if isinstance(w, Packed) else w)
                self._writes[key] = writes


def _writes_into(weights: Sequence[Packed | Tensor]) -> int:
    parts = [part for w in weights if isinstance(w, Packed) for part in w.parts.values()]
    return sum(part._version for part in parts if not part.is_inference())


class ManyRows:
    """One prepared product over operands that stay where they are."""

    def __init__(
        self, product: Product, *, dtype: torch.dtype, decoded: DecodedWeights | None = None
    ) -> None:
        """Prepare a product.

        Args:
            product: what is computed, of any number of rows.
            dtype: the 16 bits in which the library multiplies.
            decoded: where decoded weights stay; None: each launch decodes them.
        """
        self.out, self._dtype, self._of = product.out, dtype, product
        self._dense = None if decoded is None else decoded.of(product.weights)
        self._sizes = [w.shape[0] for w in product.weights]

    @property
    def keeps_weights(self) -> bool:
        """Whether decoded weights stay."""
        return self._dense is not None

    def launch(self) -> Tensor:
        """Run it on the current stream; ``out`` (M, N)."""
        x, norm, activation = self._of.x, self._of.norm, self._of.activation
        if norm is not None:
            y = rmsnorm_rows(x, norm.weight, norm.eps, offset=norm.offset, dtype=self._dtype).y
            assert y is not None  # as nothing else was asked for
            x = y
        x = x.to(self._dtype)
        products = self._products(x)
        if activation is not None:
            outputs = [gated_activation(products[0], products[1], activation=activation)]
        else:
            outputs = products
        for out, y in zip(self.out.split([y.shape[1] for y in outputs], dim=1), outputs, strict=True):
            if self._of.add:
                out.add_(y)
            else:
                out.copy_(y)
        return self.out

    def _products(self, x: Tensor) -> list[Tensor]:
        """x (M, K) with each weight, its bias and its branch: (M, N_i) each."""
        weights, none = self._of.weights, [None] * len(self._sizes)
        biases, branches = self._of.biases or none, self._of.branches or none
        if self._dense is None:
            products = [F.linear(x, self._decoded(w)) for w in weights]
        else:
            products = list(F.linear(x, self._dense).split(self._sizes, dim=1))
        return [self._with(x, *part) for part in zip(products, biases, branches, strict=True)]

    def _decoded(self, weight: Packed | Tensor) -> Tensor:
        return dequantize(weight, self._dtype) if isinstance(weight, Packed) else weight

    def _with(self, x: Tensor, y: Tensor, bias: Tensor | None, branch: LowRankSum | None) -> Tensor:
        """A product (M, N) and what is added to it."""
        if bias is not None:
            y = y + bias
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
