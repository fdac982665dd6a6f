"""FP8 attention as rounding: what its operands become, forward and backward, around products in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.te.active.numerics import Numerics
from fewbits.te.layers.module import Module
from fewbits.te.tensors.operand import plain
from fewbits.te.tensors.quantizers import Quantizer


class _Round(torch.autograd.Function):
    """Rounded by one quantiser on the way forward, and its gradient by another on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Quantizer | None, backward: Quantizer | None) -> Tensor:
        ctx.quantizer = backward
        return _rounded(x, forward)

    @staticmethod
    @once_differentiable("attention with FP8 operands")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _rounded(dy, ctx.quantizer), None, None


def _rounded(x: Tensor, quantizer: Quantizer | None) -> Tensor:
    if quantizer is None:
        return x.view_as(x)
    rows = quantizer.operand(x.reshape(-1, x.shape[-1]), rows=True, columns=False).rows
    return plain(rows, x.dtype).view(x.shape)


@dataclass(frozen=True)
class Rounding:
    """The quantisers of FP8 attention: of its operands forward, and of their gradients."""

    forward: list[Any]
    backward: list[Any]

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values together, as they share a scale; each (b, h, s, d)."""
        sizes = [t.numel() for t in (q, k, v)]
        width = q.shape[-1]
        if len({t.shape[-1] for t in (q, k, v)}) > 1:
            return tuple(_Round.apply(t, self.forward[0], self.backward[0]) for t in (q, k, v))  # type: ignore[return-value]
        whole = torch.cat([t.reshape(-1, width) for t in (q, k, v)])
        rounded: Tensor = _Round.apply(whole, self.forward[0], self.backward[0])
        pieces = rounded.split([size // width for size in sizes])
        return pieces[0].view(q.shape), pieces[1].view(k.shape), pieces[2].view(v.shape)

    def probabilities(self, p: Tensor) -> Tensor:
        """(b, h, s_q, s_kv)."""
        result: Tensor = _Round.apply(p, self.forward[3], self.backward[2])
        return result


def rounding(module: Module, numerics: Numerics, device: torch.device) -> Rounding | None:
    """The quantisers of an attention module, if its recipe quantises attention."""
    recipe = numerics.recipe
    if not numerics.enabled or recipe is None or not (recipe.fp8_dpa or recipe.fp8_mha):
        return None
    return Rounding(*module.prepare(numerics, device))
