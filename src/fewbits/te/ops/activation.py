"""Activations as operations: computed in float32, rounded once. A gated one halves the last axis.

The first half is what the gate's activation sees, the second is multiplied. The "scaled" ones take a further
input: a number for each row, by which the result is multiplied.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.te.layers.activations import activated
from fewbits.te.ops.operation import BasicOperation
from fewbits.te.ops.simple import in_autocast
from fewbits.te.tensors.quantizers import Float8CurrentScalingQuantizer
from fewbits.te.tensors.roles import DType


def _as_kept(x: Tensor) -> Tensor:
    """x (..., K) by value, with its rounded value where the backward pass asks for it."""
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)
    rounded: Tensor = quantizer.quantize(x.detach()).dequantize(dtype=x.dtype)
    return x + (rounded - x).detach()


class _Activation(BasicOperation):
    """One by its name in `fewbits.te.layers.activations`.

    Args:
        cache_quantized_input: the backward pass reads the input rounded to E4M3 under one scale.
    """

    kind = ""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input

    def defined(self, x: Tensor) -> Tensor:
        """The activation of x (..., K)."""
        return activated(x, self.kind, {})

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """The activation of x (..., K), in torch.autocast's type within it."""
        x = in_autocast(x)
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise BadInput(f"activations take float32, float16 and bfloat16, not {x.dtype}: cast the input.")
        if not self.cache_quantized_input or not x.requires_grad:
            return self.defined(x)
        through = self.defined(_as_kept(x))
        return self.defined(x).detach() + (through - through.detach())


class GELU(_Activation):
    """GELU by its approximation with tanh."""

    kind = "gelu"


class GLU(_Activation):
    """A sigmoid gate."""

    kind = "glu"


class GEGLU(_Activation):
    """A GELU gate."""

    kind = "geglu"


class QGELU(_Activation):
    """``x * sigmoid(1.702 x)``."""

    kind = "qgelu"


class QGEGLU(_Activation):
    """A `QGELU` gate."""

    kind = "qgeglu"


class ReLU(_Activation):
    """``max(x, 0)``."""

    kind = "relu"


class ReGLU(_Activation):
    """A ReLU gate."""

    kind = "reglu"


class SReLU(_Activation):
    """``max(x, 0)**2``."""

    kind = "srelu"


class SReGLU(_Activation):
    """A `SReLU` gate."""

    kind = "sreglu"


class SiLU(_Activation):
    """``x * sigmoid(x)``."""

    kind = "silu"


def _in_halves(x: Tensor, turn: int | None) -> Tensor:
    """x (..., 2 F) with the gates first, from gates and lines in turns of ``turn``."""
    if turn is None:
        return x
    if x.shape[-1] % (2 * turn):
        raise BadInput(
            f"glu_interleave_size is {turn}, and a row has {x.shape[-1]} values: they must be a multiple of "
            f"{2 * turn}."
        )
    turns: Tensor = x.unflatten(-1, (-1, 2, turn))  # type: ignore[no-untyped-call]
    return turns.transpose(-3, -2).flatten(-3)


class SwiGLU(_Activation):
    """A SiLU gate.

    Args:
        cache_quantized_input: as in the other activations.
        glu_interleave_size: gates and lines come in turns of so many values.
    """

    kind = "swiglu"

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = glu_interleave_size

    def defined(self, x: Tensor) -> Tensor:
        """(..., F) from x (..., 2 F)."""
        return self.of_halves(_in_halves(x, self.glu_interleave_size))

    def of_halves(self, x: Tensor) -> Tensor:
        """(..., F) from x (..., 2 F) with the gates first."""
        return activated(x, self.kind, {})


class ClampedSwiGLU(SwiGLU):
    """``clamp(a) * sigmoid(alpha * clamp(a)) * (clamp(b) + glu_linear_offset)``, as in gpt-oss."""

    kind = "clamped_swiglu"

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset

    def of_halves(self, x: Tensor) -> Tensor:
        """(..., F) from x (..., 2 F) with the gates first."""
        return activated(
            x,
            self.kind,
            {"limit": self.limit, "alpha": self.alpha, "glu_linear_offset": self.glu_linear_offset},
        )


class SiTUGLU(SwiGLU):
    """``beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)``."""

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        self.beta1, self.beta2 = float(beta1), float(beta2)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not (math.isfinite(beta) and beta > 0):
                raise BadInput(f"{name} must be finite and positive, got {beta}.")

    def of_halves(self, x: Tensor) -> Tensor:
        """(..., F) from x (..., 2 F) with the gates first."""
        gate, line = x.float().chunk(2, dim=-1)
        capped = self.beta1 * torch.tanh(gate / self.beta1) * torch.sigmoid(gate)
        return (capped * (self.beta2 * torch.tanh(line / self.beta2))).to(x.dtype)


class _Scaled(BasicOperation):
    """An activation times a number for each row."""

    num_extra_inputs = 1

    def __init__(self, inner: _Activation, activation_recompute_in_mlp: bool, *, may_recompute: bool) -> None:
        super().__init__()
        if activation_recompute_in_mlp and not may_recompute:
            raise BadInput(
                f"{type(self).__name__} does not support activation recomputation in the grouped MLP: leave "
                "activation_recompute_in_mlp at False."
            )
        self.activation_recompute_in_mlp = activation_recompute_in_mlp
        self._inner = [inner]  # no submodule: it has no state

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """The activation of x (..., K) times scales (...)."""
        x = in_autocast(x)
        y = self._inner[0].defined(x.float())
        return (y * extra[0].to(x.dtype).float().unsqueeze(-1)).to(x.dtype)


class ScaledSReLU(_Scaled):
    """`SReLU` times a number for each row; recomputation changes nothing here."""

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(SReLU(), activation_recompute_in_mlp, may_recompute=True)


class _ScaledGated(_Scaled):
    def __init__(self, inner: SwiGLU, activation_recompute_in_mlp: bool) -> None:
        super().__init__(inner, activation_recompute_in_mlp, may_recompute=False)
        self.glu_interleave_size = inner.glu_interleave_size


class ScaledSwiGLU(_ScaledGated):
    """`SwiGLU` times a number for each row."""

    def __init__(
        self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False
    ) -> None:
        super().__init__(SwiGLU(glu_interleave_size=glu_interleave_size), activation_recompute_in_mlp)


class ScaledSiTUGLU(_ScaledGated):
    """`SiTUGLU` times a number for each row."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        inner = SiTUGLU(beta1=beta1, beta2=beta2, glu_interleave_size=glu_interleave_size)
        super().__init__(inner, activation_recompute_in_mlp)


class ScaledClampedQGeGLU(_ScaledGated):
    """`ClampedSwiGLU` times a number for each row."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        inner = ClampedSwiGLU(
            limit=limit,
            alpha=alpha,
            glu_linear_offset=glu_linear_offset,
            glu_interleave_size=glu_interleave_size,
        )
        super().__init__(inner, activation_recompute_in_mlp)
