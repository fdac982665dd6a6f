"""Finding the spec of a family by its ``model_type``, and adding one from your own code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fewbits.errors import BadInput
from fewbits.families.catalog import SPECS
from fewbits.families.spec import ModelSpec
from fewbits.families.values import check_values

_REGISTERED: dict[str, ModelSpec] = {}  # what the user's own code has added, by calling `register_family`


def register_family(spec: ModelSpec, *, replace: bool = False) -> None:
    """Make a family known to this process: ``spec`` describes models of its ``model_type`` from now on.

    Args:
        spec: the family as data; often ``dataclasses.replace(LLAMA, model_type=...)``.
        replace: take the place of a spec that the name has already, fewbits' own ones included.

    Raises:
        BadInput: it is no spec, a value in it is of another kind than its field, it names no model_type or no
            linears, or the name has a spec already and ``replace`` is False. Whether its paths are those of
            a model is seen where it meets one: `SpecMismatch`.
    """
    if not isinstance(spec, ModelSpec):
        raise BadInput(
            f"register_family takes a fewbits.ModelSpec, and this is a {type(spec).__name__}; write one with "
            "the paths of the family's modules."
        )
    check_values(spec)
    if not spec.model_type or not spec.linears:
        raise BadInput("a spec needs a model_type and the paths of the linears inside a layer; add them.")
    if family_of(spec.model_type) is not None and not replace:
        raise BadInput(
            f"there is a spec for {spec.model_type!r} already; pass replace=True to have yours in its place."
        )
    _REGISTERED[spec.model_type] = spec


def model_type_of(model_or_config: Any) -> str:
    """The ``model_type`` of a model, or of a config (an object or plain data); "" if it names none."""
    config = getattr(model_or_config, "config", model_or_config)
    if isinstance(config, Mapping):
        return str(config.get("model_type", ""))
    return str(getattr(config, "model_type", ""))


def written_spec(model_or_config: Any) -> ModelSpec | None:
    """The spec that somebody wrote for this model or config: fewbits, or the user; None without one."""
    return family_of(model_type_of(model_or_config))


def family_of(model_type: str) -> ModelSpec | None:
    """The spec that somebody wrote for this ``model_type``: the user's own, else fewbits'; else None."""
    return _REGISTERED.get(model_type) or SPECS.get(model_type)


def is_registered(spec: ModelSpec) -> bool:
    """Whether a user's own code registered this very spec."""
    return _REGISTERED.get(spec.model_type) is spec


def known_families() -> list[str]:
    """The ``model_type`` of every family with a written spec, in alphabetical order."""
    return sorted({*SPECS, *_REGISTERED})
