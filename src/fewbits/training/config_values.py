"""Values of a configuration as their fields have them: from YAML, or from the command line's texts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from fewbits.errors import BadInput
from fewbits.yaml_text import mapping_in, parse_yaml

# The same for every layer, where a budget in GiB would choose layer by layer.
MEMORY_BUDGETS = ("auto", "keep", "recompute", "offload")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def _as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in (*_TRUE, *_FALSE):
        raise ValueError
    return text in _TRUE


def _as_int(value: Any) -> int:
    if isinstance(value, bool) or float(value) != int(float(value)):
        raise ValueError
    return int(float(value))


def _as_float(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError
    return float(value)


def _as_texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(str(part) for part in value)


def _as_ints(value: Any) -> tuple[int, ...]:
    return tuple(_as_int(part) for part in (_as_texts(value) if isinstance(value, str) else value))


def _as_fields(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        value = dict(pair.split("=", 1) for pair in value.split(","))
    return {str(key): str(column) for key, column in dict(value).items()}


def _as_ranks(value: Any) -> dict[str, int]:
    if isinstance(value, str):
        value = dict(pair.split("=", 1) for pair in value.split(","))
    ranks = {str(key): _as_int(rank) for key, rank in dict(value).items()}
    if any(rank < 1 for rank in ranks.values()):
        raise ValueError
    return ranks


def _as_text(value: Any) -> str:
    if isinstance(value, (dict, list, bool)):
        raise ValueError
    return str(value)


def _as_recipe(value: Any) -> Any:
    """A name, a mapping (as such, as a text of YAML, or in a file), or a `Recipe`, left to the caller."""
    if isinstance(value, str) and (written := mapping_in(value, "the recipe")) is not None:
        value = written
    if dataclasses.is_dataclass(value):
        return value
    if not isinstance(value, Mapping):
        return _as_text(value)
    if not isinstance(value.get("name"), str):
        raise ValueError
    plain: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
    return plain


def _as_sources(value: Any) -> str | list[Any]:
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):  # a list on the command line
        value = parse_yaml(value, "the data")
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return _as_text(value)
    if not all(isinstance(entry, (str, os.PathLike, Mapping)) for entry in value):
        raise ValueError
    plain: list[Any] = json.loads(json.dumps(list(value), allow_nan=False, default=os.fspath))
    return plain


def check_combinations(config: Any) -> None:
    """Refuse settings that mean nothing beside one another."""
    _check_schedule(config)
    _check_words_of_sft(config)


def _check_schedule(config: Any) -> None:
    """Refuse a schedule beside the optimizer that needs none."""
    if config.optimizer == "schedule_free" and config.scheduler not in ("constant", "constant_with_warmup"):
        raise BadInput(
            f"optimizer is schedule_free, and scheduler is {config.scheduler}; set scheduler to constant or"
            " constant_with_warmup: it needs no other."
        )


def _check_words_of_sft(config: Any) -> None:
    """Refuse what method sft would pass by.

    Raises:
        BadInput: a word of another method is set.
    """
    for name in ("beta", "rewards", "num_generations", "max_completion_length"):
        value = getattr(config, name)
        if config.method == "sft" and value not in (None, ()):
            whose = "the preference methods" if name == "beta" else "methods grpo and rloo"
            raise BadInput(
                f"{name} is {shown(value)}, which is of {whose}, and this run has method sft; set method."
            )


def shown(value: Any) -> str:
    """A value in a sentence, however long it is."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_COERCE = {
    "bool": (_as_bool, "true or false"),
    "int": (_as_int, "a whole number"),
    "float": (_as_float, "a number"),
    "str": (_as_text, "a text"),
    "str | dict[str, Any]": (
        _as_recipe,
        "a recipe's name, a file, or a mapping of plain values with a field name",
    ),
    "str | list[Any]": (_as_sources, "a path, or a list of paths and mappings with a path"),
    "tuple[str, ...]": (_as_texts, "a list of texts"),
    "tuple[int, ...]": (_as_ints, "a list of whole numbers"),
    "dict[str, int]": (_as_ranks, "a mapping of names to whole numbers above 0"),
    "dict[str, str]": (_as_fields, "a mapping of names to columns"),
}


def coerce(name: str, value: Any, annotation: str) -> Any:
    """The value as a field of this type holds it.

    Raises:
        BadInput: it is none of that type.
    """
    optional = annotation.endswith(" | None")
    if value is None or (optional and name != "lora_bias" and str(value).lower() in ("none", "null", "")):
        if optional:
            return None
        raise BadInput(f"{name} has no value; it must be {_COERCE[annotation][1]}.")
    convert, need = _COERCE[annotation.removesuffix(" | None")]
    try:
        return convert(value)
    except BadInput:
        raise  # a sentence of its own
    except (TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"{name} is {shown(value)}; it must be {need}.") from error


def parse_overrides(overrides: Mapping[str, Any] | Iterable[str]) -> dict[str, Any]:
    """``["lr=1e-4", "packing=true"]`` as a mapping."""
    if isinstance(overrides, Mapping):
        return dict(overrides)
    parsed = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise BadInput(f"the override {text!r} has no value; write it as name=value.")
        parsed[key.strip().removeprefix("--")] = value.strip()
    return parsed


def parse_memory_budget(text: str) -> str | float:
    """One of `MEMORY_BUDGETS`, or a number of GiB.

    Raises:
        BadInput: it is neither.
    """
    if text in MEMORY_BUDGETS:
        return text
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise BadInput(
            f"memory_budget is {text!r}; it must be a number of GiB or one of {', '.join(MEMORY_BUDGETS)}."
        )
    return gib
