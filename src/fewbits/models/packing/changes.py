"""What a receipt says of one module that was replaced: its class, its formats and its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from fewbits.formats import format_in_words
from fewbits.host.receipt import Change
from fewbits.nn.experts import QuantizedExperts
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.linear import LowPrecisionLinear, QuantizedLinear


def module_change(name: str, old: nn.Module, new: nn.Module, after: str) -> Change:
    """One module in the place of another; ``after`` says what the new one is."""
    return Change(name, describe(old), after, _bytes(old), _bytes(new))


def describe(module: nn.Module) -> str:
    """A module's class and formats, such as ``QuantizedLinear nf4``."""
    if isinstance(module, QuantizedLinear):
        formats = [module.format, *_operand_formats(module)]
    elif isinstance(module, LowPrecisionLinear):
        formats = list(_operand_formats(module))
    elif isinstance(module, FakeQuantizedLinear):
        formats = [f for f in (module.weight_format, module.activation_format) if f is not None]
    else:
        formats = []
    return " ".join([type(module).__name__, " ".join(dict.fromkeys(map(format_in_words, formats)))]).rstrip()


def expert_changes(path: str, experts: QuantizedExperts) -> list[Change]:
    """The changes that packed experts stand for, one for each of their weights."""
    changes = []
    for name, format in experts.formats.items():
        packed = experts.packed(name)
        before = math.prod(packed.shape) * experts.dtype.itemsize
        words = " ".join(dict.fromkeys(map(format_in_words, [format, *_operand_formats(experts)])))
        kind = f"{type(experts).__name__} {words}"
        changes.append(Change(f"{path}.{name}", experts.host_class.__name__, kind, before, packed.nbytes))
    return changes


def loaded_change(name: str, layer: nn.Module) -> Change:
    """The change that a layer of ours stands for where it was loaded so, and no linear was there to count."""
    if not isinstance(layer, QuantizedLinear):
        return Change(name, "Linear", describe(layer), _bytes(layer), _bytes(layer))
    bias = 0 if layer.bias is None else layer.bias.nbytes
    plain = layer.in_features * layer.out_features * layer.dtype.itemsize
    return Change(name, "Linear", describe(layer), plain + bias, layer.packed.nbytes + bias)


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _operand_formats(module: QuantizedLinear | LowPrecisionLinear | QuantizedExperts) -> Iterator[Any]:
    operands = module.operands
    for format in (operands.weight_operand, operands.activation, operands.gradient):
        if format is not None:
            yield format
