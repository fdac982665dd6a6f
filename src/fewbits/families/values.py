"""Whether the words and numbers of a spec can be true of any model, before one is there to compare with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fewbits.errors import BadInput
from fewbits.families import spec as classes
from fewbits.families.spec import ModelSpec

_WORDS = {
    str: "a text",
    bool: "True or False",
    float: "a number",
    classes.Norms: "a Norms",
    classes.Attention: "an Attention",
    classes.MLP: "an MLP",
    classes.Experts: "an Experts",
}


def check_values(spec: ModelSpec) -> None:
    """Refuse a spec whose values are of other kinds than its fields.

    Raises:
        BadInput: one is; the message names the field, its value and what it must be.
    """
    for where, value, hint in _fields(spec, "ModelSpec"):
        need = _why_not(value, hint)
        if need:
            raise BadInput(f"{where} is {value!r}; it must be {need}.")
    if spec.generic:
        raise BadInput("ModelSpec.generic marks specs that nobody wrote; leave it out of yours.")
    if spec.attention is not None and len(spec.attention.inputs) not in (1, 3):
        raise BadInput(
            f"Attention.inputs names {len(spec.attention.inputs)} linears; name those of queries, keys and"
            " values in this order, or the one that holds all three."
        )
    if spec.mlp is not None and len(spec.mlp.inputs) not in ((1, 2) if spec.mlp.is_gated else (1,)):
        raise BadInput(
            f"MLP.inputs names {len(spec.mlp.inputs)} linears; name those of gate and up, or the one that"
            " holds both; without a gate (is_gated=False) the only one."
        )


def _fields(value: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Where, what, and of which type, for each field of a spec and of the values in it."""
    hints = get_type_hints(type(value), vars(classes))
    for item in dataclasses.fields(value):
        inner = getattr(value, item.name)
        yield f"{name}.{item.name}", inner, hints[item.name]
        if dataclasses.is_dataclass(inner) and isinstance(
            inner, get_args(hints[item.name]) or hints[item.name]
        ):
            yield from _fields(inner, type(inner).__name__)


def _why_not(value: Any, hint: Any) -> str:
    """What a field of this type must be, if ``value`` is not that; else ""."""
    if get_origin(hint) is Literal:
        return "" if value in get_args(hint) else " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        return "" if _is_tuple(value, get_args(hint)) else "a tuple, of texts or of pairs of texts"
    kinds = get_args(hint) or (hint,)
    if isinstance(value, kinds) or (hint is float and type(value) is int):
        return ""
    return " or ".join("None" if kind is type(None) else _WORDS[kind] for kind in kinds)


def _is_tuple(value: Any, inside: tuple[Any, ...]) -> bool:
    if not isinstance(value, tuple):
        return False
    if get_origin(inside[0]) is tuple:  # pairs
        return all(_is_tuple(pair, (str, ...)) and len(pair) == len(get_args(inside[0])) for pair in value)
    return all(isinstance(text, str) for text in value)


__all__ = ["check_values"]
