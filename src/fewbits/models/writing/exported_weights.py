"""A model on its way to another engine: its merged weights one at a time, and what else an export asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint, BadInput
from fewbits.export.gguf_vocabulary import Vocabulary, vocabulary_of
from fewbits.formats.base import Format, Packed
from fewbits.host.transposed import is_transposed
from fewbits.models.folders.original import source_folder
from fewbits.models.merging.branches import plain_name
from fewbits.models.merging.experts import WholeMerger, has_experts
from fewbits.models.merging.merger import Merger
from fewbits.models.writing.calibration_rows import read_windows
from fewbits.models.writing.input_moments import InputMoments, measure_inputs
from fewbits.models.writing.proof import Measured, measure
from fewbits.models.writing.streamed_logits import skeleton
from fewbits.nn.fake_quantize import FakeQuantizedLinear

if TYPE_CHECKING:
    from torch import nn

CALIBRATION_WINDOWS, CALIBRATION_LENGTH = 64, 256


class ExportedWeights:
    """A model's merged weights, by name and one at a time, with what else an export needs of it.

    Args:
        base: the model without PEFT around it.
        tokenizer: its tokenizer, or None for the one beside its weights.

    Raises:
        BadInput: there is no tokenizer.
        BadCheckpoint: a tensor of the model is nowhere.
    """

    def __init__(self, base: Any, tokenizer: Any) -> None:
        self.base, self.config = base, base.config.get_text_config()
        self.tokenizer = _tokenizer(base) if tokenizer is None else tokenizer
        self.merger = WholeMerger(base, torch.float32) if has_experts(base) else Merger(base, torch.float32)
        self.head_is_tied = self.merger.head_is_tied
        # Linears in training for a format: the model computes with their rounded weights.
        self.fake = {
            plain_name(name): module
            for name, module in base.named_modules()
            if isinstance(module, FakeQuantizedLinear)
        }
        shapes = {n: tuple(t.shape) for n, t in self.skeleton().state_dict().items()}
        weights = dict(self.merger.weights())
        tied = {"lm_head.weight"} if self.head_is_tied else set()
        absent = sorted(set(shapes) - set(weights) - tied)
        if absent:
            raise BadCheckpoint(
                f"the tensor {absent[0]} is missing from this model; load it again from its original folder."
            )
        self._found = weights
        self.shapes: Mapping[str, tuple[int, ...]] = {n: shapes[n] for n in shapes if n not in tied}

    def skeleton(self) -> Any:
        """The plain model without weights, on the meta device."""
        return skeleton(self.base, head_is_tied=self.head_is_tied)

    def weight(self, name: str) -> Tensor:
        """One merged weight in the model's shape, float32, on the CPU; of a linear in QAT, rounded."""
        rounded = self._rounded(name.removesuffix(".weight")) if name.endswith(".weight") else None
        return self._found[name]() if rounded is None else rounded.dequantize(torch.float32)

    def packed(self, name: str) -> Packed | None:
        """The weight of the linear ``name`` as the model computes with it, if that is what is exported."""
        stored = self.stored(name)
        return self._rounded(name) if stored is None else stored.to("cpu")

    def stored(self, name: str) -> Packed | None:
        """`packed`, for linears and experts' weights that are packed in memory already; where they lie."""
        layer = self.merger.packed.get(name)
        if layer is None and isinstance(self.merger, WholeMerger):
            return self.merger.stored_experts(name)
        from_original = self.merger.original is not None and layer is not None and not layer.repacked
        if layer is None or name in self.merger.branches or from_original or is_transposed(layer):
            return None
        return layer.packed

    def format_of(self, name: str) -> Format | None:
        """The format of `packed`."""
        stored = self.stored(name)
        if stored is not None:
            return stored.format
        return self.fake[name].weight_format if name in self.fake else None

    @property
    def weights_from(self) -> str:
        """Where the weights come from, in words."""
        rounded = f", {len(self.fake)} of them rounded as they were in training" if self.fake else ""
        return f"{self.merger.weights_from}{rounded}"

    @property
    def from_memory(self) -> bool:
        """True if the weights are those that the model computes with, not the ones it was packed from."""
        return self.merger.original is None or not self.merger.packed

    def vocabulary(self) -> Vocabulary:
        """The tokenizer in GGUF's terms."""
        stops = getattr(getattr(self.base, "generation_config", None), "eos_token_id", None)
        numbers = stops if isinstance(stops, list) else [] if stops is None else [stops]
        return vocabulary_of(self.tokenizer, self.shapes["model.embed_tokens.weight"][0], numbers)

    def inputs(self, rows: str | Path) -> dict[str, InputMoments]:
        """What each linear is given on a text.

        Args:
            rows: a JSON Lines file of "text" or "messages"; 64 windows of 256 tokens at most are used.

        Raises:
            BadInput: the file is missing, damaged or shorter than one window.
            NotFinite: a linear is given a NaN or an infinity.
        """
        positions = getattr(self.config, "max_position_embeddings", None) or CALIBRATION_LENGTH
        windows = read_windows(
            rows,
            self.tokenizer,
            length=min(CALIBRATION_LENGTH, positions),
            count=CALIBRATION_WINDOWS,
            least=1,
        )
        return measure_inputs(self.skeleton(), self.weight, windows)

    def proved(self, written: Callable[[str], Tensor]) -> Measured:
        """`measure` over all of it."""
        return measure(
            self.base,
            self.tokenizer,
            self.weight,
            written,
            head_is_tied=self.head_is_tied,
            from_memory=self.from_memory,
        )

    def _rounded(self, name: str) -> Packed | None:
        linear = self.fake.get(name)
        if linear is None:
            return None
        weight = self._found[f"{name}.weight"]().to(linear.weight.dtype)
        return linear.weight_format.quantize(weight)


def _tokenizer(base: nn.Module) -> Any:
    from transformers import AutoTokenizer

    folder = source_folder(base)
    if folder is None or not any(folder.glob("tokenizer*")):
        raise BadInput("an export needs the tokenizer, and there is none beside the model; pass tokenizer=.")
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
