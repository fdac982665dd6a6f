"""Calibration text: rows of a JSON Lines file, as windows of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.text_files import decoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_windows(
    file: str | Path, tokenizer: PreTrainedTokenizerBase, *, length: int, count: int, least: int
) -> Tensor:
    """Windows of tokens, the rows one after another.

    Args:
        file: one JSON object a line, with "text", or with "messages" for the tokenizer's chat template.
        tokenizer: the model's.
        length: tokens of a window.
        count: windows at most.
        least: tokens that there must be in all.

    Returns:
        (windows, length) int64.

    Raises:
        BadInput: the file is missing, damaged or too short.
    """
    path = Path(file)
    if not path.is_file():
        raise BadInput(f"there is no calibration file {path}; give a JSON Lines file of rows with 'text'.")
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    ids: list[int] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                ids += [*_tokens(_row(line, path, number), tokenizer, path, number), *end]
            if len(ids) >= length * count:
                break
    if len(ids) < max(length, least):
        raise BadInput(
            f"{path} has {len(ids):,} tokens, and calibration needs {max(length, least):,} at least; give "
            "more rows, or leave out --calibrate."
        )
    windows = min(count, len(ids) // length)
    return torch.tensor(ids[: windows * length]).view(windows, length)


def _row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    text = decoded(line, f"line {number} of {path}")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"line {number} of {path} is no JSON; write one object a line.") from error
    if not isinstance(row, dict) or not ("text" in row or "messages" in row):
        raise BadInput(f"line {number} of {path} has neither 'text' nor 'messages'; name one of them so.")
    return row


def _tokens(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, path: Path, number: int) -> list[int]:
    if "text" in row:
        return list(tokenizer(str(row["text"]))["input_ids"])
    if tokenizer.chat_template is None:
        raise BadInput(
            f"line {number} of {path} has messages, and this model's tokenizer has no chat template; "
            "give rows with 'text'."
        )
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
