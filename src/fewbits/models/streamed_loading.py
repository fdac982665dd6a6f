"""`StreamedLoader`: transformers' ``from_pretrained``, which reads weights onto a GPU by `StreamedWeights`.

transformers reads one tensor after the other out of mapped files when weights are packed on their way. All
that it does besides (names, conversions, missing and tied weights) is kept: its classmethod runs with an
object in the class's place that answers as the class does, except for the one step in which the files are
opened. The model is an instance of the class itself, and no class is changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from fewbits.models.checkpoint import read_headers
from fewbits.models.packed_filling import fill, packed_places
from fewbits.models.placing import one_gpu
from fewbits.models.streamed_weights import DTYPES, StreamedWeights

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_STEP = "_load_pretrained_model"


def loader_for(auto_class: Any, example: Any, device_map: Any, kernels: Future[None] | None = None) -> Any:
    """What to call ``from_pretrained`` of: the class of a model that streams its weights, or ``auto_class``.

    Args:
        auto_class: transformers' Auto class for the model.
        example: a model of the same configuration, such as on the meta device; None: its class is not known.
        device_map: as `fewbits.models.placing.device_map_of` gives it.
        kernels: what is awaited before the first weight is packed, if anything.
    """
    device = one_gpu(device_map)
    if device is None or example is None or not hasattr(os, "preadv"):
        return auto_class
    kind = type(example)
    usual = getattr(kind.from_pretrained, "__func__", None) is _from_pretrained()
    return StreamedLoader(kind, device, kernels) if usual and hasattr(kind, _STEP) else auto_class


def _from_pretrained() -> Any:
    """The function behind the classmethod."""
    return PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]


class StreamedLoader:
    """Stands in a model class's place in the class's own ``from_pretrained``.

    Args:
        kind: the class, whose ``from_pretrained`` is that of `PreTrainedModel`.
        device: where all weights go.
        kernels: as for `loader_for`.
    """

    def __init__(self, kind: Any, device: torch.device, kernels: Future[None] | None = None) -> None:
        self._kind, self._device, self._kernels = kind, device, kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """A model of the class."""
        return self._kind(*args, **options)

    def from_pretrained(self, where: str | Path, **options: Any) -> Any:
        """As the class's; weights that are safetensors are streamed."""
        return _from_pretrained()(self, where, **options)

    def _load_pretrained_model(
        self, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *rest: Any, **more: Any
    ) -> Any:
        step = getattr(self._kind, _STEP)
        files = tuple(Path(file) for file in checkpoint_files or ())
        entries = {}
        if state_dict is None and files and all(file.suffix == ".safetensors" for file in files):
            entries = read_headers(files)
        if not entries or any(entry.dtype not in DTYPES for entry in entries.values()):
            return step(model, state_dict, checkpoint_files, load_config, *rest, **more)
        quantizer = load_config.hf_quantizer
        is_ours = getattr(quantizer, "reads_own_parts", False)  # and then all that lies in the files stays
        places = packed_places(model, entries) if is_ours else {}
        packs = not getattr(quantizer, "pre_quantized", True)  # while it reads
        order = None if is_ours else asking_order(entries, merged=packs)
        with StreamedWeights(entries, self._device, order=order) as weights:
            if self._kernels is not None:
                self._kernels.exception()  # waits; what goes wrong with a kernel, the first weight says again
            slices = {name: part for name, part in weights.slices().items() if name not in places}
            answer = step(model, slices, checkpoint_files, load_config, *rest, **more)
            fill(places, weights)
        told = answer[0] if isinstance(answer, tuple) else answer  # transformers 5.0 answers without a tuple
        told.missing_keys.difference_update(places)
        return answer


def asking_order(names: Iterable[str], *, merged: bool) -> list[str]:
    """The names in the order in which transformers asks for their tensors.

    Args:
        names: of a checkpoint's tensors.
        merged: each weight is asked for when its place is filled, so that all experts' parts of one merged
            weight come together; else tensors come one by one.
    """
    natural = sorted(names, key=dot_natural_key)
    if not merged:
        return natural
    together: dict[str, list[str]] = {}
    for name in natural:
        together.setdefault(_EXPERT.sub("*", name), []).append(name)
    return [name for group in together.values() for name in group]


__all__ = ["StreamedLoader", "asking_order", "loader_for"]
