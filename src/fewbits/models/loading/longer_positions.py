"""Sequences longer than a model was made for: its rotary positions are stretched, as Unsloth stretches them.

    factor = length / max_position_embeddings,    angle of position p = (p / factor) * frequency

That is linear scaling (kaiokendev, "Things I'm learning while training SuperHOT", 2023; Chen et al. 2023,
arXiv 2306.15595), transformers' rope type "linear": the model sees positions between those that it knows, and
learns from some training at the new length; Chen et al. went to `MOST` times the length. It is written into
the model's configuration, so whatever is saved of the whole model is stretched too; beside it stands how many
positions it was trained for. An adapter is saved without its base's configuration, so it keeps the length,
and its base is stretched again where `FastLanguageModel` loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fewbits.errors import BadInput

MOST = 16  # times as long: from 2,048 to 32,768 tokens; more is rather a wrong number than a wish
TRAINED_FOR = "fewbits_trained_positions"  # in a stretched configuration: of the model before that
_LENGTH = "fewbits_max_positions"  # in an adapter's configuration: those of its base


def stretch(config: Any, length: int | None, name: str) -> str | None:
    """Let a model have ``length`` positions, in its configuration, in place, before it is built.

    Args:
        config: transformers' configuration.
        length: tokens; None, or no more than the model has: nothing happens.
        name: the model's, for the sentence.

    Returns:
        What was done, in a sentence; None if nothing was.

    Raises:
        BadInput: the model's positions are not rotary ones, or are scaled in another way already, or the
            length is more than `MOST` times theirs.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if length is None or positions is None or length <= positions:
        return None
    trained = getattr(text, TRAINED_FOR, None) or positions
    rope: Any = getattr(text, "rope_parameters", None)
    kind = _kind(rope)
    if kind != ("default" if trained == positions else "linear"):
        how = f"are scaled already ({kind})" if kind else "are not of the kind that can be stretched"
        raise BadInput(
            f"max_seq_length={length} is more than the {positions} positions that the model was trained for,"
            f" and the positions of {name} {how}; pass at most {positions}."
        )
    factor = length / trained
    if factor > MOST:
        raise BadInput(
            f"max_seq_length={length} is {factor:.4g} times the {trained} positions that {name} was trained"
            f" for, and positions are stretched by {MOST} times at most; pass at most {MOST * trained}."
        )
    text.rope_parameters = {**rope, "rope_type": "linear", "factor": factor}
    text.max_position_embeddings = length
    setattr(text, TRAINED_FOR, trained)
    return stretched(config)


def stretched(config: Any) -> str | None:
    """The sentence about a configuration that was stretched; None: it was not."""
    text = config.get_text_config()
    trained = getattr(text, TRAINED_FOR, None)
    if trained is None:
        return None
    length = text.max_position_embeddings
    return (
        f"positions are stretched by {length / trained:.4g} (rope scaling, linear) to {length}: the model was"
        f" trained for {trained}, and needs training at the new length."
    )


def check_stretched(config: Any, model: nn.Module, name: str) -> None:
    """See that a model follows its stretched configuration; one that was not stretched passes.

    Raises:
        BadInput: its class makes its angles in a way of its own.
    """
    if stretched(config) is None:
        return
    kinds: set[str] = set()
    for module in model.modules():
        own: Any = getattr(module, "rope_type", None)
        if own is not None:  # a dictionary in Gemma 3, of each kind of layer
            kinds.update(own.values() if isinstance(own, dict) else [own])
    if kinds != {"linear"}:
        raise BadInput(
            f"max_seq_length is more than the positions that {name} was trained for, and its class,"
            f" {type(model).__name__}, does not stretch them; pass at most"
            f" {getattr(config.get_text_config(), TRAINED_FOR)}."
        )


def options_like(config: Any, folder: Any) -> dict[str, Any]:
    """Options of transformers' ``from_pretrained`` that stretch the model in a folder like ``config``."""
    if stretched(config) is None:
        return {}
    from transformers import AutoConfig

    own = AutoConfig.from_pretrained(folder, local_files_only=True)
    stretch(own, config.get_text_config().max_position_embeddings, str(folder))
    return {"config": own}


def exceeds(config: Any, length: int | None) -> bool:
    """Whether a model would have to be stretched to ``length`` tokens."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length is not None and positions is not None and length > positions


def mark_stretched(config: Any, model: Any) -> None:
    """Write into a ``peft.LoraConfig`` how many positions a stretched base has."""
    settings: Any = getattr(model, "config", None)
    if hasattr(settings, "get_text_config") and stretched(settings) is not None:
        length = settings.get_text_config().max_position_embeddings
        config.auto_mapping = {**(config.auto_mapping or {}), _LENGTH: length}
        config.task_type = config.task_type or "CAUSAL_LM"  # else PEFT writes an auto_mapping of its own


def length_with(adapter_config: Mapping[str, Any], length: int | None, name: str) -> int | None:
    """The length to which an adapter's base is to be loaded.

    Args:
        adapter_config: the mapping in adapter_config.json.
        length: what was asked for.
        name: of the adapter.

    Raises:
        BadInput: it was trained over positions that are stretched less.
    """
    trained_at = (adapter_config.get("auto_mapping") or {}).get(_LENGTH)
    if trained_at is not None and length is not None and length > trained_at:
        raise BadInput(
            f"max_seq_length={length} is more than the {trained_at} positions to which the base of {name} was"
            " stretched when it was trained; pass at most that."
        )
    return length if trained_at is None else int(trained_at)


def check_length(adapter_config: Mapping[str, Any], model: Any, name: Any) -> None:
    """Refuse to load an adapter over a base whose positions are not stretched as in its training.

    Raises:
        BadInput: they are not.
    """
    trained_at = (adapter_config.get("auto_mapping") or {}).get(_LENGTH)
    if trained_at is None:
        return
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if trained_at != positions:
        raise BadInput(
            f"the adapter in {name} was trained over a base that was stretched to {trained_at} positions, and"
            f" this one has {positions}; load it by its folder, or the base with max_seq_length={trained_at}."
        )


def _kind(rope: Any) -> str:
    """The type of a model's rotary positions; "" if it has none, or several."""
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        return ""
    return str(rope.get("rope_type", rope.get("type", "default")))


__all__ = [
    "MOST",
    "TRAINED_FOR",
    "check_length",
    "check_stretched",
    "exceeds",
    "length_with",
    "mark_stretched",
    "options_like",
    "stretch",
    "stretched",
]
