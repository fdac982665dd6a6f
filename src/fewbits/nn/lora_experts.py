"""`LoRAExperts`: PEFT's adapter on a 3-D parameter, over experts whose weight is packed.

Names, files and matrices are those of PEFT's ``ParamWrapper``. That one adds ``B A`` to the whole weight of
all experts in every call; here the experts add the two thin products to their rows. Where the experts have
become plain again (``restore``, ``dequantize``), PEFT's own way holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.lora import layer as peft_layers
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor

from fewbits.nn.experts import QuantizedExperts


class ParamWrapper(peft_layers.ParamWrapper):  # type: ignore[misc]
    """An adapter on one weight of `QuantizedExperts`; two of them stand inside each other.

    PEFT nests them by the name of their class, which therefore is that of its own.
    """

    def get_param(self) -> Tensor:
        """The weight's shape, dtype and device, of packed experts without its values."""
        experts = self._experts
        if experts is None:
            return super().get_param()  # type: ignore[no-any-return]
        return experts.weight_like(self.parameter_name)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapters to the weight, which is rounded to its format again; `unmerge` brings it back.

        Args:
            safe_merge: refuse a sum that is not finite, and change nothing; packing refuses one in any case.
            adapter_names: which; None: the active ones.

        Raises:
            NotFinite: the sum holds a NaN or an infinity.
        """
        experts, name = self._experts, self.parameter_name
        if experts is None:
            super().merge(safe_merge, adapter_names)
            return
        for adapter in check_adapters_to_merge(self, adapter_names):
            if adapter not in self.lora_A:
                continue
            warnings.warn(
                f"merging into experts stored as {experts.formats[name].name} rounds them again; "
                "save_pretrained_merged(..., save_method='merged_16bit') keeps all of the adapter.",
                stacklevel=2,
            )
            before = {part: getattr(experts, experts.key(name, part)) for part in experts.part_names[name]}
            repacked, delta = experts.repacked, self.get_delta_weight(adapter)
            experts.pack(name, (experts.dequantize(name) + delta.to(experts.dtype)).detach())
            self.before.append((before, repacked))
            self.merged_adapters.append(adapter)

    def unmerge(self) -> None:
        """Bring back the codes and scales from before `merge`, bit for bit."""
        experts, name = self._experts, self.parameter_name
        if experts is None:
            super().unmerge()
            return
        while self.merged_adapters:
            self.merged_adapters.pop()
            before, repacked = self.before.pop()
            experts.take(name, before)
            experts.repacked = experts.repacked - {name} | repacked & {name}

    @property
    def before(self) -> list[tuple[dict[str, Tensor], frozenset[str]]]:
        """Of each merged adapter the stored parts before, of any shape, and `QuantizedExperts.repacked`."""
        if not hasattr(self, "_before"):
            self._before: list[tuple[dict[str, Tensor], frozenset[str]]] = []
        return self._before

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        experts = self._experts
        if experts is None:
            with super()._activate_lora(active_adapters):
                yield
            return
        names, branches = [name for name in active_adapters if name in self.lora_A], experts.branches
        if names:
            branches[self.parameter_name] = tuple(
                (self.lora_A[name].weight, self.lora_B[name].weight, float(self.scaling[name]))
                for name in names
            )
        try:
            yield
        finally:
            branches.pop(self.parameter_name, None)

    @property
    def _experts(self) -> QuantizedExperts | None:
        base: Any = self.get_base_layer()
        return base if isinstance(base, QuantizedExperts) else None


LoRAExperts = ParamWrapper
