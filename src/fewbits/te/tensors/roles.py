"""Words that a `CustomRecipe`'s function and quantisers speak: types of data, roles of operands, requests."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import torch

from fewbits.errors import BadInput
from fewbits.te.recipe import Format


class DType(enum.IntEnum):
    """Types of data by Transformer Engine's numbers."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


_FLOAT8 = {
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
    torch.float8_e4m3fn: torch.float8_e4m3fn,
    torch.float8_e5m2: torch.float8_e5m2,
}


def float8_dtype(dtype: DType | torch.dtype | int) -> torch.dtype:
    """torch's type of eight-bit codes, from either library's word for it."""
    ours = _FLOAT8.get(DType(dtype) if isinstance(dtype, int) else dtype)  # type: ignore[call-overload]
    if ours is None:
        raise BadInput(f"{dtype} is no eight-bit floating-point type: take E4M3 or E5M2.")
    return ours


@dataclasses.dataclass(frozen=True)
class QuantizerRole:
    """Which operand asks for a quantiser.

    Attributes:
        module_type: "linear", "grouped_linear" or "dpa".
        tensor_type: "input", "weight", "output", "grad_output" or "grad_input".
        name: what the module was named, or "".
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


@dataclasses.dataclass(frozen=True)
class QuantizerRequest:
    """Base of what a `CustomRecipe`'s function returns for a quantiser with a state."""


@dataclasses.dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Delayed scaling for this operand; see `fewbits.te.recipe.DelayedScaling` for the fields."""

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
