"""Rows of the preference methods: which columns they need, and texts as chats where a template is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np

from fewbits.errors import BadInput
from fewbits.training.config import REWARDED, TrainConfig
from fewbits.training.data.chat import TEXT_METHOD, normalize_messages, refuse_pictures
from fewbits.training.data.rows import BadRows
from fewbits.training.data.sources import Source, read_source, sources_of

_PAIRS = ("prompt", "chosen", "rejected")
NEEDED = {
    "dpo": _PAIRS,
    "orpo": _PAIRS,
    "cpo": _PAIRS,
    "simpo": _PAIRS,
    "reward": ("chosen", "rejected"),
    "kto": ("prompt", "completion", "label"),
    "grpo": ("prompt",),
    "rloo": ("prompt",),
}
_OPTIONAL = {"reward": ("prompt",)}
_ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant", "completion": "assistant"}


def preference_rows(
    config: TrainConfig, data: Any, splits: tuple[str, ...] = ("train",)
) -> list[dict[str, Any]]:
    """The rows of all places, as often as their weights say, with the method's columns; of grpo and rloo all.

    Raises:
        BadInput: a column is missing, or holds something else than a text, a list of messages, or a label.
    """
    rows = []
    for number, source in enumerate(sources_of(data)):
        of_source = _rows_of(source, source.settings(config), splits)
        count = max(1, round(len(of_source) * source.weight))
        rows += of_source * (count // len(of_source))
        drawn = np.random.default_rng([config.seed, 5, number]).permutation(len(of_source))
        rows += [of_source[i] for i in sorted(drawn[: count % len(of_source)].tolist())]
    return rows


def _rows_of(source: Source, config: TrainConfig, splits: tuple[str, ...]) -> list[dict[str, Any]]:
    bad = BadRows(skip=config.skip_bad_rows)
    rows = []
    for row in read_source(source, bad, splits=splits):
        try:
            rows.append(_row(config, row.values))
        except BadInput as error:
            bad.refuse(f"{source}, row {row.number}: {error}", error)
    if not rows:
        raise BadInput(f"{source} has no row that {config.method} can use; give one with {_needs(config)}.")
    return rows


def check_columns(config: TrainConfig, values: dict[str, Any], where: str) -> None:
    """Refuse a row that the method cannot use.

    Raises:
        BadInput: a column is missing or holds something else; ``where`` begins the sentence.
    """
    try:
        _row(config, values)
    except BadInput as error:
        raise BadInput(f"{where}: {error}.") from error


def _needs(config: TrainConfig) -> str:
    return ", ".join(NEEDED[config.method])


def _row(config: TrainConfig, values: dict[str, Any]) -> dict[str, Any]:
    refuse_pictures(values, TEXT_METHOD)
    named: dict[str, Any] = {}
    for role in (*NEEDED[config.method], *_OPTIONAL.get(config.method, ())):
        column = config.fields.get(role, role)
        if column not in values:
            if role in _OPTIONAL.get(config.method, ()):
                continue
            raise BadInput(
                f"the row has the columns {', '.join(map(str, values))}, but {config.method} needs"
                f" {_needs(config)}; name your columns with fields, as in fields.{role}=question"
            )
        named[role] = _value(config, role, values[column])
    kinds = {isinstance(value, list) for role, value in named.items() if role != "label"}
    if len(kinds) > 1:
        raise BadInput("some of the row's parts are texts and some lists of messages; write all the same way")
    if config.method in REWARDED:
        columns = {config.fields.get("prompt", "prompt")}
        return {**{k: v for k, v in values.items() if k not in columns}, **named}
    return named


def _value(config: TrainConfig, role: str, value: Any) -> Any:
    if role == "label":
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        raise BadInput(f"the row's label is {value!r}; it must be true or false")
    if isinstance(value, str) and value.strip():
        if config.chat_template is None:
            return value
        return [{"role": _ROLES[role], "content": value}]
    if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
        return normalize_messages(value, TEXT_METHOD)
    raise BadInput(f"the row's {role} is neither a text nor a list of messages with a role and a content")
