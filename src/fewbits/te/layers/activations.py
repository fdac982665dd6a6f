"""The activations of `LayerNormMLP`: computed in float32, rounded once. A gated one halves the last axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.errors import BadInput


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "qgelu": _quick_gelu,
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
_ROUNDED_ONCE = {"gelu", "relu", "silu"}  # by torch itself on a GPU: it computes in float32
SMOOTH = {"gelu": (1.5957691216057308, 0.07135481627362448), "qgelu": (1.702, 0.0), "silu": (1.0, 0.0)}
"""Activations ``x * sigmoid(linear * x + cubic * x**3)``; GELU's numbers are 2 sqrt(2 / pi) (1, 0.044715)."""
GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "geglu": _gelu,
    "glu": torch.sigmoid,
    "qgeglu": _quick_gelu,
    "reglu": F.relu,
    "sreglu": lambda x: F.relu(x).square(),
    "swiglu": F.silu,
    "clamped_swiglu": F.silu,
}


def check_activation(name: str) -> str:
    """An activation's name, refused if there is no such one."""
    if name not in _PLAIN and name not in GATED:
        raise BadInput(f"activation is one of {', '.join((*_PLAIN, *GATED))}, not {name!r}.")
    return name


def activated(x: Tensor, name: str, params: Mapping[str, float]) -> Tensor:
    """The activation of x (..., F): (..., F), or (..., F / 2) if it is gated, in x's dtype.

    Args:
        x: the first half of the last axis is what a gate's activation sees, the second is multiplied.
        name: see `check_activation`.
        params: "limit" (7), "alpha" (1.702) and "glu_linear_offset" (1) of "clamped_swiglu".
    """
    if name in _PLAIN:
        by_torch = x.device.type == "cuda" and name in _ROUNDED_ONCE
        return _PLAIN[name](x) if by_torch else _PLAIN[name](x.float()).to(x.dtype)
    gate, line = x.float().chunk(2, dim=-1)
    if name == "clamped_swiglu":
        limit, alpha = params.get("limit", 7.0), params.get("alpha", 1.702)
        gate, line = gate.clamp(max=limit), line.clamp(-limit, limit)
        return (gate * torch.sigmoid(alpha * gate) * (line + params.get("glu_linear_offset", 1.0))).to(
            x.dtype
        )
    return (GATED[name](gate) * line).to(x.dtype)


def interleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Rows (2 F, ...) of gate and line in turns of ``interleave_size``, from all of one, then the other."""
    return _turns(tensor, interleave_size, (2, -1))


def deinterleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """The inverse of `interleave_glu_tensor`."""
    return _turns(tensor, interleave_size, (-1, 2))


def _turns(tensor: Tensor, size: int, outer: tuple[int, int]) -> Tensor:
    if tensor.shape[0] % (2 * size):
        raise BadInput(
            f"{tensor.shape[0]} rows are no whole turns of {size}: they must be a multiple of {2 * size}."
        )
    cut = tensor.reshape(*outer, size, *tensor.shape[1:])
    return cut.transpose(0, 1).reshape(tensor.shape)
