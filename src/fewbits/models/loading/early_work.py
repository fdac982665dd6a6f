"""What begins before a model is built: the kernels that pack its weights are loaded, and files are read.

The first launch of any Triton kernel in a process takes half a second even where its machine code is cached:
Triton reads all of its own compiler, 400 MB, to know whether the cache is still good. That is mostly done
without the interpreter's lock. The readers of weights begin by locking memory, a tenth of a second in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from fewbits.formats.base import Format
from fewbits.kernels.codec.quantize import quantize
from fewbits.models.folders.checkpoint import Checkpoint
from fewbits.models.loading.placing import device_map_of, dtype_of, one_gpu
from fewbits.models.loading.streamed_weights import StreamedWeights, asking_order, can_stream
from fewbits.nn.finite import FiniteLater
from fewbits.recipes import Recipe, get_recipe

RecipeLike = str | Recipe | Mapping[str, Any]
_SHAPE = (64, 4096)  # divisible as real weights are, so that the kernels are the same


class Early(NamedTuple):
    """Threads for what is done beside loading, and what has begun in some.

    Attributes:
        threads: two that may be given work.
        kernels: done when the kernels that pack are there; what goes wrong with them is not told, for the
            first weight's packing does the same again, and says it. None: nothing is packed on one GPU.
        weights: the files that are being read; None: nothing is.
    """

    threads: ThreadPoolExecutor
    kernels: Future[None] | None = None
    weights: StreamedWeights | None = None


@contextmanager
def work_beside(
    recipe: RecipeLike | None, checkpoint: Checkpoint | None, device_map: Any, dtype: Any
) -> Iterator[Early]:
    """Begin what loading a checkpoint onto one GPU will take, by a recipe if it is not packed."""
    placed = device_map_of(device_map)
    device = one_gpu(placed)
    method = None if checkpoint is None else checkpoint.quant_method
    with ThreadPoolExecutor(2, thread_name_prefix="beside") as threads, ExitStack() as opened:
        if device is None or checkpoint is None or method not in (None, "fewbits"):
            yield Early(threads)
            return
        kernels, packs = None, method is None and recipe is not None
        if packs:
            assert recipe is not None
            kernels = threads.submit(load_kernels, recipe, device, dtype_of(dtype, placed))
        weights = None
        if can_stream(checkpoint.tensors):
            order = None if method else asking_order(checkpoint.tensors, merged=packs)
            weights = opened.enter_context(StreamedWeights(checkpoint.tensors, device, order=order))
        yield Early(threads, kernels, weights)


def load_kernels(recipe: RecipeLike, device: torch.device, dtype: Any) -> None:
    """Pack a few values in each of a recipe's weight formats on a GPU, and look whether they are finite."""
    chosen = get_recipe(recipe)
    rules = (chosen.linear, chosen.head, *(rule for _, rule in chosen.overrides))
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


__all__ = ["Early", "load_kernels", "work_beside"]
