"""From a packed model back to a plain one that computes with the decoded weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from fewbits.decoder.fuse import fusion_of
from fewbits.host.conversion import conversion_of
from fewbits.host.unwrap import unwrap
from fewbits.models.packing.cache_choice import CacheChoice
from fewbits.models.packing.convert import (
    PACKED,
    decoded_linear,
    freeze_under_adapters,
    name_as_converted,
    refuse_merged,
)
from fewbits.models.undo import undo
from fewbits.nn.linear import QuantizedLinear


def make_plain(model: nn.Module) -> None:
    """Replace every module of ours by one of the host's class, packed linears by their decoded weights.

    In place. Adapters (PEFT's layers around the linears) stay, over plain weights, which are frozen.

    Raises:
        Unsupported: adapters are merged into packed weights, which PEFT could then not unmerge.
    """
    refuse_merged(model, "dequantize()")
    model = unwrap(model)
    state: Any = conversion_of(model)
    if state is not None:  # decoded weights are asked for, not the originals that were kept
        decoded = {name_as_converted(name) for name, m in model.named_modules() if isinstance(m, PACKED)}
        state.originals = {name: module for name, module in state.originals.items() if name not in decoded}
    if state is not None or fusion_of(model) is not None:
        undo(model, keep=(CacheChoice,))  # how keys and values are kept is not a matter of weights
    # What is left is of a family that fewbits has no spec for.
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PACKED)}
    for name, module in packed.items():
        plain = decoded_linear(module) if isinstance(module, QuantizedLinear) else module.host()
        model.set_submodule(name, plain)
    freeze_under_adapters(model, packed)
