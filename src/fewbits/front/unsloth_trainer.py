"""TRL's SFTTrainer with a learning rate of its own for embeddings and head, by Unsloth's names.

`UnslothTrainer` and `UnslothTrainingArguments` are made when they are first asked for: TRL is an extra.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fewbits.errors import BadInput

_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")


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

        def create_optimizer(self, model: Any = None) -> Any:
            """The host's optimizer, with groups of their own for embeddings and head."""
            optimizer = super().create_optimizer(model)
            rate = getattr(self.args, "embedding_learning_rate", None)
            if rate is not None:
                _set_apart(optimizer, self.model if model is None else model, rate)
            return optimizer

    arguments = with_words(UnslothTrainingArguments)
    return {"UnslothTrainer": UnslothTrainer, "UnslothTrainingArguments": arguments}


def __getattr__(name: str) -> Any:
    if name in ("UnslothTrainer", "UnslothTrainingArguments"):
        globals().update(_classes())  # made once: pickle asks whether a class is the one found here
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _set_apart(optimizer: Any, model: Any, rate: float) -> None:
    """Give the embeddings and the head that train groups of their own.

    Raises:
        BadInput: none of them trains.
    """
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    chosen = {id(p) for name, p in trained if _is_embedding(name)}
    if not chosen:
        raise BadInput(
            "embedding_learning_rate is set, but neither embeddings nor head train; name them in"
            ' target_modules or modules_to_save, as in modules_to_save=["embed_tokens", "lm_head"].'
        )
    for group in list(optimizer.param_groups):
        apart = [p for p in group["params"] if id(p) in chosen]
        if apart:
            group["params"] = [p for p in group["params"] if id(p) not in chosen]
            more = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
            optimizer.add_param_group({**more, "params": apart, "lr": rate})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def _is_embedding(name: str) -> bool:
    return any(part in _EMBEDDINGS for part in name.split("."))
