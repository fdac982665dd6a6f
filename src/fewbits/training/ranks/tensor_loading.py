"""A model whose layers ranks share, from the files: no rank ever holds it whole.

The model is built without values, converted, given adapters and fused as it is. What ranks do not share is
read first. Then every linear is read and packed, cut at once (`fewbits.training.ranks.tensor_parallel`), and
what other ranks have of it is let go: at most a rank holds its part of the layers and one linear.

Every rank reads the whole files, once. Run on two H200s, plain and packed
(tests/training/test_several_gpus.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from fewbits.decoder.fuse import fuse
from fewbits.host.receipt import Receipt
from fewbits.host.spec import layer_names, spec_for
from fewbits.recipes import LoRA, Recipe
from fewbits.training.ranks.fsdp import shard
from fewbits.training.ranks.sharded_loading import check_trains, fill, mesh_device, open_empty
from fewbits.training.ranks.tensor_parallel import tensor_parallel


def load_tensor_parallel_model(
    where: Any,
    tensor: Any,
    data: Any = None,
    *,
    recipe: Recipe | None = None,
    lora: LoRA | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    fused: bool = True,
    **options: Any,
) -> tuple[Any, Receipt]:
    """A model whose layers the ranks of a mesh share from the beginning; every rank calls.

    Args:
        where: as for `fewbits.training.ranks.sharded_loading.load_sharded_model`.
        tensor: the mesh of the ranks that share each layer.
        data: the mesh whose ranks share the rest (FSDP2); None: nobody does.
        recipe: which linears are packed how; None: as the folder has it.
        lora: adapters; None: all weights train.
        dtype: of what is not packed.
        seed: of adapters, and of random weights.
        fused: let the decoder compute as fused nodes.
        options: of `fewbits.training.ranks.fsdp.shard`; ``trains=False`` for a model that is not to be
            trained: it is frozen, and packed weights need no adapters.

    Returns:
        The model and the receipt of all that was done.
    """
    device = mesh_device(tensor)
    source, model, receipt = open_empty(where, seed, device, recipe, lora, dtype)
    if options.pop("trains", True):
        check_trains(model, lora)
    else:
        model.eval().requires_grad_(False)
    if fused:
        receipt.notes.extend(str(fuse(model)).splitlines())
    spec = spec_for(model)
    linears = [f"{name}.{path}" for name in layer_names(model, spec) for path in spec.linears]
    with source:

        def read(name: str) -> None:
            _make_room(model, device, [name])
            fill(model, source, seed, f"{name}.")

        _make_room(model, device, without=linears)
        fill(model, source, seed, without=tuple(f"{name}." for name in linears))
        lines = [str(tensor_parallel(model, tensor, before=read))]
    if data is not None and data.size() > 1:
        lines.append(str(shard(model, data, **options)))
    receipt.notes.extend("\n".join(lines).splitlines())
    return model, receipt


def _make_room(
    model: nn.Module, device: torch.device, names: Collection[str] = ("",), *, without: Collection[str] = ()
) -> None:
    """Memory for the parameters of these modules, but not of those; a tied one stays one."""
    begins = tuple(f"{name}." for name in without)
    empties: dict[int, nn.Parameter] = {}
    for name in names:
        for path, module in model.get_submodule(name).named_modules(prefix=name):
            if f"{path}.".startswith(begins or ("\0",)):
                continue
            for leaf, p in module._parameters.items():
                if p is not None and p.is_meta:
                    empty = empties.get(id(p))
                    if empty is None:
                        data = torch.empty_like(p, device=device)
                        empty = empties[id(p)] = nn.Parameter(data, requires_grad=p.requires_grad)
                    module._parameters[leaf] = empty
            for leaf, buffer in module._buffers.items():
                module._buffers[leaf] = None if buffer is None else buffer.to(device)


__all__ = ["load_tensor_parallel_model"]
