"""`LoRAExperts`: PEFT's adapter on a 3-D parameter, over experts whose weight is packed.

Names, files and matrices are those of PEFT's ``ParamWrapper``. That one adds ``B A`` to the whole weight of
all experts in every call; here the experts add the two thin products to their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.lora import layer as peft_layers
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.nn.experts import QuantizedExperts


class ParamWrapper(peft_layers.ParamWrapper):  # type: ignore[misc]
    """An adapter on one weight of `QuantizedExperts`; two of them stand inside each other.

    PEFT nests them by the name of their class, which therefore is that of its own.
    """

    def get_param(self) -> Tensor:
        """The weight's shape, dtype and device, without its values."""
        return self._experts.weight_like(self.parameter_name)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused: packed experts are not rounded again in place.

        Raises:
            Unsupported: always; the message says what to do.
        """
        raise Unsupported(
            "adapters are not merged into packed experts, which would be rounded again; generation takes the"
            " adapter beside the weights, and save_pretrained writes it alone."
        )

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        names = [name for name in active_adapters if name in self.lora_A]
        if len(names) > 1:
            raise Unsupported(
                "several adapters are active at once, and experts add one; activate one of them."
            )
        branches = self._experts.branches
        if names:
            (name,) = names
            branches[self.parameter_name] = (
                self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
            )  # fmt: skip
        try:
            yield
        finally:
            branches.pop(self.parameter_name, None)

    @property
    def _experts(self) -> QuantizedExperts:
        base: Any = self.get_base_layer()
        return base  # type: ignore[no-any-return]


LoRAExperts = ParamWrapper
