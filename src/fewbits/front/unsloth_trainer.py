"""TRL's SFTTrainer with a learning rate of its own for embeddings and head, by Unsloth's names.

`UnslothTrainer` and `UnslothTrainingArguments` are made when they are first asked for: TRL is an extra.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fewbits.models.adapting.learning_rates import set_embeddings_apart

if TYPE_CHECKING:
    from torch import nn


def _classes() -> dict[str, Any]:
    from fewbits.front.trl_words import SFTTrainer, of_trl, with_words

    settings: Any = of_trl("SFTConfig")

    @dataclass
    class UnslothTrainingArguments(settings):
        """TRL's SFTConfig and ``embedding_learning_rate``; None: embeddings and head learn as the rest."""

        __qualname__ = "UnslothTrainingArguments"  # so that pickle finds it, by way of __getattr__

        embedding_learning_rate: float | None = field(
            default=None, metadata={"help": "learning rate of embeddings and head"}
        )

    class UnslothTrainer(SFTTrainer):
        """TRL's SFTTrainer; embeddings and head that train may have a learning rate of their own."""

        __qualname__ = "UnslothTrainer"

        def create_optimizer(self, model: nn.Module | None = None) -> Any:
            """The host's optimizer, with groups of their own for embeddings and head."""
            optimizer = super().create_optimizer(*(() if model is None else (model,)))  # 5.0 takes no model
            rate = getattr(self.args, "embedding_learning_rate", None)
            if rate is not None:
                set_embeddings_apart(optimizer, self.model if model is None else model, rate)
            return optimizer

    arguments = with_words(UnslothTrainingArguments)
    return {"UnslothTrainer": UnslothTrainer, "UnslothTrainingArguments": arguments}


def __getattr__(name: str) -> Any:
    if name in ("UnslothTrainer", "UnslothTrainingArguments"):
        globals().update(_classes())  # made once: pickle asks whether a class is the one found here
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
