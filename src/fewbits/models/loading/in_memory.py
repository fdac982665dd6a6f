"""`convert` and `restore` for a model in memory, so that it can be saved afterwards as what it then is.

They are `fewbits.models.packing.convert`'s, and tell transformers besides whether the model is quantised:
without that, ``save_pretrained`` would write packed tensors under a config.json that knows nothing of them.
The same
for a stochastic configuration: `apply_stochastic`; `restore` undoes that as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn

from fewbits.errors import BadInput
from fewbits.formats.stochastic import stochastic_options
from fewbits.host.conversion import conversion_of
from fewbits.host.receipt import Receipt
from fewbits.models.packing import convert as modules
from fewbits.models.packing.changes import loaded_change
from fewbits.models.packing.packed import recipe_of
from fewbits.models.packing.split_experts import split_unless_refused
from fewbits.models.stochastic import in_model as stochastic
from fewbits.models.undo import undo
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import Recipe, get_recipe
from fewbits.recipes.stochastic_config import StochasticConfig


def convert(
    model: nn.Module,
    recipe: str | Recipe | Mapping[str, Any] | StochasticConfig,
    *,
    strict: bool = False,
    keep_original: bool = False,
    fuse_norms: bool = True,
    build: modules.Builder | None = None,
) -> Receipt:
    """Put ``recipe`` (its name, a value, or plain data) into ``model``, in place; `restore` undoes it.

    Arguments, result and errors are those of `fewbits.models.packing.convert.convert`. A model with packed
    weights is then saved by its own ``save_pretrained`` as a packed checkpoint. A `StochasticConfig` says of
    every layer how it is computed and is put in by `apply_stochastic`; it has no ``strict`` and no ``build``.

    Raises:
        BadInput: ``strict`` or ``build`` beside a `StochasticConfig`.
    """
    if isinstance(recipe, StochasticConfig):
        if strict or build is not None:
            raise BadInput(
                "a stochastic configuration is always checked, and builds its own layers; leave "
                "strict and build out."
            )
        return apply_stochastic(model, recipe, keep_original=keep_original, fuse_norms=fuse_norms)
    recipe = get_recipe(recipe)
    runs_in_streams = stochastic_options(recipe.linear.weight) is not None and recipe.qat is None
    left: Callable[[str], bool] = lambda path: recipe.rule_for(f"{path}.down_proj").is_plain  # noqa: E731
    with split_unless_refused(model, left) if runs_in_streams else nullcontext():
        receipt = modules.convert(
            model, recipe, strict=strict, keep_original=keep_original, fuse_norms=fuse_norms, build=build
        )
    mark_packed(model, recipe)
    return receipt


def restore(model: nn.Module) -> Receipt:
    """Take out all that fewbits has put into this model, in place; it is then saved as a plain checkpoint.

    Whatever put it there: `convert`, `fuse`, `choose_cache`, `fewbits.host.attention.use_attention` and the
    like (`fewbits.models.undo`). Modules of the original classes come back
    (`fewbits.models.packing.convert.restore` says with which weights), the layers' own forwards, and the
    host's attention; adapters stay.

    Raises:
        Unsupported: there is nothing to take out.
    """
    from fewbits.models.loading.hf_quantizer import detach

    receipt = undo(model)
    detach(model)
    return receipt


def apply_stochastic(
    model: nn.Module,
    config: StochasticConfig,
    *,
    train: bool = False,
    keep_original: bool = False,
    fuse_norms: bool = True,
) -> Receipt:
    """Run ``model`` under stochastic computing as ``config`` says, in place; `restore` undoes it.

    What `convert` does with such a configuration, and ``train`` besides.

    Arguments, result and errors are those of `fewbits.models.stochastic.in_model.put_in`. The model's own
    ``save_pretrained`` then writes the prepared weights and the configuration.
    """
    receipt = stochastic.put_in(
        model, config, train=train, keep_original=keep_original, fuse_norms=fuse_norms
    )
    mark_packed(model)
    return receipt


def mark_packed(model: nn.Module, recipe: Recipe | None = None) -> None:
    """Let transformers know of the packed weights in ``model``, if there are any.

    Args:
        model: a model of transformers.
        recipe: what packed it; None: what its layers say, under the name of the recipe of its conversion.
    """
    from fewbits.models.loading.hf_quantizer import attach_recipe

    if not hasattr(model, "save_pretrained") or not any(
        isinstance(module, QuantizedLinear) for module in model.modules()
    ):
        return
    if recipe is None:
        state = conversion_of(model)
        recipe = recipe_of(model, name="packed" if state is None else state.recipe.name)
    attach_recipe(model, recipe)


def mark_loaded(model: nn.Module, name: str) -> None:
    """Tell transformers and ourselves what a model with packed layers is: packed, by what its layers say.

    Args:
        model: a model of transformers whose linears were replaced one by one, not by `convert`.
        name: of its recipe.
    """
    packed = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    recipe = recipe_of(model, name=name)
    receipt = modules.convert(model, recipe)
    receipt.left = [left for left in receipt.left if left.name not in packed]
    receipt.changes[:0] = [loaded_change(n, layer) for n, layer in packed.items()]
    mark_packed(model, recipe)
