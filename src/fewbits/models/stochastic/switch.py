"""One Hugging Face model under many stochastic configurations in turn, without making it anew for each.

`Switched` prepares every linear once. Going on to another configuration touches only the layers whose setting
differs: lengths, thresholds and INT8 are set in place, and a weight is prepared again only where its codes
differ (smoothing, protected channels). What the model computes is, bit for bit, what it computes after
`fewbits.models.stochastic.in_model.put_in` of that configuration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from fewbits.errors import Unsupported
from fewbits.formats.stochastic import Stochastic
from fewbits.host.conversion import conversion_of
from fewbits.models.packing.convert import linears_to_replace
from fewbits.models.packing.split_experts import experts_split, split_unless_refused
from fewbits.models.stochastic.attention import (
    attentions_of,
    restore_stochastic_attention,
    stochastic_attention_of,
    use_stochastic_attention,
)
from fewbits.models.stochastic.in_model import (
    attention_products_of,
    prepared_linear,
    put_in,
    set_lengths,
    take_out,
)
from fewbits.nn.stochastic.linear import StochasticLinear
from fewbits.recipes.recipe import Recipe, Rule
from fewbits.recipes.stochastic_config import LinearSetting, StochasticConfig


class Switched:
    """A model under a configuration that can be exchanged; `close`, or the end of ``with``, undoes it.

    Attributes:
        model: the model.
        config: the configuration that it runs under.
        linears: full names of the linears that a configuration decides on, in the model's order.
        attentions: full names of the attention modules.
    """

    def __init__(self, model: nn.Module, config: StochasticConfig) -> None:
        """Put a first configuration in.

        Args:
            model: a Hugging Face model of a known family, in its original form.
            config: the configuration.

        Raises:
            Unsupported: the model is converted already.
            SpecMismatch, BadInput: the configuration does not fit the model.
        """
        if conversion_of(model) is not None:
            raise Unsupported("this model is converted already; call fewbits.restore first.")
        self.model = model
        with split_unless_refused(model, lambda path: config.linear(path).runs == "exact"):
            self.linears = linear_names(model, config.options)
            self.attentions = list(attentions_of(model))
            self._originals = {name: model.get_submodule(name) for name in self.linears}
            put_in(model, config, keep_original=True, fuse_norms=False)
        self.config = config

    def to(self, config: StochasticConfig) -> list[str]:
        """Run under ``config``, which `check_config` has found to fit this model's original form.

        Returns:
            Full names of the linears and attention modules that differ from the configuration before.
        """
        changed = changed_names(self, self.config, config)
        for name in changed:
            if name in self._originals:
                self._set_linear(name, config)
        if any(name in self.attentions for name in changed):
            if stochastic_attention_of(self.model) is not None:
                restore_stochastic_attention(self.model)
            products = attention_products_of(self.model, config)
            if products:
                use_stochastic_attention(self.model, products)
        self.config = config
        return changed

    def _set_linear(self, name: str, config: StochasticConfig) -> None:
        setting, layer = config.linear(name), self.model.get_submodule(name)
        original: Any = self._originals[name]
        if setting.runs == "exact":
            _put(self.model, name, original)
        elif isinstance(layer, StochasticLinear) and _same_codes(self.config, config, name):
            layer.use_int8(setting.runs == "int8")
            layer.set_lengths(None)
            set_lengths(layer, setting, config.options)
        else:
            _put(self.model, name, prepared_linear(original, config.options, setting).train(layer.training))

    def close(self) -> None:
        """Give the model its original form again."""
        if conversion_of(self.model) is None:
            return
        for name, original in self._originals.items():
            _put(self.model, name, original)
        take_out(self.model)

    def __enter__(self) -> Switched:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def linear_names(model: nn.Module, options: Stochastic) -> list[str]:
    """Full names of the linears that a configuration of these options decides on, those of experts too."""
    with experts_split(model, lambda path: True):
        return list(linears_to_replace(model, Recipe(name="all", linear=Rule(weight=options))))


def changed_names(names: Switched, before: StochasticConfig, after: StochasticConfig) -> list[str]:
    """Full names of the linears and attention modules that run otherwise; empty: the two compute the same."""
    linears = [n for n in names.linears if runs_as(before, n) != runs_as(after, n)]
    same = _grid(before.options) == _grid(after.options)

    def attention(config: StochasticConfig, name: str) -> Any:
        setting = config.attention_of(name)
        return setting, None if same or setting == type(setting)() else _grid(config.options)

    return linears + [n for n in names.attentions if attention(before, n) != attention(after, n)]


def runs_as(config: StochasticConfig, name: str) -> tuple[LinearSetting, Stochastic | None]:
    """How a linear runs, with everything said that its result depends on: equal if and only if that is."""
    setting = config.linear(name)
    if setting.runs == "exact":
        return setting, None
    if setting.runs == "stochastic" and setting.lengths is None:
        setting = replace(setting, lengths=((config.options.streams.length,),))
    return setting, _grid(config.options)


def _grid(options: Stochastic) -> Stochastic:
    """The options without their stream length, which each product has of its own."""
    return replace(options, stoc_len=None, rng_levels=options.streams.levels)


def _same_codes(before: StochasticConfig, after: StochasticConfig, name: str) -> bool:
    one, other = before.linear(name), after.linear(name)
    same = (one.smooth_scales, one.protected, one.bits) == (other.smooth_scales, other.protected, other.bits)
    return same and _grid(before.options) == _grid(after.options)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
