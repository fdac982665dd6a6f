"""Packed bases for the models that tests give to PEFT, and what rounding a merge again does to them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.nn.linear import QuantizedLinear

_HEADS = ("score", "lm_head")  # left alone by `fewbits.convert` too


def pack_model(model: Any, base: str) -> None:
    """Put packed layers in the place of plain linears, each once; a head tied to an embedding stays.

    Of "nf4-decoded" and "int8-decoded" plain linears stay, with the weights that packed ones would stand for.
    """
    from fewbits.formats import INT8, NF4
    from fewbits.recipes import Rule

    if base == "plain" or any(hasattr(module, "base_layer") for module in model.modules()):
        return
    format, _, decoded = base.partition("-")
    rule = Rule(weight={"nf4": NF4, "int8": INT8}[format])
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        plain = type(module) is nn.Linear and id(module.weight) not in embeddings
        if not plain or not leaf or leaf in _HEADS:
            continue
        packed = QuantizedLinear.from_linear(module, rule)
        if decoded:
            module.weight.data = packed.dequantize()
        else:
            setattr(model.get_submodule(parent), leaf, packed)


def wrap_peft(base: str, ours: bool) -> None:
    """Pack what is given to PEFT, and with ``ours`` put this library's layers over linears."""
    import peft
    import peft.mapping_func

    from fewbits.models.adapting.adapters import _check_parameters, _check_trained_copies, _register

    def prepare(model: Any, config: Any) -> None:
        if isinstance(config, peft.LoraConfig) and type(config) is peft.LoraConfig:
            pack_model(model, base)
            if ours:
                _check_trained_copies(config, model)
                _check_parameters(config, model)
                _register(config, model)

    get_peft_model, init, add = peft.get_peft_model, peft.PeftModel.__init__, peft.PeftModel.add_adapter

    @functools.wraps(get_peft_model)
    def packed_get_peft_model(model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(model, peft_config)
        return get_peft_model(model, peft_config, *args, **kwargs)

    @functools.wraps(init)
    def packed_init(self: Any, model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        prepare(model, peft_config)
        init(self, model, peft_config, *args, **kwargs)

    @functools.wraps(add)
    def packed_add(self: Any, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        prepare(self.base_model.model, peft_config)
        add(self, adapter_name, peft_config, *args, **kwargs)

    for module in (peft, peft.mapping_func):
        module.get_peft_model = packed_get_peft_model
    peft.PeftModel.__init__, peft.PeftModel.add_adapter = packed_init, packed_add


def keep_merges(notes: dict[str, Any], unrounded: bool) -> None:
    """Measure each merge's rounding into ``notes``; with ``unrounded``, multiply by the weight before it.

    ``notes["rounding"]`` becomes the largest distance of a merged weight from its stored value, in half steps
    of the format: 1 is the most that rounding to the nearest value can do. If a test fails over the rounded
    weights and passes over the unrounded ones, the rounding is all that it failed of.
    """
    pack, forward, dequantize = QuantizedLinear.pack, QuantizedLinear.forward, QuantizedLinear.dequantize
    nothing = object()

    def packs(self: QuantizedLinear, weight: Tensor) -> None:
        again = self.packed.codes.device.type != "meta"
        pack(self, weight)
        if again:
            notes["rounding"] = max(notes.get("rounding", 0.0), half_steps(self, weight))
            if unrounded:
                self._merged = (weight.detach().clone(), [part.clone() for part in self.stored().values()])  # type: ignore[assignment]

    def merged(self: QuantizedLinear) -> Any:
        weight, parts = getattr(self, "_merged", (nothing, []))
        if weight is nothing or not all(map(torch.equal, parts, self.stored().values())):
            return None  # unmerged since
        return weight

    def forwards(self: QuantizedLinear, x: Tensor) -> Tensor:
        weight = merged(self)
        return forward(self, x) if weight is None else nn.functional.linear(x, weight.to(x.dtype), self.bias)

    def decodes(self: QuantizedLinear, dtype: torch.dtype | None = None) -> Tensor:
        weight = merged(self)
        return dequantize(self, dtype) if weight is None else weight.to(dtype or self.dtype)

    QuantizedLinear.pack = packs  # type: ignore[method-assign]
    if unrounded:
        QuantizedLinear.forward, QuantizedLinear.dequantize = forwards, decodes  # type: ignore[method-assign]


def leave_stored_whole(fsdp: Any) -> Any:
    """FSDP1's class, told to ignore the parts of packed weights, which one flat parameter cannot hold."""

    @functools.wraps(fsdp, updated=())
    def ignoring(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        stored = [part for layer in layers for part in layer.stored().values()]
        return fsdp(model, *args, ignored_states=stored, **kwargs)

    return ignoring


def half_steps(layer: QuantizedLinear, weight: Tensor) -> float:
    """How far ``weight`` (N, K) lies from what ``layer`` stores of it, in half steps of the format."""
    from fewbits.formats import NF4

    error = (layer.packed.dequantize(torch.float32) - weight.float()).abs()
    if layer.format.name.startswith("nf4"):
        # the widest gap of the table, -1 to -0.6962, halved, times the block's largest magnitude
        flat = torch.nn.functional.pad(weight.float().flatten(), (0, -weight.numel() % NF4.block))
        size = flat.view(-1, NF4.block).abs().amax(1, keepdim=True).expand(-1, NF4.block)
        bound = 0.15191 * size.reshape(-1)[: weight.numel()].view_as(weight)
    else:
        bound = (weight.float().abs().amax(1, keepdim=True) / 127 / 2).expand_as(weight)
    return float((error / bound.clamp_min(1e-30)).max())
