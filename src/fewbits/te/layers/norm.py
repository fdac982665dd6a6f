"""LayerNorm and RMSNorm under Transformer Engine's names and arguments: computed in float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbits.errors import BadInput
from fewbits.te.support import default_device


def normalized(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, kind: str, eps: float, zero_centered: bool
) -> Tensor:
    """The norm of x (..., K) over its last axes, in x's dtype.

    Args:
        x: (..., K) floating point.
        weight: of the normalised shape; 1 is added to it if ``zero_centered``.
        bias: as weight, or None.
        kind: "LayerNorm" or "RMSNorm".
        eps: added to the variance or mean square.
        zero_centered: see ``weight``.
    """
    shape = list(weight.shape)
    one_dtype = weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype)
    if (
        x.device.type == "cuda" and one_dtype and not zero_centered
    ):  # torch's own round once there, to the same bits
        if kind == "LayerNorm":
            return F.layer_norm(x, shape, weight, bias, eps)
        return F.rms_norm(x, shape, weight, eps)
    scale = weight.float() + 1.0 if zero_centered else weight.float()
    if kind == "LayerNorm":
        return F.layer_norm(x.float(), shape, scale, None if bias is None else bias.float(), eps).to(x.dtype)
    return F.rms_norm(x.float(), shape, scale, eps).to(x.dtype)


def check_kind(kind: str) -> str:
    """A norm's name, refused if there is no such norm."""
    if kind not in ("LayerNorm", "RMSNorm"):
        raise BadInput(f"normalization is 'LayerNorm' or 'RMSNorm', not {kind!r}.")
    return kind


def first_scale(zero_centered: bool) -> Callable[[Tensor], Any]:
    """What fills a norm's weight at first: ones, or zeros where 1 is added to it."""
    return nn.init.zeros_ if zero_centered else nn.init.ones_


class _Norm(nn.Module):
    kind = ""

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        size = normalized_shape if normalized_shape is not None else hidden_size
        if size is None:
            raise BadInput(f"{self.kind} needs normalized_shape (or hidden_size): the size of the last axis.")
        shape = (size,) if isinstance(size, int) else tuple(size)
        self.eps, self.zero_centered_gamma, self.sequence_parallel = (
            eps,
            zero_centered_gamma,
            sequence_parallel,
        )
        dtype = params_dtype or dtype or torch.get_default_dtype()
        place = default_device(device)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=place))
        self.bias: nn.Parameter | None = None
        if self.kind == "LayerNorm":
            self.bias = nn.Parameter(torch.empty(shape, dtype=dtype, device=place))
        if sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.reset_parameters(defer_init=place.type == "meta")

    @torch.no_grad()
    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """Ones (zeros if zero-centred) and zeros; parameters on the meta device are made first."""
        if defer_init:
            return
        for name, parameter in list(self.named_parameters()):
            if parameter.device.type == "meta":
                setattr(self, name, nn.Parameter(torch.empty_like(parameter, device=default_device(None))))
        first_scale(self.zero_centered_gamma)(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x (..., *normalized_shape), in x's dtype (torch.autocast's, within it)."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        return normalized(
            x, self.weight, self.bias, kind=self.kind, eps=self.eps, zero_centered=self.zero_centered_gamma
        )

    def get_extra_state(self) -> Tensor:
        """No bytes: Transformer Engine's norms have this entry in their state dicts."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Nothing is kept."""


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Args:
        normalized_shape: the size of the last axis, or of the last axes.
        eps: added to the variance.
        sequence_parallel: noted on the parameters, for frameworks that read it.
        params_dtype: of the parameters.
        zero_centered_gamma: the weight is what is added to 1.
        hidden_size: an older name of ``normalized_shape``.
        device: of the parameters; None is the GPU where there is one.
        dtype: another name of ``params_dtype``.
    """

    kind = "LayerNorm"

    def reset_layer_norm_parameters(self) -> None:
        """`reset_parameters` by an older name."""
        self.reset_parameters()


class RMSNorm(_Norm):
    """``x / sqrt(mean(x**2) + eps) * weight``; the arguments are `LayerNorm`'s."""

    kind = "RMSNorm"

    def reset_rms_norm_parameters(self) -> None:
        """`reset_parameters` by an older name."""
        self.reset_parameters()


class L2Normalization(nn.Module):
    """``x / sqrt(sum(x**2) + eps)`` over the last axis: a norm of queries and keys without parameters.

    Args:
        eps: added to the sum.
        seq_length: accepted and not needed.
        micro_batch_size: accepted and not needed.
    """

    def __init__(
        self, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) of length 1, in its dtype."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + self.eps)).to(x.dtype)
