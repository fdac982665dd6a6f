"""The kernels that pack weights, loaded in a thread while files are looked through and the model is built.

The first launch of any Triton kernel in a process takes half a second even where its machine code is cached:
Triton reads all of its own compiler, 400 MB, to know whether the cache is still good. That is mostly done
without the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from fewbits.formats.base import Format
from fewbits.kernels.codec.quantize import quantize
from fewbits.models.checkpoint import Checkpoint
from fewbits.models.placing import device_map_of, dtype_of, one_gpu
from fewbits.nn.finite import FiniteLater
from fewbits.recipes import Recipe, get_recipe

RecipeLike = str | Recipe | Mapping[str, Any]
_SHAPE = (64, 4096)  # divisible as real weights are, so that the kernels are the same


@contextmanager
def work_beside(
    recipe: RecipeLike | None, checkpoint: Checkpoint | None, device_map: Any, dtype: Any
) -> Iterator[tuple[ThreadPoolExecutor, Future[None] | None]]:
    """Threads for what is done beside loading; in one of them begins what packing by a recipe takes.

    The future is done when that is there. Nothing begins, and it is None, where nothing is packed or it is
    not packed on one GPU. What goes wrong in the thread is not told: the first weight's packing does the same
    again, and says it.
    """
    placed = device_map_of(device_map)
    device = one_gpu(placed)
    is_plain = checkpoint is not None and checkpoint.quant_method is None
    kernels = None
    with ThreadPoolExecutor(2, thread_name_prefix="beside") as threads:
        if recipe is not None and device is not None and is_plain:
            kernels = threads.submit(load_kernels, recipe, device, dtype_of(dtype, placed))
        yield threads, kernels


def load_kernels(recipe: RecipeLike, device: torch.device, dtype: Any) -> None:
    """Pack a few values in each of a recipe's weight formats on a GPU, and look whether they are finite."""
    chosen = get_recipe(recipe)
    rules = (chosen.linear, *(rule for _, rule in chosen.overrides))
    formats = dict.fromkeys(rule.weight for rule in rules if rule.weight is not None)
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    with torch.cuda.device(device):
        for format in formats:
            _pack_some(format, torch.ones(_SHAPE, dtype=dtype, device=device))


def _pack_some(format: Format, weight: torch.Tensor) -> None:
    finite = FiniteLater()
    finite.add(weight, "")
    for name, part in quantize(weight, format).parts.items():
        finite.add(part, name)
    finite.wrong()


__all__ = ["load_kernels", "work_beside"]
