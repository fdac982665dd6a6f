"""Rows of messages with images in them: `UnslothVisionDataCollator`, on TRL's own collator.

A row has "messages", whose contents are lists of ``{"type": "image", "image": ...}`` and of text parts.
TRL's collator wants the images beside the messages, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fewbits.errors import BadInput, Unsupported

if TYPE_CHECKING:
    from torch import nn


class UnslothVisionDataCollator:
    """Makes batches of rows with images: input_ids, attention_mask, labels (batch, length), pixel values."""

    def __init__(
        self,
        model: nn.Module | None = None,
        processor: Any = None,
        max_seq_length: int | None = None,
        **options: Any,
    ) -> None:
        """Stand on TRL's collator.

        Args:
            model: chooses nothing here, but its length (``model.max_seq_length``) where none is given.
            processor: of text and images, as FastVisionModel returned it.
            max_seq_length: tokens of the longest row; None: the model's.
            options: of TRL's DataCollatorForVisionLanguageModeling; None and False choose nothing.

        Raises:
            BadInput: there is no processor of images.
            Unsupported: TRL or one of its options is missing.
        """
        if getattr(processor, "image_processor", None) is None:
            raise BadInput(
                "UnslothVisionDataCollator needs the processor that FastVisionModel.from_pretrained returns;"
                " this one has no image_processor."
            )
        try:
            from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
        except ImportError as error:
            raise Unsupported(
                "images are collated by TRL, which is not installed; pip install 'fewbits[train]'."
            ) from error
        self.processor = processor
        chosen = {name: value for name, value in options.items() if value not in (None, False)}
        length = max_seq_length or getattr(model, "max_seq_length", None)
        try:
            self.collate = DataCollatorForVisionLanguageModeling(processor, max_length=length, **chosen)
        except TypeError as error:
            raise Unsupported(
                f"TRL's collator of images does not take {sorted(chosen)} ({error}); leave them out."
            ) from error

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch."""
        batch: dict[str, Any] = self.collate([beside(row) for row in rows])
        return batch


def beside(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its images beside its messages; one that has them there already keeps them."""
    if "images" in row or "image" in row or "messages" not in row:
        return _without_blanks(row)
    images, messages = [], []
    for message in row["messages"]:
        parts = message["content"]
        if isinstance(parts, str):
            messages.append(message)
            continue
        images += [
            part["image"] for part in parts if part.get("type") == "image" and part.get("image") is not None
        ]
        left = [{k: v for k, v in part.items() if k != "image" and v is not None} for part in parts]
        messages.append({**message, "content": left})
    return {**row, "messages": messages, **({"images": images} if images else {})}


def _without_blanks(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a data set, whose parts all have all keys, with the keys that each part was written with."""
    if not any(isinstance(message["content"], list) for message in row.get("messages") or ()):
        return row
    messages = [
        message
        if isinstance(message["content"], str)
        else {
            **message,
            "content": [{k: v for k, v in part.items() if v is not None} for part in message["content"]],
        }
        for message in row["messages"]
    ]
    return row if messages == row["messages"] else {**row, "messages": messages}


__all__ = ["UnslothVisionDataCollator", "beside"]
