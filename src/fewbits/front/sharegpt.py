"""Columns and ShareGPT's rows into conversations, in the words of Unsloth's notebooks.

Data sets are ``datasets.Dataset`` values; nothing is read from elsewhere.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fewbits.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COLUMN = "conversations"
_OPTIONAL = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)
_FIELD = re.compile(r"\{([^{}]+)\}")


def standardize_sharegpt(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
    aliases_for_system: Sequence[str] = ("system",),
    aliases_for_user: Sequence[str] = ("user", "human", "input"),
    aliases_for_assistant: Sequence[str] = ("gpt", "assistant", "output"),
    batch_size: int = 1000,
    num_proc: int | None = None,
) -> Any:
    """Conversations of ``from`` and ``value`` as ``role`` and ``content``.

    Args:
        dataset: with a column "conversations" (or "messages") of lists of messages.
        tokenizer: chooses nothing here.
        aliases_for_system: what a system message is called.
        aliases_for_user: what a user's message is called.
        aliases_for_assistant: what an answer is called.
        batch_size: rows at a time.
        num_proc: processes; None: this one.

    Returns:
        The data set with the column rewritten; one that has roles and contents already as it was.

    Raises:
        BadInput: no such column, or a message with another role, in a sentence that names it.
    """
    names = _column_names(dataset)
    column = next((name for name in (_COLUMN, "messages", "conversation") if name in names), None)
    if column is None:
        raise BadInput(
            f"standardize_sharegpt needs a column {_COLUMN}, and the data set has {', '.join(names)}; make"
            " one with to_sharegpt."
        )
    role_of = {
        **dict.fromkeys(aliases_for_system, "system"),
        **dict.fromkeys(aliases_for_user, "user"),
        **dict.fromkeys(aliases_for_assistant, "assistant"),
    }

    def standard(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {column: [[_standard(m, role_of) for m in talk] for talk in batch[column]]}

    options = {} if not _has_length(dataset) else {"num_proc": num_proc, "desc": "Standardising the format"}
    return dataset.map(standard, batched=True, batch_size=batch_size, **options)


def _standard(message: dict[str, Any], role_of: dict[str, str]) -> dict[str, Any]:
    role = message.get("from") if message.get("role") is None else message["role"]
    content = message.get("value") if message.get("content") is None else message["content"]
    if role not in role_of:
        raise BadInput(
            f"a message is from {role!r}, which is none of {', '.join(role_of)}; name it in"
            " aliases_for_user, aliases_for_assistant or aliases_for_system."
        )
    return {"role": role_of[role], "content": content}


def to_sharegpt(
    dataset: Any,
    merged_prompt: str = "",
    merged_column_name: str = "instruction",
    output_column_name: str = "output",
    remove_unused_columns: bool = True,
    conversation_extension: int = 1,
    random_state: int = 3407,
) -> Any:
    """Rows of columns as conversations of one question and one answer, or of several rows' turns.

    Args:
        dataset: with the columns that are named below.
        merged_prompt: the question, with ``{column}`` in it; ``[[...]]`` is left out where a column in it is
            empty. Empty: the column ``merged_column_name`` is the question.
        merged_column_name: the question's column where there is no ``merged_prompt``.
        output_column_name: the answer's column.
        remove_unused_columns: keep the conversations alone.
        conversation_extension: turns of a conversation, each of another row, drawn by ``random_state``.
        random_state: seed of that.

    Returns:
        The data set with a column "conversations" of ``from`` ("human", "gpt") and ``value``.

    Raises:
        BadInput: a column that is not there.
    """
    if conversation_extension < 1:
        raise BadInput(f"conversation_extension is {conversation_extension}; it must be at least 1.")
    prompt = merged_prompt or "{" + merged_column_name + "}"
    names = _column_names(dataset)
    for name in (*_FIELD.findall(prompt), output_column_name):
        if name not in names:
            raise BadInput(
                f"to_sharegpt needs a column {name}, and the data set has {', '.join(names)}; correct the"
                " name in"
                " merged_prompt, merged_column_name or output_column_name."
            )

    def converse(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        rows = [
            dict(zip(batch, values, strict=True)) for values in zip(*(batch[n] for n in batch), strict=True)
        ]
        return {_COLUMN: [_turn(prompt, row, row[output_column_name]) for row in rows]}

    removed = [name for name in names if name != _COLUMN] if remove_unused_columns else None
    conversations = dataset.map(converse, batched=True, remove_columns=removed)
    if conversation_extension == 1:
        return conversations
    drawn = random.Random(random_state)
    orders = [list(range(len(conversations))) for _ in range(conversation_extension - 1)]
    for order in orders:
        drawn.shuffle(order)
    talks = conversations[_COLUMN]

    def extend(row: dict[str, Any], index: int) -> dict[str, Any]:
        more = [message for order in orders for message in talks[order[index]]]
        return {_COLUMN: [*row[_COLUMN], *more]}

    return conversations.map(extend, with_indices=True)


def _turn(prompt: str, row: dict[str, Any], answer: Any) -> list[dict[str, str]]:
    def optional(match: re.Match[str]) -> str:
        inner = match.group(1)
        return inner if all(_said(row[name]) for name in _FIELD.findall(inner)) else ""

    question = _FIELD.sub(lambda m: _said(row[m.group(1)]), _OPTIONAL.sub(optional, prompt))
    return [{"from": "human", "value": question}, {"from": "gpt", "value": _said(answer)}]


def _said(value: Any) -> str:
    return "" if value is None else str(value)


def _column_names(dataset: Any) -> list[str]:
    names = getattr(dataset, "column_names", None)
    if not isinstance(names, list):
        raise BadInput(
            "a data set with rows of named columns is needed; of a DatasetDict take one split, as in"
            ' dataset["train"].'
        )
    return names


def _has_length(dataset: Any) -> bool:
    return hasattr(dataset, "__len__")
