"""What Unsloth's notebooks import besides `FastLanguageModel`: the same by another name, or a refusal."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from fewbits.errors import Unsupported
from fewbits.front.other_heads import TEXT, adapt_as, load_as
from fewbits.front.vision import FastVisionModel
from fewbits.models.fast import FastLanguageModel

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("fewbits")


class FastModel(FastLanguageModel):
    """`FastLanguageModel` by the name of Unsloth's newer notebooks: text, and text in a class that sees."""

    @staticmethod
    def from_pretrained(
        model_name: Any, *args: Any, auto_model: Any = None, **options: Any
    ) -> tuple[Any, Any]:
        """Load a model and its tokenizer; see `FastLanguageModel.from_pretrained`.

        Args:
            model_name: of that function.
            args: of that function.
            auto_model: a class of transformers that loads something else than a language model, such as
                ``AutoModelForSequenceClassification``; see `fewbits.front.other_heads.load_as`.
            options: of that function.
        """
        if auto_model is None:
            return FastLanguageModel.from_pretrained(model_name, *args, **options)
        return load_as(auto_model, model_name, *args, **options)

    @staticmethod
    def get_peft_model(model: nn.Module, *args: Any, **options: Any) -> Any:
        """Add LoRA adapters, also by the ``finetune_`` options; see `FastVisionModel.get_peft_model`."""
        if options.get("task_type") not in TEXT:
            return adapt_as(model, *args, **options)
        return FastVisionModel.get_peft_model(model, *args, **options)


class FastSentenceTransformer:
    """Refused: embedding models are not trained here."""

    @staticmethod
    def from_pretrained(model_name: str, *args: Any, **options: Any) -> Any:
        """Refuse, with the way.

        Raises:
            Unsupported: always.
        """
        raise Unsupported(
            f"fewbits trains models that write text, and {model_name} is to give embeddings; load it with"
            " SentenceTransformer of sentence-transformers, and give it adapters by its add_adapter."
        )


def is_bfloat16_supported() -> bool:
    """Whether the GPU computes in bfloat16; without a GPU False, as transformers' bf16 option then needs."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


is_bf16_supported = is_bfloat16_supported  # its shorter name
FastLlamaModel = FastMistralModel = FastQwen2Model = FastQwen3Model = FastGemmaModel = FastLanguageModel


def PatchDPOTrainer() -> None:  # noqa: N802 (as Unsloth has it)
    """Nothing: TRL's DPOTrainer is used as it is."""
    _say_once("PatchDPOTrainer", "DPOTrainer")


def PatchKTOTrainer() -> None:  # noqa: N802 (as Unsloth has it)
    """Nothing: TRL's KTOTrainer is used as it is."""
    _say_once("PatchKTOTrainer", "KTOTrainer")


def PatchFastRL(algorithm: Any = None, FastLanguageModel: Any = None) -> None:  # noqa: N802
    """Nothing: TRL's trainers are used as they are.

    Args:
        algorithm: such as "GRPO"; chooses nothing.
        FastLanguageModel: the class; it is left as it is.
    """
    _say_once("PatchFastRL", f"{algorithm or 'GRPO'}Trainer")


@cache
def _say_once(name: str, trainer: str) -> None:
    logger.warning("%s patches nothing here: TRL's %s works on fewbits models as it is.", name, trainer)
