"""The patterns of a recipe beside the names of a model: one that names nothing is refused, not ignored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fewbits.errors import BadInput
from fewbits.families.registry import family_of, known_families
from fewbits.families.spec import ModelSpec
from fewbits.host.expert_weights import weights_of
from fewbits.host.spec import layer_names, spec_for
from fewbits.host.transposed import is_conv1d
from fewbits.models.packing.model_shapes import model_of_config
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.linear import LowPrecisionLinear, QuantizedLinear
from fewbits.recipes import Recipe

# What chooses experts in transformers' families without a spec, for recipes that several families share.
_ROUTERS_WITHOUT_SPEC = (
    *("mlp.shared_expert_gate", "mlp.router", "mlp.router.gate"),
    *("block_sparse_moe.gate", "block_sparse_moe.router.layer"),
    *("feed_forward.gate", "feed_forward.router"),
)
_LINEARS = (nn.Linear, QuantizedLinear, LowPrecisionLinear, FakeQuantizedLinear)


def unmatched_patterns(
    model: nn.Module, spec: ModelSpec, recipe: Recipe, *, loaded: bool = False
) -> list[str]:
    """Sentences for the receipt about patterns of ``recipe`` that name linears of other models alone.

    A recipe may be written for several families: a pattern that names a linear of another one is said in the
    receipt. A pattern that names no linear of any family is a slip, which would leave a layer in another
    format than its author meant.

    Args:
        model: converted or not, also on the meta device.
        spec: of ``model``.
        recipe: whose ``overrides`` and ``skip`` are looked at. What ``skip`` names may also be another
            module, such as a norm, which stays as it is anyway.
        loaded: the recipe comes with packed weights that it was applied to before; nothing is refused.

    Raises:
        BadInput: a pattern names no linear of this model nor of any family with a spec; the message has the
            nearest pattern that does.
    """
    overrides = [pattern for pattern, _ in recipe.overrides]
    if not overrides and not recipe.skip:
        return []
    names = set(_linear_names(model))
    modules = {name for name, module in model.named_modules() if next(module.children(), None) is None}
    unmatched = [pattern for pattern in overrides if not _names_one(pattern, names)]
    unmatched += [pattern for pattern in recipe.skip if not _names_one(pattern, names | modules)]
    if not unmatched:
        return []
    elsewhere = _names_in_families(len([*layer_names(model, spec)]))
    for pattern in () if loaded else unmatched:
        if not _names_one(pattern, elsewhere):
            near = _nearest(pattern, names)
            advice = f"the nearest is {near!r}" if near else f"one is named {min(names)!r}"
            raise BadInput(
                f"no linear is named {pattern!r}, which recipe {recipe.name!r} has a rule for; {advice}: "
                "correct it or take it out."
            )
    return [f"no linear of this model is named {p!r}, which the recipe has a rule for" for p in unmatched]


def check_patterns(config: Mapping[str, Any], recipe: Recipe) -> None:
    """The same before anything is loaded, for what is only predicted.

    Args:
        config: the mapping in config.json; of a packed folder nothing is refused.
        recipe: as for `unmatched_patterns`.

    Raises:
        BadInput: a pattern names no linear; or transformers can build no model of this configuration.
    """
    model = model_of_config(config)
    unmatched_patterns(model, spec_for(model), recipe, loaded="quantization_config" in config)


def _linear_names(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, _LINEARS) or is_conv1d(module):
            yield name
        for weight in weights_of(module):
            yield f"{name}.{weight}"


def _names_one(pattern: str, names: set[str]) -> bool:
    return pattern in names or any(fnmatchcase(name, pattern) for name in names)


def _names_in_families(num_layers: int) -> set[str]:
    """Names that linears, heads and embeddings have in a model of this depth, in all families with a spec.

    Also those of routers in families without one.
    """
    names: set[str] = set()
    for spec in filter(None, map(family_of, known_families())):
        names |= {spec.head, spec.embed, *(f"{tower}.linear" for tower in spec.towers)}
        inside = {*spec.linears, *(path for path, _ in spec.left), *_ROUTERS_WITHOUT_SPEC}
        if spec.experts is not None:
            inside |= {f"{spec.experts.path}.{weight}" for weight in ("gate_up_proj", "up_proj", "down_proj")}
            inside.add(spec.experts.router)
        names |= {f"{spec.layers}.{i}.{path}" for path in inside for i in range(num_layers)}
    return names


def _nearest(pattern: str, names: set[str]) -> str | None:
    """The pattern most like this one that names a linear, or None."""
    for wider in (f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*"):
        if _names_one(wider, names):
            return wider
    likely = set(names)
    for name in names:
        parts = name.split(".")
        likely |= {"*." + ".".join(parts[-count:]) for count in range(1, min(len(parts), 4))}
        likely.add(".".join("*" if part.isdigit() else part for part in parts))
    near = get_close_matches(pattern, sorted(likely), n=1)
    return near[0] if near else None
