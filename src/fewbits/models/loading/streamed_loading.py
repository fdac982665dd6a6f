"""`StreamedLoader`: transformers' ``from_pretrained``, which reads weights onto a GPU by `StreamedWeights`.

transformers reads one tensor after the other out of mapped files when weights are packed on their way. All
that it does besides (names, conversions, missing and tied weights) is kept: its classmethod runs with an
object in the class's place that answers as the class does, except for the one step in which the files are
opened. The model is an instance of the class itself, and no class is changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from fewbits.models.folders.checkpoint import TensorEntry, read_headers
from fewbits.models.loading.early_work import Early
from fewbits.models.loading.packed_filling import fill, packed_places
from fewbits.models.loading.placing import one_gpu
from fewbits.models.loading.streamed_weights import StreamedWeights, asking_order, can_stream

if TYPE_CHECKING:
    from torch import nn

_STEP = "_load_pretrained_model"


def loader_for(
    auto_class: Any,
    kind: Any,
    device_map: Any,
    early: Early | None = None,
    look: Callable[[nn.Module], None] | None = None,
) -> Any:
    """What to call ``from_pretrained`` of: the class of a model that streams its weights, or ``auto_class``.

    Args:
        auto_class: transformers' Auto class for the model.
        kind: the model's class; None: it is not known.
        device_map: as `fewbits.models.loading.placing.device_map_of` gives it.
        early: what has begun already.
        look: is called with the model before a weight is read, where its class streams.
    """
    device = one_gpu(device_map)
    if device is None or not streams(kind, device_map):
        return auto_class
    return StreamedLoader(kind, device, early, look)


def streams(kind: Any, device_map: Any) -> bool:
    """Whether models of a class (None: not known) are loaded by a `StreamedLoader`."""
    if kind is None or one_gpu(device_map) is None or not hasattr(os, "preadv"):
        return False
    usual = getattr(kind.from_pretrained, "__func__", None) is _from_pretrained()
    return usual and hasattr(kind, _STEP)


def _from_pretrained() -> Any:
    """The function behind the classmethod."""
    return PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]


class StreamedLoader:
    """Stands in a model class's place in the class's own ``from_pretrained``.

    Args:
        kind: the class, whose ``from_pretrained`` is that of `PreTrainedModel`.
        device: where all weights go.
        early: as for `loader_for`.
        look: is called with the model before a weight is read.
    """

    def __init__(
        self,
        kind: Any,
        device: torch.device,
        early: Early | None = None,
        look: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self._kind, self._device, self._early, self._look = kind, device, early, look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """A model of the class."""
        model = self._kind(*args, **options)
        if self._look is not None:
            self._look(model)
        return model

    def from_pretrained(self, where: str | Path, **options: Any) -> Any:
        """As the class's; weights that are safetensors are streamed."""
        return _from_pretrained()(self, where, **options)

    def _load_pretrained_model(
        self,
        model: nn.Module,
        state_dict: Any,
        checkpoint_files: Any,
        load_config: Any,
        *rest: Any,
        **more: Any,
    ) -> Any:
        step = getattr(self._kind, _STEP)
        files = tuple(Path(file) for file in checkpoint_files or ())
        entries = {}
        if state_dict is None and files and all(file.suffix == ".safetensors" for file in files):
            entries = read_headers(files)
        if not can_stream(entries):
            return step(model, state_dict, checkpoint_files, load_config, *rest, **more)
        quantizer = load_config.hf_quantizer
        is_ours = getattr(quantizer, "reads_own_parts", False)  # and then all that lies in the files stays
        places = packed_places(model, entries) if is_ours else {}
        packs = not getattr(quantizer, "pre_quantized", True)  # while it reads
        order = None if is_ours else asking_order(entries, merged=packs)
        with self._opened(entries, order) as weights:
            if self._early is not None and self._early.kernels is not None:
                self._early.kernels.exception()  # waits; the first weight says what is wrong
            slices = {name: part for name, part in weights.slices().items() if name not in places}
            answer = step(model, slices, checkpoint_files, load_config, *rest, **more)
            fill(places, weights)
        told = answer[0] if isinstance(answer, tuple) else answer  # transformers 5.0 answers without a tuple
        told.missing_keys.difference_update(places)
        return answer

    @contextmanager
    def _opened(self, entries: dict[str, TensorEntry], order: list[str] | None) -> Iterator[StreamedWeights]:
        """The weights that are being read already, if they are these; closed at the end."""
        weights = None if self._early is None else self._early.weights
        if weights is None or weights.entries != entries:
            weights = StreamedWeights(entries, self._device, order=order).__enter__()
        try:
            yield weights
        finally:
            weights.close()


__all__ = ["StreamedLoader", "loader_for", "streams"]
