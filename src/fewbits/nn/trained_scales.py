"""A packed linear whose scales are trained: its codes stay, each block's scale gets a factor.

    W[n, k] = decoded[n, k] * f[n, k // block]        y = x W^T + b

Backward, with dW = dy^T x (N, K) that is never kept: dx = dy W, df[n, j] = sum of dW * decoded over block j.
The weight is decoded once in each pass and not saved between them. A trained factor is multiplied into the
stored scales (`folded_scales`): the packed weight then decodes to what was trained, up to one rounding of
float32, and nothing is added to the model. That holds for formats whose scales are float32 numbers, each for
a stretch of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fewbits.formats.base import Packed
from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.kernels.launch.matrix import rows_of
from fewbits.nn.linear import QuantizedLinear

_PART = "scales"


def has_free_scales(packed: Packed) -> bool:
    """Whether a packed weight (N, K) has float32 scales for blocks of rows, which factors can go into."""
    rows, columns = packed.format.contract.block
    (N, K), scales = packed.shape, packed.parts.get(_PART)
    if scales is None or scales.dtype is not torch.float32 or rows != 1:
        return False
    return K % (columns or K) == 0 and scales.numel() == N * K // (columns or K)


def folded_scales(packed: Packed, factor: Tensor) -> Packed:
    """The packed weight (N, K) with its scales multiplied by ``factor`` (N, blocks)."""
    scales = packed.parts[_PART]
    parts = {**packed.parts, _PART: scales * factor.detach().reshape(scales.shape).to(scales)}
    return Packed(packed.format, packed.shape, packed.dtype, parts)


class TrainedScales(nn.Linear):
    """Stands for a `QuantizedLinear` while the factors of its scales are trained.

    Attributes:
        packed_linear: the layer it stands for.
        factor: (N, blocks) float32, ones at first.
    """

    def __init__(self, linear: QuantizedLinear) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed_linear, self.bias = linear, linear.bias
        packed = linear.packed
        blocks = packed.parts[_PART].numel() // linear.out_features
        ones = torch.ones(linear.out_features, blocks, dtype=torch.float32, device=linear.device)
        self.factor = nn.Parameter(ones)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        y: Tensor = _ScaledProduct.apply(x, self.factor, self.packed_linear.packed)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def fold(self) -> QuantizedLinear:
        """The packed linear with the factors in its scales."""
        self.packed_linear.load_packed(folded_scales(self.packed_linear.packed, self.factor))
        self.packed_linear.repacked = True
        return self.packed_linear


class _ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, packed: Packed) -> Tensor:
        ctx.save_for_backward(x, factor)
        ctx.packed = packed
        return x @ _scaled(packed.dequantize(torch.float32), factor).to(x.dtype).t()

    @staticmethod
    @once_differentiable("a packed linear whose scales are trained")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, factor = ctx.saved_tensors
        needs_dx, *_ = ctx.needs_input_grad
        decoded = ctx.packed.dequantize(torch.float32)
        dw = rows_of(dy).t() @ rows_of(x)
        df = (dw.float() * decoded).view(*factor.shape, -1).sum(-1)
        dx = dy @ _scaled(decoded, factor).to(dy.dtype) if needs_dx else None
        return dx, df, None


def _scaled(decoded: Tensor, factor: Tensor) -> Tensor:
    return (decoded.view(*factor.shape, -1) * factor[..., None]).view(decoded.shape)
