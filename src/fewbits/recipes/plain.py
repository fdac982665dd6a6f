"""Recipes as plain data, for YAML, JSON and config.json, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import isfinite
from typing import Any, TypeVar

from fewbits.errors import BadInput
from fewbits.formats import format_to_config, get_format
from fewbits.formats.base import Format
from fewbits.formats.kv_cache import KVCache, get_kv_cache, kv_cache_to_config
from fewbits.recipes.catalog import CATALOG
from fewbits.recipes.recipe import QAT, LoRA, Recipe, Rule
from fewbits.yaml_text import mapping_in

T = TypeVar("T", Rule, LoRA, QAT)


def get_recipe(recipe: Recipe | str | Mapping[str, Any]) -> Recipe:
    """A recipe from its name, from plain data, from a file of plain data, or as it is.

    Plain data whose name is in the catalog changes that recipe: ``{"name": "qlora_nf4", "lora": {"r": 64}}``
    is `qlora_nf4` with rank 64. A text that begins with ``{`` is such a mapping in YAML or JSON, and one that
    ends in ``.yaml``, ``.yml`` or ``.json`` is the path of a file that holds one.

    Raises:
        BadInput: unknown name or field.
        Unsupported: a recipe that is not there yet.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str) and (written := mapping_in(recipe, "the recipe")) is not None:
        return recipe_from_config(written)
    if isinstance(recipe, str):
        if recipe not in CATALOG:
            names = ", ".join(CATALOG)
            raise BadInput(f"no recipe named {recipe!r}; known: {names}; or name a YAML or JSON file.")
        return CATALOG[recipe]()
    if not isinstance(recipe, Mapping):
        raise BadInput(f"{recipe!r} is not a recipe; give a name, a Recipe or a mapping.")
    return recipe_from_config(recipe)


def recipe_to_config(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain data, every field written: a later change of the catalog changes no saved model."""
    plain = _to_plain(recipe)
    assert isinstance(plain, dict)
    return plain


def recipe_from_config(config: Mapping[str, Any]) -> Recipe:
    """The inverse of `recipe_to_config`; what is left out comes from the catalog's recipe of that name.

    Raises:
        BadInput: unknown field, or a value of the wrong kind.
    """
    try:
        return _from_config(config)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        if isinstance(error, BadInput):
            raise
        reason = " ".join(str(error).split()).rstrip(".")
        raise BadInput(f"the recipe {config.get('name')!r} cannot be read ({reason}); correct it.") from error


def _from_config(config: Mapping[str, Any]) -> Recipe:
    name = config.get("name")
    if not isinstance(name, str):
        raise BadInput("a recipe needs a field 'name'; a name from the catalog supplies what is left out.")
    base = CATALOG[name]() if name in CATALOG else Recipe(name=name)
    _check_fields(Recipe, config, "")
    fields: dict[str, Any] = {}
    for key, value in config.items():
        if key == "overrides":
            pairs = _pairs(value)
            fields[key] = tuple((name, _rule(Rule(), rule, f"{key}, {name}")) for name, rule in pairs)
        elif key in ("linear", "head"):
            fields[key] = _rule(getattr(base, key), value, key)
        elif key == "lora":
            fields[key] = None if value is None else _replace(base.lora or LoRA(), value, key)
        elif key == "qat":
            fields[key] = None if value is None else _qat(base.qat, value)
        elif key in ("kv_cache", "communication"):
            fields[key] = (
                get_kv_cache(value) if key == "kv_cache" and value is not None else _format(value, key)
            )
        elif key == "skip":
            if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
                raise BadInput(f"the field 'skip' of a recipe is {value!r}; give a list of module names.")
            fields[key] = tuple(value)
        else:
            fields[key] = value
    return dataclasses.replace(base, **fields)


def _pairs(value: Any) -> list[Any]:
    """Patterns and their rules, from a list of pairs or, as one writes it in YAML, a mapping."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs
    ):
        raise BadInput(f"the field 'overrides' of a recipe maps patterns to rules; it is {value!r}.")
    return list(pairs)


def _to_plain(value: Any) -> Any:
    if isinstance(value, Format):
        return _to_plain(format_to_config(value))
    if isinstance(value, KVCache):
        return kv_cache_to_config(value)
    if dataclasses.is_dataclass(value):
        return {f.name: _to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_to_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _to_plain(v) for k, v in value.items()}
    return value


def _rule(base: Rule, config: Any, key: str) -> Rule:
    """``base`` with what ``config`` says; a format's name alone (``head: int8``) is the weight's."""
    return _replace(base, {"weight": config} if isinstance(config, str) else config, key)


def _qat(base: QAT | None, config: Any) -> QAT:
    if base is None:
        weight = _format(config.get("weight"), "qat.weight") if isinstance(config, Mapping) else None
        if weight is None:
            raise BadInput(
                "the field 'qat' of a recipe has no 'weight'; give the format to train for, as in"
                " {weight: int4_g32}."
            )
        base = QAT(weight=weight)
    return _replace(base, config, "qat")


def _replace(base: T, config: Any, where: str) -> T:
    """``base`` with the fields that ``config`` names; ``where`` is the recipe's key that holds it."""
    if not isinstance(config, Mapping):
        also = "a format's name or " if isinstance(base, Rule) else ""
        raise BadInput(f"'{where}' of a recipe is {config!r}; give {also}a mapping of its fields.")
    _check_fields(type(base), config, where)
    fields: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(base, LoRA):
            fields[key] = _lora_value(key, tuple(value) if isinstance(value, list) else value)
        else:
            fields[key] = _format(value, f"{where}.{key}")
    return dataclasses.replace(base, **fields)


def _format(value: Any, where: str) -> Format | None:
    """The format that the recipe's key ``where`` names; None stays None."""
    try:
        return None if value is None else get_format(value)
    except BadInput as error:
        raise BadInput(f"'{where}' of a recipe: {error}") from error


def _lora_value(key: str, value: Any) -> Any:
    """A value of a `LoRA` field, of the kind that the field has."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_text = isinstance(value, str)
    fits = {
        "r": type(value) is int and value > 0,
        "alpha": is_number and isfinite(value),
        "dropout": is_number and 0 <= value < 1,
        "targets": is_text or (isinstance(value, tuple) and all(isinstance(name, str) for name in value)),
        "bias": value in ("none", "all", "lora_only"),
        "rslora": isinstance(value, bool),
    }
    needs = {
        "r": "a whole number above 0",
        "alpha": "a number",
        "dropout": "a number from 0 to below 1",
        "targets": "a name, a list of names or all-linear",
        "bias": "none, all or lora_only",
        "rslora": "true or false",
    }
    if not fits[key]:
        raise BadInput(f"the field '{key}' of a recipe's lora is {value!r}; it must be {needs[key]}.")
    return value


def _check_fields(kind: Any, config: Mapping[str, Any], where: str) -> None:
    fields = [f.name for f in dataclasses.fields(kind)]
    unknown = sorted(str(key) for key in set(config) - set(fields))
    if unknown:
        place = f"'{where}' of a recipe" if where else f"a {kind.__name__}"
        raise BadInput(f"{place} has no field {', '.join(unknown)}; its fields: {', '.join(fields)}.")
