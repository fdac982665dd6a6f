"""`FastVisionModel`: models that see, in the words of Unsloth's scripts.

The language side is packed, adapted and trained as a text model is; the tower that reads images stays in 16
bits, frozen unless adapters are asked for on it, and runs through the model's own forward.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import Unsupported
from fewbits.models.fast import FastLanguageModel
from fewbits.models.vision import language_names, processor_of, vision_names

if TYPE_CHECKING:
    from torch import nn


class FastVisionModel(FastLanguageModel):
    """`FastLanguageModel` for a class that reads images as well, with its processor for a tokenizer."""

    @staticmethod
    def from_pretrained(model_name: str | Path, *args: Any, **options: Any) -> tuple[Any, Any]:
        """Load a model and its processor; see `FastLanguageModel.from_pretrained`.

        Args:
            model_name: a model folder, the folder of an adapter, or a hub id.
            args: of that function.
            options: of that function.

        Returns:
            The model, and the processor of text and images; where the folder has none, the tokenizer, which
            ``model.fewbits_notes`` says.
        """
        model, tokenizer = FastLanguageModel.from_pretrained(model_name, *args, **options)
        return model, processor_of(model, tokenizer)

    @staticmethod
    def get_peft_model(
        model: nn.Module,
        *args: Any,
        finetune_vision_layers: bool = False,
        finetune_language_layers: bool = True,
        finetune_attention_modules: bool = True,
        finetune_mlp_modules: bool = True,
        **options: Any,
    ) -> Any:
        """Add LoRA adapters; see `FastLanguageModel.get_peft_model`.

        Args:
            model: what from_pretrained returned.
            args: of that function.
            finetune_vision_layers: adapters on the linears of what reads images, too. Unsloth's default is
                True; here it is False, and the tower stays as it was trained.
            finetune_language_layers: adapters on the decoder's linears.
            finetune_attention_modules: of those, on attention's.
            finetune_mlp_modules: of those, on the MLPs'.
            options: of that function; ``target_modules`` goes with none of these four.

        Returns:
            A peft.PeftModel.

        Raises:
            Unsupported: nothing is left to train, or the family's spec does not say what is attention.
        """
        if options.get("target_modules", 0) in (None, "all-linear"):
            options.pop("target_modules")  # what the finetune_ options say anyway
        parts = (finetune_language_layers, finetune_attention_modules, finetune_mlp_modules)
        if not finetune_vision_layers and all(parts):
            return FastLanguageModel.get_peft_model(model, *args, **options)
        if args or "target_modules" in options:
            raise Unsupported(
                "target_modules says which linears get adapters, and so do the finetune_ options; give one."
            )
        names = language_names(model, attention=parts[1], mlp=parts[2]) if finetune_language_layers else []
        names += vision_names(model) if finetune_vision_layers else []
        if not names:
            raise Unsupported("the finetune_ options leave nothing to train; set one of them.")
        patterns = sorted({re.sub(r"(?<=\\.)\d+(?=\\.)", r"\\d+", re.escape(name)) for name in names})
        return FastLanguageModel.get_peft_model(model, target_modules="|".join(patterns), **options)


__all__ = ["FastVisionModel"]
