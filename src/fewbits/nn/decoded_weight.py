"""`DecodedWeight`: a packed weight as other libraries read and write the weight of a linear layer.

PEFT's variants of LoRA, and whatever else knows only ``torch.nn.Linear``, read ``layer.weight`` and assign
``layer.weight.data``. Over a packed layer reading decodes, at the moment of use, and assigning rounds the new
weight to the layer's format. What would change the decoded numbers in place, and be lost, is refused.

PEFT merges by ``weight.data += d`` and unmerges by ``weight.data -= d``. The difference of rounded numbers
is not what was there before, so the parts from before each assignment are kept, and subtracting d brings back
the ones that with d make what is there now, bit for bit.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fewbits.errors import Unsupported


class DecodedWeight(Tensor):
    """The weight (N, K) of a packed layer, in the layer's dtype; holds no numbers of its own."""

    _layer: Any
    _subtracted: Tensor | None
    _is_hf_initialized: bool

    @staticmethod
    def __new__(cls, layer: Any) -> DecodedWeight:
        """A view of ``layer`` (`fewbits.nn.linear.QuantizedLinear`)."""
        wrapper = Tensor._make_wrapper_subclass(
            cls, (layer.out_features, layer.in_features), dtype=layer.dtype, device=layer.device
        )
        wrapper._layer, wrapper._subtracted = layer, None
        wrapper._is_hf_initialized = True  # transformers: not to be filled with random numbers
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every operation sees the decoded weight; one that writes into it is refused."""
        kwargs = kwargs or {}
        for place, declared in enumerate(func._schema.arguments):
            argument = args[place] if place < len(args) else kwargs.get(declared.name)
            if isinstance(argument, DecodedWeight) and declared.alias_info and declared.alias_info.is_write:
                argument._refuse(str(func))
        return func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs))

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """This view itself; assigning packs the new weight (N, K) into the layer."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        """Pack ``value`` (N, K) into the layer."""
        layer, subtracted, self._subtracted = self._layer, self._subtracted, None
        with torch.no_grad():
            if subtracted is not None and _bring_back(layer, subtracted):
                return
            warnings.warn(
                f"the new values of a weight stored as {layer.format.name} are rounded to it again.",
                stacklevel=2,
            )
            stored = {name: part.detach() for name, part in layer.stored().items()}
            layer.before.append((stored, layer.repacked))
            layer.pack(_decoded(value).to(layer.dtype))

    def __setitem__(self, where: Any, values: Any) -> None:
        """Refused: it would write into decoded numbers."""
        self._refuse("assigning a part")

    def _refuse(self, what: str) -> None:
        raise Unsupported(
            f"{what} would change a weight that is stored as {self._layer.format.name} in place; call "
            "layer.pack(new_weight), or assign layer.weight.data, which round it again."
        )

    def __iadd__(self, other: Any) -> Tensor:  # type: ignore[misc]
        """``weight.data += d`` assigns the sum, in place of changing anything."""
        self._subtracted = None
        return _decoded(self) + other  # type: ignore[no-any-return]

    def __isub__(self, other: Any) -> Tensor:  # type: ignore[misc]
        """``weight.data -= d``, likewise."""
        self._subtracted = other
        return _decoded(self) - other  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Short, without decoding."""
        return f"DecodedWeight({tuple(self.shape)}, stored as {self._layer.format.name})"


def _bring_back(layer: Any, subtracted: Tensor) -> bool:
    """Restore the parts that were there before ``subtracted`` was added, if that was the last change."""
    if not layer.before:
        return False
    now = layer.stored()
    parts, repacked = layer.before.pop()
    layer.load_stored(parts)
    before = layer.stored()
    layer.pack((layer.dequantize() + subtracted).to(layer.dtype))
    is_it = all(torch.equal(part, layer.stored()[name]) for name, part in now.items())
    layer.load_stored(before if is_it else now)
    layer.repacked = repacked if is_it else True
    return is_it


def _decoded(value: Any) -> Any:
    if not isinstance(value, DecodedWeight):
        return value
    layer = value._layer
    if layer.device.type == "meta":
        return torch.empty(value.shape, dtype=layer.dtype, device="meta")
    return layer.dequantize()
