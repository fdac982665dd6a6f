"""Modules whose weights exist only in quantised form: what `quantized_model_init` builds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fewbits.te.active.numerics import WeightInit
from fewbits.te.layers.module import Module, refuse
from fewbits.te.tensors.grouped_tensor import GroupedQuantizedTensor


def hold_quantized(module: Module, names: Sequence[str], init: WeightInit, slot: int = 1) -> None:
    """Replace a module's weights by their quantised form, if ``init`` says so.

    Args:
        module: whose parameters are already filled, or lie on the meta device: those are quantised by the
            `reset_parameters` that makes and fills them.
        names: of the weights.
        init: what `quantized_model_init` set.
        slot: the weight's place among the forward quantisers.
    """
    if not init.enabled or init.recipe is None:
        return
    refuse(
        len(names) > 1,
        "a quantised weight in several parameters",
        "build the layer with one (fuse_qkv_params)",
    )
    if getattr(module, names[0]).device.type == "meta":
        module.after_reset.append((hold_quantized, (names, init, slot)))
        return
    for name in names:
        weight = getattr(module, name)
        forward, _ = module.slots_of(init.recipe, weight.device)
        quantizer = forward.quantizers[slot]
        if quantizer is None:
            continue
        with torch.no_grad():
            held = nn.Parameter(quantizer.quantize(weight.detach()), weight.requires_grad)
        if init.preserve_high_precision_init_val:
            held.keep_high_precision_init_val(weight.detach().cpu())  # type: ignore[attr-defined]
        setattr(module, name, held)


def hold_quantized_group(module: Module, name: str, init: WeightInit) -> None:
    """`hold_quantized` for one parameter of several matrices (G, N, K), the i-th in forward slot 3 i + 1."""
    if not init.enabled or init.recipe is None:
        return
    weight = getattr(module, name)
    if weight.device.type == "meta":
        module.after_reset.append((hold_quantized_group, (name, init)))
        return
    forward, _ = module.slots_of(init.recipe, weight.device)
    quantizers = forward.quantizers[1::3]
    if any(quantizer is None for quantizer in quantizers):
        return
    with torch.no_grad():
        members = [q.quantize(w) for q, w in zip(quantizers, weight.detach(), strict=True) if q is not None]
        held = nn.Parameter(GroupedQuantizedTensor(members), weight.requires_grad)
    if init.preserve_high_precision_init_val:
        held.keep_high_precision_init_val(weight.detach().cpu())  # type: ignore[attr-defined]
    setattr(module, name, held)
