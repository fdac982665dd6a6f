"""What `torch.load` may build when it reads quantised weights with ``weights_only=True``, its default."""

from __future__ import annotations

from typing import Any

import torch

from fewbits.formats.base import Packed
from fewbits.formats.float8 import Float8
from fewbits.te.arithmetic.float4 import Float4
from fewbits.te.arithmetic.microscaling import Microscaled
from fewbits.te.tensors.grouped_tensor import rebuild_grouped
from fewbits.te.tensors.operand import Operand
from fewbits.te.tensors.quantized_tensor import QuantizedTensor, rebuild
from fewbits.te.tensors.quantizers import Quantizer
from fewbits.te.tensors.roles import DType


def safe_globals() -> list[Any]:
    """Classes of data, and functions that put them together: none runs code of the file."""
    classes: list[Any] = [rebuild, rebuild_grouped, Packed, Float8, Float4, Microscaled, Operand, DType]
    for base in (QuantizedTensor, Quantizer):
        waiting: list[Any] = [base]
        while waiting:
            classes.append(waiting.pop())
            waiting += [
                kind for kind in classes[-1].__subclasses__() if kind.__module__.startswith("fewbits.")
            ]
    return classes


def allow_loading(former: dict[str, str]) -> None:
    """Tell torch that these are safe; `fewbits.te` does it when it is imported.

    Args:
        former: of a module's name, the one by which files name it that were saved before it moved.
    """
    classes = safe_globals()
    moved = [(c, f"{former[c.__module__]}.{c.__qualname__}") for c in classes if c.__module__ in former]
    torch.serialization.add_safe_globals([*classes, *moved])
