"""What transformers calls for each weight while it loads: pack it, or read it as another library packed it.

Both report to the quantizer of the load (`fewbits.models.loading.hf_quantizer.FewbitsQuantizer`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from fewbits.errors import FewbitsError


class QuantizeWeight(ConversionOps):
    """A weight, just read, becomes a packed layer in its linear's place."""

    def __init__(self, quantizer: Any) -> None:
        self.hf_quantizer = quantizer

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *, model: nn.Module, missing_keys: set[str] | None = None, **_: Any
    ) -> dict[str, Tensor]:
        """Pack what the recipe packs; give back the rest, of any shape, as it came."""
        rest: dict[str, Tensor] = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            tensor = value[0] if isinstance(value, list) else value
            if self.hf_quantizer.param_needs_quantization(model, name):
                self.hf_quantizer.quantize_into(model, name, tensor)
                if missing_keys is not None:
                    missing_keys.discard(name)
            else:
                rest[name] = tensor
        return rest


class ReadForeign(ConversionOps):
    """Another library's tensors of one weight become a packed layer; other weights pass through."""

    def __init__(self, quantizer: Any) -> None:
        self.hf_quantizer = quantizer

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadForeign:
        return self  # transformers copies a converter for each weight; all report to the one quantizer

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        *,
        model: nn.Module,
        full_layer_name: str,
        missing_keys: set[str] | None = None,
        **_: Any,
    ) -> dict[str, Tensor]:
        """Take the tensors of one packed weight; give back a plain one (N, K) in the dtype it is to have."""
        parts = {key: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        if list(parts) == ["weight"]:
            (key,) = parts
            dtype = model.get_parameter(full_layer_name).dtype
            return {key: parts[key].to(dtype) if parts[key].is_floating_point() else parts[key]}
        try:
            self.hf_quantizer.take_packed(model, full_layer_name, parts)
        except FewbitsError as error:
            self.hf_quantizer.problems.append(error)  # transformers would hide it behind a table
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}


__all__ = ["QuantizeWeight", "ReadForeign"]
