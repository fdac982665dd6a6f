"""The three ways in which a projection multiplies by its weights, and where values of weights come from.

    forward    y  = x @ W^T     x  (M, K), W (N, K) all parts below each other, y (M, N)
    backward   dx = dy @ W      dy (M, N), dx (M, K)

`DenseProjection`: packed weights are decoded side by side into one buffer (N, K), so that one product serves
all parts. Where t (M, R) lies beside dy in one buffer (M, N + R), and A (R, K) is copied below W, then
``dy @ W + t @ A`` is one product of (M, N + R) and (N + R, K) too:

    [ dy | t ]  @  [ W ]        R must be a multiple of 8, so that rows stay aligned to 16 bytes
                   [ A ]

`RoundedProjection`: the same, for weights that train towards a format; each product rounds ``W + s B A``.

`Float8Projection`: both operands of the products for y and dx are E4M3. x and dy have a scale per row, which
their producers may have made already; the weight has one scale for all parts. (E4M3 is floating point: one
scale serves a weight as well as many while its values lie within 2**15 of the largest, below which they are
rounded in steps of 2**-18 of it.) Float8 products want both operands with contiguous K, so the backward pass
takes W transposed, (K, N). Branches and dW stay in x's dtype: for dW both operands would have to be read
twice more and transposed, which cost more than the faster product gains (28 layers of 2048, 8192 tokens,
H200).

Values of weights (decoded, or float8) are `FreshValues`, computed for each product; or `CachedValues`, kept
from step to step; or, for float8 weights that train, `PairedValues`: the forward pass writes W and its
transpose in one pass over the weight and leaves the transpose for the backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor

from fewbits.decoder.projection import Projection, RoundedPart, Rows
from fewbits.decoder.weight_scales import WeightScale
from fewbits.formats.base import Packed
from fewbits.kernels.codec.dequantize import dequantize
from fewbits.kernels.codec.quantize_float8 import quantize_rows
from fewbits.kernels.decoder.gated_activation_triton import MAX_RANK, LowRank
from fewbits.kernels.decoder.low_rank_add import low_rank_add_
from fewbits.kernels.product.fake_quantize import fake_quantize, fake_quantize_lora
from fewbits.kernels.product.matmul_float8 import float8_linear, float8_weight, float8_weight_pair
from fewbits.nn.lasting import lasting_tensors

Make = Callable[[int], Tensor]  # values of a weight, with this many more rows than it has


_STATES = count()


class FreshValues:
    """Values of a weight that are computed for one product and dropped."""

    def of(self, key: object, make: Make, room: int = 0, rows: int = 0) -> Tensor:
        """What ``make`` gives, (N, K) or its transpose."""
        return make(0)


class CachedValues(FreshValues):
    """Values of frozen weights stay from call to call, as the products take them.

    Attributes:
        state: a number that no others have and none of these had before one of them was made.
    """

    def __init__(self) -> None:
        self._values: dict[object, Tensor] = {}
        self.state = next(_STATES)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(values.nbytes for values in self._values.values())

    def of(self, key: object, make: Make, room: int = 0, rows: int = 0) -> Tensor:
        """What ``make`` gave before, (N + rows, K) or more; what has fewer ``rows`` below is made again.

        Too few rows has what was made without adapters, or for smaller ranks.
        """
        if key in self._values and self._values[key].shape[0] < rows:
            del self._values[key]  # first, for two of them would need twice the memory
        if key not in self._values:
            self.state = next(_STATES)
            # A graph may hold them later, also where this pass is one of inference mode.
            with lasting_tensors() if torch.is_inference_mode_enabled() else contextlib.nullcontext():
                self._values[key] = make(room)
        return self._values[key]


class PairedValues(FreshValues):
    """The forward pass leaves the transposed values of weights for the backward pass.

    One pass over the weights less, for a byte a value in between.
    """

    def __init__(self) -> None:
        self._left: Tensor | None = None

    def leave(self, values: Tensor) -> None:
        """Keep the transposed values (K, N) until they are taken."""
        self._left = values

    def take(self) -> Tensor | None:
        """What was left (K, N), once; else None."""
        left, self._left = self._left, None
        return left


@dataclass(frozen=True)
class DenseProjection(Projection):
    """Products in x's dtype with weights that are packed, or dense.

    Attributes:
        values: where decoded weights come from.
    """

    values: FreshValues | CachedValues = field(default_factory=FreshValues)

    @cached_property
    def has_room_beside(self) -> bool:
        """See `Projection`: W is decoded into a buffer, whose rows stay aligned to 16 bytes."""
        return all(isinstance(part.weight, Packed) for part in self.parts) and _is_aligned(self.rank)

    def product(self, x: Rows) -> Tensor:
        """See `Projection.product`."""
        assert x.dense is not None
        if self._one_buffer():
            return x.dense @ self._weight(x.dense.dtype).t()  # (M, K) @ (K, N)
        y = x.dense.new_empty(x.dense.shape[0], self.width)
        for part, at in zip(self.parts, self.slices(), strict=True):
            torch.mm(x.dense, _dense(part.weight, x.dense.dtype).t(), out=y[:, at])  # (M, N_i)
        return y

    def backward_product(self, dy: Rows, t: Tensor | None) -> Tensor:
        """See `Projection.backward_product`."""
        assert dy.dense is not None
        dense, dtype = dy.dense, dy.dense.dtype
        a = None if t is None else self.all_a(dtype)  # (R, K)
        wide = None if t is None else _joined(dense, t)  # (M, N + R): dy and t side by side
        if wide is not None and a is not None and self._one_buffer():
            weight = self._weight(dtype, extra=self.rank)  # (N + R, K)
            weight[self.width :].copy_(a)  # the last R rows
            return wide @ weight  # (M, N + R) @ (N + R, K)
        if self._one_buffer():
            dx = dense @ self._weight(dtype)  # (M, N) @ (N, K)
        else:
            at = self.slices()
            dx = dense[:, at[0]] @ _dense(self.parts[0].weight, dtype)  # (M, N_0) @ (N_0, K)
            for part, columns in zip(self.parts[1:], at[1:], strict=True):
                dx.addmm_(dense[:, columns], _dense(part.weight, dtype))  # + (M, N_i) @ (N_i, K)
        return dx if a is None or t is None else _add_product_(dx, t, a)

    def _one_buffer(self) -> bool:
        return len(self.parts) == 1 or all(isinstance(part.weight, Packed) for part in self.parts)

    def _weight(self, dtype: torch.dtype, extra: int = 0) -> Tensor:
        """W (N + extra, K) of one buffer; the extra rows are not written."""
        first = self.parts[0]
        if len(self.parts) == 1 and isinstance(first.weight, Tensor):
            return first.weight.to(dtype)
        room, rows = self.rank if self.has_room_beside else 0, self.width + extra
        return self.values.of(dtype, lambda n: self._decode(dtype, max(n, extra)), room, rows)[:rows]

    def _decode(self, dtype: torch.dtype, extra: int) -> Tensor:
        weight = _buffer(self, extra, dtype)  # (N + extra, K)
        for part, at in zip(self.parts, self.slices(), strict=True):
            assert isinstance(part.weight, Packed)
            dequantize(part.weight, out=weight[at])  # (N_i, K)
        return weight


@dataclass(frozen=True)
class RoundedProjection(Projection):
    """Products with dense weights that are rounded, their branches added, in each of them."""

    parts: tuple[RoundedPart, ...]
    branches_beside: ClassVar[bool] = False

    def product(self, x: Rows) -> Tensor:
        """See `Projection.product`."""
        assert x.dense is not None
        return x.dense @ self._weight(x.dense.dtype).t()  # (M, K) @ (K, N)

    def backward_product(self, dy: Rows, t: Tensor | None) -> Tensor:
        """See `Projection.backward_product`; the branches' part is in the product."""
        assert dy.dense is not None
        return dy.dense @ self._weight(dy.dense.dtype)  # (M, N) @ (N, K)

    def _weight(self, dtype: torch.dtype) -> Tensor:
        """The rounded weights (N, K)."""
        weight = _buffer(self, 0, dtype)
        for part, at in zip(self.parts, self.slices(), strict=True):
            _round_into(part, weight[at])
        return weight


@dataclass(frozen=True)
class Float8Projection(Projection):
    """Products of E4M3 values with scales.

    Attributes:
        scale: what float8 values of the weights are multiplied by.
        values: where float8 values of weights come from; `PairedValues` for dense weights that train.
        fast_accumulation: products add up in the tensor cores' own, shorter, accumulator.
    """

    scale: WeightScale
    values: FreshValues | CachedValues | PairedValues = field(default_factory=FreshValues)
    fast_accumulation: bool = True
    is_float8: ClassVar[bool] = True

    def product(self, x: Rows) -> Tensor:
        """See `Projection.product`; x has float8 values."""
        weight = self._pair(self.values) if isinstance(self.values, PairedValues) else self._weight(False)
        return self._multiply(x, weight, self.scale.outputs)

    def backward_product(self, dy: Rows, t: Tensor | None) -> Tensor:
        """See `Projection.backward_product`."""
        if dy.values is None:
            assert dy.dense is not None
            dy = Rows(dy.dense, *quantize_rows(dy.dense))  # with values (M, N) and a scale a row, (M, 1)
        left = self.values.take() if isinstance(self.values, PairedValues) else None
        weight = self._weight(True) if left is None else left  # (K, N)
        dx = self._multiply(dy, weight, self.scale.inputs)  # (M, N), and W as (K, N): (M, K)
        if t is not None:
            _add_product_(dx, t, self.all_a(dx.dtype))  # + (M, R) @ (R, K)
        return dx

    def _multiply(self, x: Rows, weight: Tensor, scale: Tensor) -> Tensor:
        assert x.values is not None and x.scale is not None
        dtype, fast = x.product_dtype, self.fast_accumulation
        return float8_linear(x.values, x.scale, weight, scale, out_dtype=dtype, fast=fast)

    def _weight(self, transposed: bool) -> Tensor:
        """E4M3 values of W (N, K), or of its transpose (K, N)."""
        return self.values.of(("float8", transposed), lambda _: self._make(transposed))

    def _make(self, transposed: bool) -> Tensor:
        shape = (self.depth, self.width) if transposed else (self.width, self.depth)
        weight = torch.empty(shape, dtype=torch.float8_e4m3fn, device=_device(self.parts[0].weight))
        for part, at in zip(self.parts, self.slices(), strict=True):
            out = weight[:, at] if transposed else weight[at]  # (K, N_i), or (N_i, K)
            float8_weight(part.weight, transposed=transposed, inverse_scale=self.scale.inverse, out=out)
        return weight

    def _pair(self, values: PairedValues) -> Tensor:
        """E4M3 values of W (N, K), all dense; those of its transpose (K, N) are left in ``values``."""
        device, E4M3 = _device(self.parts[0].weight), torch.float8_e4m3fn
        weight = torch.empty((self.width, self.depth), dtype=E4M3, device=device)
        other = torch.empty((self.depth, self.width), dtype=E4M3, device=device)
        values.leave(other)
        for part, at in zip(self.parts, self.slices(), strict=True):
            assert isinstance(part.weight, Tensor)
            inverse = self.scale.inverse
            float8_weight_pair(part.weight, inverse_scale=inverse, out=weight[at], transposed=other[:, at])
        return weight


def _is_aligned(rank: int) -> bool:
    return rank > 0 and rank % 8 == 0


def _buffer(projection: Projection, extra: int, dtype: torch.dtype) -> Tensor:
    """(N + extra, K) on the weights' device."""
    rows, device = projection.width + extra, _device(projection.parts[0].weight)
    return torch.empty(rows, projection.depth, dtype=dtype, device=device)


def _add_product_(dx: Tensor, t: Tensor, a: Tensor) -> Tensor:
    """``dx += t @ a``."""
    return dx.addmm_(t, a) if a.shape[0] > MAX_RANK else low_rank_add_(dx, LowRank(t, a.t()))


def _joined(dy: Tensor, t: Tensor) -> Tensor | None:
    """dy and t as one (M, N + R), if they lie side by side in one buffer."""
    N, R = dy.shape[1], t.shape[1]
    beside = t.storage_offset() == dy.storage_offset() + N and t.stride() == dy.stride()
    if (
        not beside
        or dy.stride(0) != N + R
        or t.untyped_storage().data_ptr() != dy.untyped_storage().data_ptr()
    ):
        return None
    return dy.as_strided((dy.shape[0], N + R), dy.stride(), dy.storage_offset())


def _dense(weight: Packed | Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else dequantize(weight, dtype)


def _round_into(part: RoundedPart, out: Tensor) -> None:
    """The weight with its branch, rounded as one matrix."""
    if part.branch is None:
        out.copy_(fake_quantize(part.weight, part.rounding, out.dtype))
    else:
        branch = part.branch
        fake_quantize_lora(part.weight, branch.a, branch.b, branch.scaling, part.rounding, out=out)


def _device(weight: Packed | Tensor) -> torch.device:
    return weight.device if isinstance(weight, Tensor) else weight.codes.device
