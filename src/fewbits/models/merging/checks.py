"""What a merge uses to write in pieces and to compare what it wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from fewbits.errors import BadCheckpoint
from fewbits.kernels.product.matmul_packed import PLAIN
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.linear import take_parameters
from fewbits.nn.stochastic.linear import exact_products


def distance(tensor: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to ``expected``'s.

    Both are of the same shape.
    """
    return float((tensor - expected).norm() / expected.norm().clamp_min(1e-30))


@contextmanager
def operands_as_they_are(model: nn.Module) -> Iterator[None]:
    """Within it, products take x and their weights unrounded, as those of a merged model do.

    A recipe's formats of operands (FP8, say) move logits by percents, and a fake-quantised layer rounds its
    weight, which the merged model has as it was trained; no merge explains either.
    """
    rounding: list[tuple[Any, Any]] = [(m, m.operands) for m in model.modules() if hasattr(m, "operands")]
    named = model.named_modules(remove_duplicate=False)
    fake = {name: m for name, m in named if isinstance(m, FakeQuantizedLinear)}
    try:
        for module, _ in rounding:
            module.operands = PLAIN
        for name, layer in fake.items():
            model.set_submodule(name, take_parameters(nn.Linear, layer).train(layer.training))
        with exact_products(model):
            yield
    finally:
        for module, formats in rounding:
            module.operands = formats
        for name, layer in fake.items():
            model.set_submodule(name, layer)


def jitter(model: nn.Module, unit: float) -> None:
    """Move every weight matrix, those of experts too, by up to ``unit`` of each value, uniformly."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            noise = (
                torch.rand(parameter.shape, generator=generator, dtype=torch.float32)
                .mul_(2)
                .sub_(1)
                .mul_(unit)
                .add_(1)
            )
            parameter.mul_(noise.to(parameter.dtype) if parameter.dtype == torch.float32 else noise)


def split(names: list[str], size_of: Any, limit: int) -> list[list[str]]:
    """Names in groups of at most ``limit`` bytes, in order; a larger tensor has a group of its own."""
    groups: list[list[str]] = [[]]
    room = limit
    for name in names:
        size = size_of(name)
        if groups[-1] and size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups


def compare_file(file: Path, tensors: dict[str, Tensor]) -> None:
    """Refuse a safetensors file that does not hold these very tensors.

    Each tensor may have any shape.

    Raises:
        BadCheckpoint: it does not.
    """
    with safe_open(file, framework="pt") as stream:
        for name, tensor in tensors.items():
            if not torch.equal(stream.get_tensor(name), tensor) and not tensor.isnan().any():
                raise BadCheckpoint(f"{name} reads back from {file} as other numbers; check the disk.")
