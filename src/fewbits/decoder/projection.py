"""Linears side by side over one input, with their LoRA branches: the products of the fused decoder's nodes.

    y = x @ [W_1; W_2; ...]^T + b     + for each part    s * (x @ A_i^T) @ B_i^T        x (M, K)   y (M, N)

Shapes: W_i (N_i, K), A_i (r_i, K), B_i (N_i, r_i), b_i (N_i,), N the sum of N_i, R the sum of r_i.

Backward, with ``xa_i = s_i * x @ A_i^T`` (kept) and ``t_i = s_i * dy_i @ B_i``:
``dx = dy @ W + t @ A``, ``dA = t^T @ x``, ``dB_i = dy_i^T @ xa_i``, ``db = sum of dy over rows``, and for a
weight that trains ``dW_i = dy_i^T @ x``.

Packed weights are decoded side by side into one buffer, so that one product serves all parts; where t fits
beside dy in one buffer, and A below W, ``dy @ W + t @ A`` is one product too.

In float8 both operands of the products for y and dx are E4M3: x and dy with a scale per row, which their
producers may have made already, the weight with one scale for all parts. (E4M3 is floating point: one scale
serves a weight as well as many while its values lie within 2**15 of the largest, below which they are rounded
in steps of 2**-18 of it.) Branches and dW stay in x's dtype: for dW both operands would have to be read twice
more and transposed, which cost more than the faster product gains (28 layers of 2048, 8192 tokens, H200).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.formats.base import Format, Packed
from fewbits.kernels.codec.dequantize import dequantize
from fewbits.kernels.codec.quantize_float8 import quantize_rows
from fewbits.kernels.decoder.gated_activation_triton import MAX_RANK, LowRank
from fewbits.kernels.decoder.low_rank_add import low_rank_add_
from fewbits.kernels.product.fake_quantize import fake_quantize, fake_quantize_lora
from fewbits.kernels.product.lora_reduce import ReduceSlice, lora_reduce
from fewbits.kernels.product.matmul_float8 import (
    float8_linear,
    float8_weight,
    float8_weight_pair,
    scale_row,
    weight_scale,
    weight_scales,
)


class Rows(NamedTuple):
    """The rows of a product: dense (M, K), and in float8 also E4M3 values (M, K) with a scale (M, 1) each.

    Dense rows may be absent where only the float8 ones are needed.

    Attributes:
        one_scale: (1,), where all rows have the same scale.
    """

    dense: Tensor | None
    values: Tensor | None = None
    scale: Tensor | None = None
    one_scale: Tensor | None = None


@dataclass(frozen=True)
class Branch:
    """A low-rank branch: ``scaling * (x @ a^T) @ b^T`` with a (r, K) and b (N, r)."""

    a: Tensor
    b: Tensor
    scaling: float


@dataclass(frozen=True)
class Part:
    """One linear: its weight, packed or dense, a bias and a branch where it has them.

    With ``rounding`` (quantisation-aware training) a dense weight and its branch are added and rounded to
    that format as one matrix in each product; gradients pass straight through. Parts side by side have it
    all, or none.
    """

    weight: Packed | Tensor
    bias: Tensor | None = None
    branch: Branch | None = None
    rounding: Format | None = None

    @property
    def width(self) -> int:
        """N, its number of outputs."""
        return int(self.weight.shape[0])


class WeightScale(NamedTuple):
    """The one scale of weights side by side, in the shapes that the products take; all float32."""

    inverse: Tensor  # (1, 1)
    outputs: Tensor  # (1, N), the scale over and over: for y
    inputs: Tensor  # (1, K): for dx


def scale_of(weights: Sequence[Packed | Tensor]) -> WeightScale:
    """The scale of the weights (N_i, K) of one product."""
    one = weight_scale(*weights)
    N, K = sum(int(w.shape[0]) for w in weights), int(weights[0].shape[1])
    return WeightScale(one.reciprocal(), scale_row(one, N), scale_row(one, K))


def scales_of(groups: Sequence[Sequence[Tensor]]) -> list[WeightScale]:
    """`scale_of` the dense weights of each product: all of a model's on one device, in few launches."""
    scales = weight_scales(groups)
    sides = [(sum(int(w.shape[0]) for w in group), int(group[0].shape[1])) for group in groups]
    widest = -(-max(max(side) for side in sides) // 4) * 4  # rows begin at multiples of 16 bytes
    rows = scales[:, None].expand(-1, widest).contiguous()
    inverses = scales.reciprocal()[:, None].expand(-1, 4).contiguous()
    return [
        WeightScale(inverse[:1].view(1, 1), row[:N].view(1, N), row[:K].view(1, K))
        for inverse, row, (N, K) in zip(inverses, rows, sides, strict=True)
    ]


@dataclass(frozen=True)
class Projection:
    """Linears side by side; see the module's text.

    Attributes:
        parts: the linears, in the order of their outputs.
        weight_scale: what float8 values of the weights are multiplied by; None: no float8 products.
        fast_accumulation: float8 products add up in the tensor cores' own, shorter, accumulator.
        turned: None, or where `product` leaves the transposed float8 values of dense weights for
            `backward_product`: one pass over the weights less, for a byte a value in between.
        decoded: None, or where values of frozen weights stay, as the products take them, from call to call.
    """

    parts: tuple[Part, ...]
    weight_scale: WeightScale | None = None
    fast_accumulation: bool = True
    turned: list[Tensor] | None = None
    decoded: dict[object, Tensor] | None = None

    @property
    def width(self) -> int:
        """N, the sum of all parts' outputs."""
        return sum(part.width for part in self.parts)

    @property
    def depth(self) -> int:
        """K, the number of inputs."""
        return int(self.parts[0].weight.shape[1])

    @property
    def rank(self) -> int:
        """R, the sum of the branches' ranks."""
        return sum(part.branch.a.shape[0] for part in self.parts if part.branch is not None)

    @property
    def is_float8(self) -> bool:
        """True if its products take float8 operands."""
        return self.weight_scale is not None

    def tensors(self) -> list[Tensor | None]:
        """What may train, four for each part: dense weight, bias, a, b; `gradients` are in this order."""
        flat: list[Tensor | None] = []
        for part in self.parts:
            flat.append(part.weight if isinstance(part.weight, Tensor) else None)
            flat.append(part.bias)
            flat.extend((None, None) if part.branch is None else (part.branch.a, part.branch.b))
        return flat

    def bias(self) -> Tensor | None:
        """The biases side by side (N,), zeros for a part without one; None if no part has one."""
        biases = [part.bias for part in self.parts]
        like = next((b for b in biases if b is not None), None)
        if like is None or len(biases) == 1:
            return like
        return torch.cat(
            [like.new_zeros(p.width) if b is None else b for p, b in zip(self.parts, biases, strict=True)]
        )

    def slices(self) -> list[slice]:
        """The columns of y that belong to each part."""
        ends, end = [], 0
        for part in self.parts:
            ends.append(slice(end, end + part.width))
            end += part.width
        return ends

    # 1. Forward.

    def product(self, x: Rows) -> Tensor:
        """``x @ W^T`` (M, N), without biases and branches."""
        if self.weight_scale is not None:
            dtype = torch.bfloat16 if x.dense is None else x.dense.dtype
            weight = self._float8_weight() if self.turned is None else self._float8_weight_pair(self.turned)
            return self._float8_product(x, weight, self.weight_scale.outputs, dtype)
        assert x.dense is not None
        if self._one_buffer():
            return x.dense @ self._weight(x.dense.dtype).t()
        y = x.dense.new_empty(x.dense.shape[0], self.width)
        for part, at in zip(self.parts, self.slices(), strict=True):
            torch.mm(x.dense, _dense(part.weight, x.dense.dtype).t(), out=y[:, at])
        return y

    def branch_inputs(self, x: Tensor) -> Tensor | None:
        """``xa`` (M, R), the branches' inner values with their scaling; None without branches."""
        branches = self._branches()
        if not branches:
            return None
        scalings = {branch.scaling for branch in branches}
        a = side_by_side([branch.a for branch in branches], x.dtype)
        scaling = scalings.pop() if len(scalings) == 1 else None
        if scaling is not None:
            return _scaled_mm(x, a.t(), scaling)
        xa = x @ a.t()
        for branch, columns in zip(branches, _columns(branches), strict=True):
            xa[:, columns].mul_(branch.scaling)
        return xa

    def low_rank(self, xa: Tensor | None) -> list[LowRank | None]:
        """For each part what a kernel adds to its outputs; None where it has no branch beside its weight."""
        found: list[LowRank | None] = []
        start = 0
        for part in self.parts:
            if part.branch is None or xa is None:
                found.append(None)
                continue
            r = part.branch.a.shape[0]
            beside = part.rounding is None
            found.append(LowRank(xa[:, start : start + r], part.branch.b.to(xa.dtype)) if beside else None)
            start += r
        return found

    def add_biases_(self, y: Tensor) -> Tensor:
        """Add the biases to ``y`` (M, N), in place."""
        for part, at in zip(self.parts, self.slices(), strict=True):
            if part.bias is not None:
                y[:, at].add_(part.bias.to(y.dtype))
        return y

    def finish_(self, y: Tensor, xa: Tensor | None, residual: Tensor | None) -> Tensor:
        """Add biases, branches and ``residual`` (M, N) to the product ``y`` (M, N), in place."""
        for branch, at in zip(self.low_rank(xa), self.slices(), strict=True):
            if branch is not None or residual is not None:
                low_rank_add_(y[:, at], branch, None if residual is None else residual[:, at])
        return self.add_biases_(y)

    # 2. Backward.

    def gradient_buffer(self, M: int, like: Tensor) -> Tensor:
        """Where dy is best written: (M, N), as the left part of rows that have room for t."""
        extra = self.rank if self._extended() else 0
        return like.new_empty(M, self.width + extra)[:, : self.width]

    def inner_gradients(self, dy: Rows, xa: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
        """t (M, R), beside dy where `gradient_buffer` left room, and every dB; None, [] without branches."""
        if xa is None:
            return None, []
        slices = [
            ReduceSlice(at.start, part.branch.b, part.branch.scaling)
            for part, at in zip(self.parts, self.slices(), strict=True)
            if part.branch is not None
        ]
        if dy.dense is not None:
            return lora_reduce(dy.dense, xa, slices, out=self.inner_buffer(dy.dense))
        # The values as they are, their one scale afterwards.
        assert dy.values is not None and dy.one_scale is not None
        t, dbs = lora_reduce(dy.values, xa, slices, out=torch.empty_like(xa))
        for made in (t, *dbs):
            made.mul_(dy.one_scale)
        return t, dbs

    def inner_buffer(self, dy: Tensor) -> Tensor:
        """Where t (M, R) is best written: beside dy, if `gradient_buffer` left room for it."""
        if self._extended() and dy.stride(0) == self.width + self.rank:
            return dy.as_strided((dy.shape[0], self.rank), dy.stride(), dy.storage_offset() + self.width)
        return dy.new_empty(dy.shape[0], self.rank)

    def gradients(
        self,
        dy: Tensor | None,
        inner: tuple[Tensor | None, list[Tensor]],
        x: Tensor | None,
        needs: Sequence[bool],
        *,
        da: Tensor | None = None,
    ) -> list[Tensor | None]:
        """The gradients of `tensors`, in their dtypes; None where none is needed.

        Args:
            dy: (M, N); may be absent where no weight and no bias trains.
            inner: what `inner_gradients` gave.
            x: (M, K) the rows of the forward product; may be absent where no weight and no A trains.
            needs: which of `tensors` need a gradient.
            da: (R, K), the gradient of all A's, where it is known already.
        """
        found: list[Tensor | None] = [None] * len(needs)
        (t, dbs), start = inner, 0
        of_b = iter(dbs)
        if da is None and t is not None and x is not None and any(needs[2::4]):
            da = t.t() @ x
        for i, (part, at) in enumerate(zip(self.parts, self.slices(), strict=True)):
            if needs[4 * i] and isinstance(part.weight, Tensor):
                assert x is not None and dy is not None
                found[4 * i] = (dy[:, at].t() @ x).to(part.weight.dtype)
            if needs[4 * i + 1] and part.bias is not None:
                assert dy is not None
                found[4 * i + 1] = dy[:, at].sum(0, dtype=torch.float32).to(part.bias.dtype)
            if part.branch is None:
                continue
            end = start + part.branch.a.shape[0]
            if needs[4 * i + 2]:
                assert da is not None
                found[4 * i + 2] = da[start:end].to(part.branch.a.dtype)
            db = next(of_b)
            if needs[4 * i + 3]:
                found[4 * i + 3] = db
            start = end
        return found

    def outside(self, t: Tensor | None) -> Tensor | None:
        """What of t is still to be added to dx: nothing where branches are rounded into their weights."""
        return None if any(part.rounding is not None for part in self.parts) else t

    def backward_product(self, dy: Rows, t: Tensor | None) -> Tensor:
        """``dx = dy @ W + t @ A`` (M, K).

        Args:
            dy: (M, N); in float8 by row if it is not in float8 yet.
            t: (M, R) from `inner_gradients`; None without branches, or where its part is added elsewhere.
        """
        if self.weight_scale is not None:
            return self._backward_float8(dy, t)
        assert dy.dense is not None
        return self._backward_dense(dy.dense, t)

    def _backward_dense(self, dy: Tensor, t: Tensor | None) -> Tensor:
        t = self.outside(t)
        a = None if t is None else side_by_side([branch.a for branch in self._branches()], dy.dtype)
        wide = None if t is None else _joined(dy, t)
        if wide is not None and a is not None and self._one_buffer():
            weight = self._weight(dy.dtype, extra=self.rank)
            weight[self.width :].copy_(a)
            return wide @ weight
        if self._one_buffer():
            dx = dy @ self._weight(dy.dtype)
        else:
            at = self.slices()
            dx = dy[:, at[0]] @ _dense(self.parts[0].weight, dy.dtype)
            for part, columns in zip(self.parts[1:], at[1:], strict=True):
                dx.addmm_(dy[:, columns], _dense(part.weight, dy.dtype))
        return dx if a is None or t is None else _add_product_(dx, t, a)

    def _backward_float8(self, dy: Rows, t: Tensor | None) -> Tensor:
        assert self.weight_scale is not None
        if dy.values is None:
            assert dy.dense is not None
            dy = Rows(dy.dense, *quantize_rows(dy.dense))
        like = t if dy.dense is None else dy.dense
        dtype = torch.bfloat16 if like is None else like.dtype
        weight = self.turned.pop() if self.turned else self._float8_weight(transposed=True)
        dx = self._float8_product(dy, weight, self.weight_scale.inputs, dtype)
        if t is not None:
            _add_product_(dx, t, side_by_side([branch.a for branch in self._branches()], dx.dtype))
        return dx

    def _float8_product(self, x: Rows, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        assert x.values is not None and x.scale is not None
        return float8_linear(x.values, x.scale, weight, scale, out_dtype=dtype, fast=self.fast_accumulation)

    # 3. Weights and buffers.

    def _branches(self) -> list[Branch]:
        return [part.branch for part in self.parts if part.branch is not None]

    def _one_buffer(self) -> bool:
        made = [isinstance(part.weight, Packed) or part.rounding is not None for part in self.parts]
        return len(self.parts) == 1 or all(made)

    def _extended(self) -> bool:
        """t goes beside dy and A below W: W is decoded into a buffer, whose rows stay aligned to 16 bytes."""
        packed = all(isinstance(part.weight, Packed) for part in self.parts)
        return packed and not self.is_float8 and self.rank > 0 and self.rank % 8 == 0

    def _weight(self, dtype: torch.dtype, extra: int = 0) -> Tensor:
        """W (N + extra, K) of one buffer; the extra rows are not written."""
        first = self.parts[0]
        if len(self.parts) == 1 and isinstance(first.weight, Tensor) and first.rounding is None:
            return first.weight.to(dtype)
        room, rows = self.rank if self._extended() else 0, self.width + extra
        return self._kept(dtype, lambda n: self._decode(dtype, max(n, extra)), room, rows)[:rows]

    def _kept(self, key: object, make: Callable[[int], Tensor], room: int = 0, rows: int = 0) -> Tensor:
        """What ``make`` gives; of what is kept, what it gave before, with this much room below.

        What was made without adapters, or for smaller ranks, has too few rows and is made again.
        """
        if self.decoded is None or torch.is_inference_mode_enabled():
            return make(0)
        if key in self.decoded and self.decoded[key].shape[0] < rows:
            del self.decoded[key]  # first, for two of them would need twice the memory
        if key not in self.decoded:
            self.decoded[key] = make(room)
        return self.decoded[key]

    def _decode(self, dtype: torch.dtype, extra: int) -> Tensor:
        device = _device(self.parts[0].weight)
        weight = torch.empty(self.width + extra, self.depth, dtype=dtype, device=device)
        for part, at in zip(self.parts, self.slices(), strict=True):
            if isinstance(part.weight, Packed):
                dequantize(part.weight, out=weight[at])
            else:
                _round_into(part, weight[at])
        return weight

    def _float8_weight(self, transposed: bool = False) -> Tensor:
        """E4M3 values of W (N, K), or of its transpose (K, N)."""
        return self._kept(("float8", transposed), lambda _: self._make_float8(transposed))

    def _make_float8(self, transposed: bool) -> Tensor:
        assert self.weight_scale is not None
        inverse = self.weight_scale.inverse
        device = _device(self.parts[0].weight)
        shape = (self.depth, self.width) if transposed else (self.width, self.depth)
        weight = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        for part, at in zip(self.parts, self.slices(), strict=True):
            out = weight[:, at] if transposed else weight[at]
            float8_weight(part.weight, transposed=transposed, inverse_scale=inverse, out=out)
        return weight

    def _float8_weight_pair(self, turned: list[Tensor]) -> Tensor:
        """E4M3 values of W (N, K), all dense; those of its transpose (K, N) go to ``turned``."""
        assert self.weight_scale is not None
        device, E4M3 = _device(self.parts[0].weight), torch.float8_e4m3fn
        weight = torch.empty((self.width, self.depth), dtype=E4M3, device=device)
        turned[:] = [torch.empty((self.depth, self.width), dtype=E4M3, device=device)]
        for part, at in zip(self.parts, self.slices(), strict=True):
            assert isinstance(part.weight, Tensor)
            inverse = self.weight_scale.inverse
            float8_weight_pair(part.weight, inverse_scale=inverse, out=weight[at], turned=turned[0][:, at])
        return weight


def side_by_side(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The rows of all ``matrices`` (r_i, K) in one (R, K), in ``dtype``."""
    if len(matrices) == 1:
        return matrices[0].to(dtype)
    if len({m.dtype for m in matrices}) == 1:
        return torch.cat(list(matrices)).to(dtype)  # two launches, however many there are
    return torch.cat([m.to(dtype) for m in matrices])


def _columns(branches: Sequence[Branch]) -> list[slice]:
    found, start = [], 0
    for branch in branches:
        found.append(slice(start, start + branch.a.shape[0]))
        start += branch.a.shape[0]
    return found


def _scaled_mm(x: Tensor, w: Tensor, scaling: float, out: Tensor | None = None) -> Tensor:
    """``scaling * x @ w``, the scaling taken before the one rounding."""
    out = x.new_empty(x.shape[0], w.shape[1]) if out is None else out
    if scaling == 1:
        return torch.mm(x, w, out=out)
    return torch.addmm(out, x, w, beta=0, alpha=scaling, out=out)


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


def _round_into(part: Part, out: Tensor) -> None:
    """The weight with its branch, rounded as one matrix."""
    assert isinstance(part.weight, Tensor) and part.rounding is not None
    if part.branch is None:
        out.copy_(fake_quantize(part.weight, part.rounding, out.dtype))
    else:
        branch = part.branch
        fake_quantize_lora(part.weight, branch.a, branch.b, branch.scaling, part.rounding, out=out)


def _device(weight: Packed | Tensor) -> torch.device:
    return weight.device if isinstance(weight, Tensor) else weight.codes.device
