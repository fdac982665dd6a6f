"""Finding things in a Hugging Face model: its family's `ModelSpec`, and what that names in this very model.

The specs themselves are in `fewbits.families`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from fewbits.errors import SpecMismatch, Unsupported
from fewbits.families.registry import is_registered, known_families, model_type_of, written_spec
from fewbits.families.spec import ModelSpec
from fewbits.host.generic import generic_spec
from fewbits.host.spec_check import check_spec
from fewbits.host.unwrap import unwrap

_FITS: WeakKeyDictionary[nn.Module, ModelSpec] = WeakKeyDictionary()  # registered specs that fit their models


def spec_for(model_or_config: Any) -> ModelSpec:
    """The spec of a model or of its config.

    A model whose family nobody wrote a spec for gets a generic one, read from its modules
    (`fewbits.host.generic`); a config alone cannot.

    Raises:
        Unsupported: there is none for this model_type, and the model's modules do not tell one; the message
            says what is missing.
        SpecMismatch: a user's own spec does not fit this model; the message says where.
    """
    spec = written_spec(model_or_config)
    if spec is not None:
        if isinstance(model_or_config, nn.Module) and is_registered(spec):
            _check_once(model_or_config, spec)
        return spec
    if isinstance(model_or_config, nn.Module) and model_type_of(model_or_config):
        return generic_spec(model_or_config, model_type_of(model_or_config))
    raise Unsupported(
        f"no spec for model_type {model_type_of(model_or_config)!r}; known: {', '.join(known_families())}. "
        "Write one and call fewbits.register_family, or give the model itself, whose modules may tell."
    )


def _check_once(model: nn.Module, spec: ModelSpec) -> None:
    """Compare a user's spec with a model where the two first meet, for each generation asks for the spec."""
    base = unwrap(model)
    if _FITS.get(base) is not spec:
        check_spec(model, spec, locate(model, spec, spec.layers))
        _FITS[base] = spec


def path_prefix(model: nn.Module, spec: ModelSpec) -> tuple[str, int]:
    """How paths of this very model differ from the spec's: (text to put before, characters to take off).

    A model with a head has the spec's own paths; without one ("LlamaModel") the first part is missing; inside
    a PeftModel "base_model.model." stands before.

    Raises:
        SpecMismatch: the model has its layers nowhere that the spec knows.
    """
    cut = len(spec.layers.partition(".")[0]) + 1
    for before, skip in (("", 0), ("base_model.model.", 0), ("", cut), ("base_model.model.", cut)):
        if _has(model, before + spec.layers[skip:]):
            return before, skip
    raise SpecMismatch(
        f"the spec of {spec.model_type!r} expects decoder layers at {spec.layers!r} and "
        f"{type(model).__name__} has none there; give the model itself, not a part or a wrapper of it."
    )


def locate(model: nn.Module, spec: ModelSpec, path: str) -> str:
    """The full name in ``model`` of what the spec calls ``path``."""
    before, skip = path_prefix(model, spec)
    return before + path[skip:] if path.startswith(spec.layers[:skip]) else before + path


def layer_names(model: nn.Module, spec: ModelSpec) -> Iterator[str]:
    """Full name of each decoder layer, in order."""
    layers = locate(model, spec, spec.layers)
    for i in range(len(model.get_submodule(layers))):  # type: ignore[arg-type]
        yield f"{layers}.{i}"


def find(model: nn.Module, name: str) -> nn.Module | None:
    """The submodule with this full name, or None."""
    return model.get_submodule(name) if _has(model, name) else None


def _has(model: nn.Module, name: str) -> bool:
    try:
        return isinstance(model.get_submodule(name), nn.Module)
    except AttributeError:
        return False
