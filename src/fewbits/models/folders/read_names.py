"""The names that transformers gives to a checkpoint's tensors when it loads them into a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def renaming_of(model: nn.Module) -> Callable[[str], str]:
    """What makes of a tensor's name in a checkpoint the model's own, for tensors that are only renamed.

    Families write other names than their modules have: a Gemma 3 that sees has
    ``language_model.model.layers`` in its files and ``model.language_model.layers`` in its modules.
    """
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    if not isinstance(model, PreTrainedModel):
        return str
    mapping = get_model_conversion_mapping(model) or ()
    renamings: list[Any] = [one for one in mapping if isinstance(one, WeightRenaming)]

    def renamed(name: str) -> str:
        for one in renamings:
            name = one.rename_source_key(name)[0]
        return name

    return renamed


__all__ = ["renaming_of"]
