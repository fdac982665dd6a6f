"""Rows with images in a run: what reads them, what does not go with them, and the processor's files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fewbits.errors import BadInput
from fewbits.models.folders.processor_files import copy_processor
from fewbits.models.vision import read_processor, sees
from fewbits.training.config import TrainConfig
from fewbits.training.data.pictures import Sight
from fewbits.training.data.token_data import TokenData


def look_of(shapes: Any, tokenizer: Any, name: str) -> Callable[[], Sight] | None:
    """What makes a run's `Sight` when the first image comes; None for a model that reads text alone.

    Args:
        shapes: the model's configuration.
        tokenizer: the run's, with its chat template.
        name: of the model, where the configuration does not name the folder that it came from.
    """
    if not sees(shapes):
        return None
    return partial(_sight, str(getattr(shapes, "name_or_path", "") or name), tokenizer)


def _sight(name: str, tokenizer: Any) -> Sight:
    return Sight(read_processor(name, tokenizer), tokenizer)


def check_images(config: TrainConfig, data: Sequence[TokenData], sight: Sight | None) -> None:
    """Refuse what does not go with rows that have images.

    Raises:
        BadInput: rows are to be packed, or one of text alone, read before the first image, has tokens of one.
    """
    check_texts(data, sight)
    if config.packing and any(example.pictures for part in data for example in part.examples):
        raise BadInput(
            "packing is true, and the data have images, whose rows do not share a sequence; set packing:"
            " false."
        )


def check_texts(data: Iterable[TokenData], sight: Sight | None) -> None:
    """Refuse rows without images that have tokens of one: a batch would have more of them than images.

    Args:
        data: rows, some of which were read before it was known which tokens these are.
        sight: knows them; None where no row has images.

    Raises:
        BadInput: there is such a row.
    """
    for part in data if sight is not None else ():
        for example in part.examples:
            if not example.pictures and sight is not None and sight.has_parts(example.input_ids):
                raise BadInput(
                    f"{part.report.path}, row {example.row}: the row's text has a token that stands for a"
                    " part of an image, and no image; take it out of the text, or leave the row out."
                )


def save_words(sight: Sight | None, tokenizer: Any, model: Any, folder: Path) -> None:
    """Write the tokenizer, and the processor that belongs to a model that sees.

    Args:
        sight: what read the run's images, whose processor gets the tokenizer's template; None without images.
        tokenizer: the run's.
        model: whose own processor's files are copied where there were no images, unless it is an adapter.
        folder: what is written.
    """
    tokenizer.save_pretrained(str(folder))
    if sight is not None:
        sight.processor.chat_template = tokenizer.chat_template
        sight.processor.save_pretrained(str(folder))
    elif sees(model.config) and not hasattr(model, "peft_config"):
        copy_processor(Path(str(getattr(model.config, "name_or_path", "") or "")), folder)
