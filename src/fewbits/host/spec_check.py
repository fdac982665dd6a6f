"""Whether a spec that a user registered names what a model has, and all of it.

fewbits' own specs are compared with their families by tests. A user's spec meets its model for the first time
here: a linear under another name would otherwise be packed by nobody and adapted by nobody, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fewbits.errors import SpecMismatch
from fewbits.families.spec import ModelSpec
from fewbits.host.generic import linear_paths, routers
from fewbits.host.unwrap import unwrap

_SHOWN = 4


def check_spec(model: nn.Module, spec: ModelSpec, layers: str) -> None:
    """Refuse a spec that does not fit ``model``.

    Args:
        model: of the family, converted or not, with or without adapters.
        spec: as registered.
        layers: full name of the decoder layers in this very model.

    Raises:
        SpecMismatch: the first thing that does not fit, by the spec's field and its value.
    """
    modules = model.get_submodule(layers)
    if not isinstance(modules, nn.ModuleList) or not len(modules):
        raise _wrong(
            spec,
            f"names its layers as {spec.layers!r}, which is a {type(modules).__name__}",
            "it must be a list of layers",
        )
    for fault, need in (*_ends(unwrap(model), spec), *_inside(modules, spec), *_numbers(unwrap(model), spec)):
        raise _wrong(spec, fault, need)


def _wrong(spec: ModelSpec, fault: str, need: str) -> SpecMismatch:
    return SpecMismatch(
        f"the registered spec of {spec.model_type!r} {fault}; {need}. Correct it, and call"
        " fewbits.register_family(spec, replace=True)."
    )


def _ends(base: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Faults outside the layers, each with what is needed."""
    for field, path, getter in (
        ("embed", spec.embed, "get_input_embeddings"),
        ("head", spec.head, "get_output_embeddings"),
    ):
        real = _asked(base, getter)
        if real is not None and not any(module is real for module in _at(base, spec, path)):
            name = next((name for name, module in base.named_modules() if module is real), "?")
            yield f"has {field}={path!r}", f"the model's own is {name!r}"
    if spec.final_norm is not None and (
        not _at(base, spec, spec.final_norm) or spec.final_norm.startswith(f"{spec.layers}.")
    ):
        yield f"has final_norm={spec.final_norm!r}", "it must be the norm behind the last layer"
    for path in spec.towers:
        if not _at(base, spec, path) or f"{spec.layers}.".startswith(f"{path}."):
            yield f"names a tower {path!r}", "it must be a module beside the text's layers"


def _asked(base: nn.Module, getter: str) -> nn.Module | None:
    try:
        module = getattr(base, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return module if isinstance(module, nn.Module) else None


def _at(base: nn.Module, spec: ModelSpec, path: str) -> list[nn.Module]:
    """What stands at a path of the spec, in a model with its head or without."""
    modules = dict(base.named_modules())
    cut = path.partition(".")[2] if path.partition(".")[0] == spec.layers.partition(".")[0] else path
    modules_there = [modules[name] for name in dict.fromkeys((path, cut)) if name in modules]
    return [getattr(module, "original_module", module) for module in modules_there] + modules_there


def _inside(layers: nn.ModuleList, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Faults inside the layers: names that no layer has, linears that nothing names."""
    have = {path for layer in layers for path, _ in layer.named_modules()}
    linears = {path for layer in layers for path in linear_paths(layer)}
    experts = spec.experts
    whole = ("",) if experts is None else (f"{experts.path}.", experts.router)
    for path in (*spec.linears, *(path for path, _ in spec.left)):
        if path not in linears and path not in spec.some_layers:
            yield f"names a linear {path!r}", "no layer has that linear"
    for path in spec.norms:
        if path not in have and not (path in (spec.norm.query, spec.norm.key) and spec.norm.query_key_if):
            yield f"names a norm {path!r}", "no layer has that"
    for half in (spec.attention, spec.mlp):
        if half is not None and half.path and not half.output.startswith(f"{half.path}."):
            yield (
                f"has {type(half).__name__}.path={half.path!r}",
                f"it must be the module that holds {half.output!r}",
            )
    if experts is not None and experts.path not in have:
        yield f"names experts {experts.path!r}", "no layer has that"
    named = {*spec.linears, *(path for path, _ in spec.left), *(path for m in layers for path in routers(m))}
    others = [path for path in sorted(linears - named) if experts is None or not path.startswith(whole)]
    if others:
        yield (
            f"names no {', '.join(others[:_SHOWN])}{' and more' if others[_SHOWN:] else ''}",
            "every linear of a layer must be in attention, mlp or other_linears, or with a reason in left",
        )


def _numbers(base: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Fields that the spec names and the model's config has not."""
    config: Any = getattr(base, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    named = {
        name: getattr(spec, name)
        for name in (
            "embedding_multiplier",
            "residual_multiplier",
            "logits_divisor",
            "logits_multiplier",
            "logits_soft_cap",
        )
    }
    for owner, fields in (
        (spec.attention, ("soft_cap", "multiplier", "rotary_layers")),
        (spec.mlp, ("activation", "width")),
        (spec.norm, ("query_key_if",)),
        (spec.experts, ("count", "chosen", "width")),
    ):
        if owner is not None:
            named |= {f"{type(owner).__name__}.{name}": getattr(owner, name) for name in fields}
    for where, field in named.items():
        if field is not None and config is not None and not hasattr(config, field):
            yield f"has {where}={field!r}", "the model's config.json has no such field"


__all__ = ["check_spec"]
