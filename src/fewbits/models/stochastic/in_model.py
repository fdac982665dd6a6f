"""A `StochasticConfig` in a Hugging Face model: checked against it, put in, saved beside it, found again.

`put_in` converts the linears by `fewbits.models.packing.convert` and the attention by
`fewbits.models.stochastic.attention`; one receipt for both, and `take_out` undoes both. What users call is
`apply_stochastic` and `restore` of `fewbits.models.loading.in_memory`, which also see to saving: a saved
model's folder holds the configuration in `FILE`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fewbits.errors import BadCheckpoint, BadInput, SpecMismatch, Unsupported
from fewbits.formats.stochastic import Stochastic, stochastic_options
from fewbits.host.conversion import conversion_of
from fewbits.host.receipt import Receipt
from fewbits.host.record import part_of, put_part, take_part
from fewbits.host.spec import spec_for
from fewbits.host.transposed import as_linear, is_transposed
from fewbits.models.packing.convert import convert, linears_to_replace, restore
from fewbits.models.packing.experts import expert_modules
from fewbits.models.packing.split_experts import experts_split, split_unless_refused
from fewbits.models.stochastic.attention import (
    attentions_of,
    restore_stochastic_attention,
    stochastic_attention_of,
    use_stochastic_attention,
)
from fewbits.nn.row_plan import STREAMS, RowPlan
from fewbits.nn.stochastic.attention import AttentionProducts
from fewbits.nn.stochastic.linear import StochasticLinear
from fewbits.recipes.recipe import Recipe, Rule
from fewbits.recipes.stochastic_config import (
    AttentionSetting,
    LinearSetting,
    StochasticConfig,
    read_config,
    write_config,
)

FILE = "fewbits_stochastic.json"
_FACTS = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")


def facts_of(model: Any) -> dict[str, Any]:
    """The fields of a model's config that a configuration names to say what it was made for."""
    config = model.config.get_text_config()
    return {name: getattr(config, name) for name in _FACTS if getattr(config, name, None) is not None}


def check_config(model: nn.Module, config: StochasticConfig) -> None:
    """Compare a configuration with a model that is not converted yet.

    Raises:
        SpecMismatch: it was made for another model, names what this one lacks, or a table has another shape.
        BadInput: a stream length that the options cannot have.
        Unsupported: protected channels in an arithmetic whose zeros count.
    """
    there = facts_of(model)
    for name, value in config.model.items():
        if there.get(name) != value:
            raise SpecMismatch(
                f"the stochastic configuration is for a model with {name} {value!r} and this one has "
                f"{there.get(name)!r}; calibrate this model."
            )
    with experts_split(model, lambda path: config.linear(path).runs == "exact"):
        _check_names(model, config)


def _check_names(model: nn.Module, config: StochasticConfig) -> None:
    linears = list(linears_to_replace(model, _recipe(config, ())))
    attentions = list(attentions_of(model))
    if config.attention and not attentions:
        raise Unsupported(
            f"{spec_for(model).without_spec}, so its attention stays transformers' own; leave attention out."
        )
    whole = [path for path, _ in expert_modules(model, spec_for(model))]  # which stay as they are
    for kind, patterns, names in (
        ("linears", config.linears, [*linears, *whole]),
        ("attention", config.attention, attentions),
    ):
        for pattern, _ in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise SpecMismatch(
                    f"{kind}: {pattern!r} matches nothing in this model; its first is {names[0]}."
                )
    for name in linears:
        linear: Any = as_linear(model.get_submodule(name))
        _check_linear(name, config.linear(name), config.options, linear.in_features)
    for name in attentions:
        setting = config.attention_of(name)
        for op in ("scores", "values"):
            _check_lengths(name, setting.lengths(op), config.options)
        if not setting.is_exact("scores") and setting.scores_bits is None:
            _check_scores(name, model.get_submodule(name), setting, config.options)


def _check_scores(name: str, attention: Any, setting: AttentionSetting, options: Stochastic) -> None:
    if setting.chunk_d is not None:
        options = replace(options, chunk_d=setting.chunk_d)
    for chunk in options.chunks(getattr(attention, "head_dim", 0)):
        _check_groups(name, chunk.stop - chunk.start, options)


def _check_linear(name: str, setting: LinearSetting, options: Stochastic, inputs: int) -> None:
    chunks = len(options.chunks(inputs))
    if setting.runs == "stochastic":
        for chunk in options.chunks(inputs):
            _check_groups(name, chunk.stop - chunk.start, options)
    if setting.lengths is not None:
        columns = len(setting.lengths[0])
        if columns not in (1, chunks):
            raise SpecMismatch(
                f"{name}: lengths for {columns} chunks, and {inputs} inputs in chunks of "
                f"{options.chunk_d or inputs} make {chunks}; calibrate this model, or give one length "
                "for all."
            )
        _check_lengths(name, [v for row in setting.lengths for v in row], options, lowest=0)
    if setting.smooth_scales is not None:
        if len(setting.smooth_scales) != inputs:
            raise SpecMismatch(
                f"{name}: {len(setting.smooth_scales)} smooth_scales for {inputs} inputs; calibrate this "
                "model."
            )
        if min(setting.smooth_scales) <= 0:
            raise BadInput(
                f"{name}: smooth_scales must be above zero; the least is {min(setting.smooth_scales):g}."
            )
    _check_protected(name, setting, options, inputs)


def _check_protected(name: str, setting: LinearSetting, options: Stochastic, inputs: int) -> None:
    wrong = [channel for channel in setting.protected if channel >= inputs]
    if wrong or len(set(setting.protected)) != len(setting.protected):
        what = f"channel {wrong[0]} of {inputs}" if wrong else "a channel twice"
        raise SpecMismatch(f"{name}: protected names {what}; calibrate this model.")
    if setting.protected and setting.runs != "exact" and options.streams.signed:
        raise Unsupported(
            f'{name}: protected channels are zeros, which count with signs="{options.signs}"; use '
            'signs="magnitude", or protect none.'
        )


def _check_groups(name: str, dimensions: int, options: Stochastic) -> None:
    if dimensions % options.or_group:
        raise BadInput(
            f"{name}: or_group={options.or_group} does not divide the {dimensions} inputs of a chunk; "
            "choose a divisor of it, or let this layer run int8 or exact."
        )


def _check_lengths(name: str, lengths: Iterable[int], options: Stochastic, lowest: int = 1) -> None:
    for length in lengths:
        if not lowest <= length <= options.longest:
            raise BadInput(
                f"{name}: a stream length of {length} is out of range; choose from {lowest} to "
                f"{options.longest}."
            )


def put_in(
    model: nn.Module,
    config: StochasticConfig,
    *,
    train: bool = False,
    keep_original: bool = False,
    fuse_norms: bool = True,
) -> Receipt:
    """Run a model under stochastic computing as ``config`` says; in place.

    Args:
        model: a Hugging Face model of a known family, without adapters.
        config: the configuration.
        train: keep the weights as they are and trainable, and multiply by what they are at each step
            (SC-QAT); else they are prepared once.
        keep_original: as of `fewbits.convert`.
        fuse_norms: as of `fewbits.convert`.

    Returns:
        The receipt; `fewbits.explain` finds it again.

    Raises:
        SpecMismatch, BadInput: the configuration does not fit the model.
        Unsupported: the model is converted already, or ``train`` with what does not train.
    """
    if conversion_of(model) is not None:
        raise Unsupported("this model is converted already; call fewbits.restore first.")
    with split_unless_refused(model, lambda path: config.linear(path).runs == "exact"):
        return _put_in(model, config, train=train, keep_original=keep_original, fuse_norms=fuse_norms)


def _put_in(
    model: nn.Module, config: StochasticConfig, *, train: bool, keep_original: bool, fuse_norms: bool
) -> Receipt:
    check_config(model, config)
    products = attention_products_of(model, config)  # which may be refused, so before anything is changed
    names = list(linears_to_replace(model, _recipe(config, ())))
    recipe = _recipe(config, names)

    def build(name: str, linear: nn.Module, rule: Rule) -> nn.Module | None:
        options = stochastic_options(rule.weight)
        if options is None:
            return None
        setting = config.linear(name)
        return (
            _trained(name, linear, options, setting) if train else prepared_linear(linear, options, setting)
        )

    receipt = convert(model, recipe, keep_original=keep_original, fuse_norms=fuse_norms, build=build)
    if products:
        receipt.notes.extend(use_stochastic_attention(model, products).notes)
    else:
        receipt.notes.append("attention: both products exact")
    put_part(model, config)
    return receipt


def attention_products_of(model: nn.Module, config: StochasticConfig) -> dict[str, AttentionProducts]:
    """The products of every attention module for which the configuration has any."""
    by_name = {}
    for name in attentions_of(model):
        setting = config.attention_of(name)
        if not (setting.is_exact("scores") and setting.is_exact("values")):
            scores, values = (_attention_product(setting, op, config.options) for op in ("scores", "values"))
            by_name[name] = AttentionProducts(scores[0], values[0], scores[1], values[1])
    return by_name


def _attention_product(
    setting: AttentionSetting, op: str, options: Stochastic
) -> tuple[Stochastic | None, RowPlan]:
    lengths, bits = setting.lengths(op), getattr(setting, f"{op}_bits")
    if bits is not None:
        return _of_bits(options, bits), RowPlan(integer=True)
    if setting.chunk_d is not None:
        options = replace(options, chunk_d=setting.chunk_d)
    if len(lengths) < 2:
        return (options.with_length(lengths[0]) if lengths else None), STREAMS
    longest = options.with_length(max(*lengths, 1))
    return longest, RowPlan(lengths, getattr(setting, f"{op}_thresholds"))


def _of_bits(options: Stochastic, bits: int | None) -> Stochastic:
    """The options with codes of so many bits, which have no streams of the others' length."""
    if bits is None or bits == options.sc_prec:
        return options
    return options.without_streams(bits)


def take_out(model: nn.Module) -> Receipt:
    """Undo `put_in`; see `fewbits.restore` for what the linears become."""
    attention = None
    if stochastic_attention_of(model) is not None:
        attention = restore_stochastic_attention(model)
    receipt = restore(model)
    receipt.notes.extend([] if attention is None else attention.notes)
    take_part(model, StochasticConfig)
    return receipt


def stochastic_config_of(model: nn.Module) -> StochasticConfig | None:
    """The configuration that this model runs under; None without one."""
    return part_of(model, StochasticConfig)


def saved_config(folder: Path | str) -> StochasticConfig | None:
    """The configuration in a model's folder; None if there is none."""
    file = Path(folder) / FILE
    return read_config(file) if file.is_file() else None


def save_config(model: nn.Module, folder: Path | str) -> None:
    """Write the configuration that this model runs under, if any, into a folder."""
    config = stochastic_config_of(model)
    if config is not None:
        write_config(config, Path(folder) / FILE)


def adopt_saved(model: nn.Module, folder: Path | str) -> list[str]:
    """Bring a model with prepared weights, just loaded, under the configuration that was saved with it.

    The linears stay as the checkpoint has them; their lengths and the attention are set.

    Returns:
        Sentences for a receipt.

    Raises:
        BadCheckpoint: the configuration does not belong to these weights.
    """
    config = saved_config(folder)
    prepared = {name: m for name, m in model.named_modules() if isinstance(m, StochasticLinear)}
    if config is None or not prepared:
        return []
    file = Path(folder) / FILE
    for name, layer in prepared.items():
        _check_adopted(file, name, layer, config)
        set_lengths(layer, config.linear(name), config.options)
    products = attention_products_of(model, config)
    put_part(model, config)
    if not products:
        return ["attention: both products exact"]
    return use_stochastic_attention(model, products).notes


def _check_adopted(file: Path, name: str, layer: StochasticLinear, config: StochasticConfig) -> None:
    setting = config.linear(name)
    try:
        _check_linear(name, setting, config.options, layer.in_features)
    except (SpecMismatch, BadInput) as error:
        raise BadCheckpoint(f"{file} does not belong to these weights: {error}") from error
    stored: Any = layer.format
    same = (stored.chunk_d, stored.sc_prec, stored.mode, stored.granularity) == (
        config.options.chunk_d,
        setting.bits or config.options.sc_prec,
        config.options.mode,
        config.options.granularity,
    )
    scales = None if layer.smooth_scales is None else layer.smooth_scales.cpu()
    expected = (
        None if setting.smooth_scales is None else torch.tensor(setting.smooth_scales, dtype=torch.float32)
    )
    smoothed_alike = (scales is None) == (expected is None) and (
        scales is None or expected is None or torch.allclose(scales.float(), expected)
    )
    runs = "int8" if layer.int8 else "stochastic"
    if runs == "stochastic":
        same = same and _streams_of(stored) == _streams_of(_of_bits(config.options, setting.bits))
    if setting.runs != runs or not same or not smoothed_alike:
        raise BadCheckpoint(
            f"{file} and the prepared weight of {name} were made with other settings; prepare the original "
            "model again with this configuration."
        )


def _streams_of(options: Stochastic) -> tuple[object, ...]:
    """What of the options decides how streams are made and counted; their lengths are set beside it."""
    masks = options.scramble, options.scramble_rescale, options.n_masks, options.rng_levels
    return (options.arithmetic, *masks)


def _recipe(config: StochasticConfig, names: Iterable[str]) -> Recipe:
    """The options for every linear of ``names`` but those that run exact."""
    skip = tuple(name for name in names if config.linear(name).runs == "exact")
    return Recipe(name="stochastic", linear=Rule(weight=config.options), skip=skip)


def prepared_linear(linear: Any, options: Stochastic, setting: LinearSetting) -> StochasticLinear:
    """The layer that computes what ``linear`` (in its original form) does as the setting says."""
    layer = StochasticLinear.from_linear(
        as_linear(linear),
        _of_bits(options, setting.bits),
        smooth_scales=_scales(setting, linear),
        protected=setting.protected or None,
        int8=setting.runs == "int8",
    )
    layer.transposed = is_transposed(linear)
    set_lengths(layer, setting, options)
    return layer


def set_lengths(layer: StochasticLinear, setting: LinearSetting, options: Stochastic) -> None:
    """Give a prepared layer the stream lengths of its setting, or those of the options without any."""
    if setting.runs != "stochastic":
        return
    thresholds = setting.thresholds or None
    if setting.lengths is not None:
        layer.set_lengths(setting.lengths, thresholds, classify=setting.classify)
    elif layer.format.streams.length != options.streams.length:
        layer.set_lengths([[options.streams.length]])


def _trained(name: str, linear: Any, options: Stochastic, setting: LinearSetting) -> nn.Module:
    from fewbits.nn.stochastic.qat import StochasticQATLinear

    lengths = {v for row in setting.lengths or () for v in row}
    if len(lengths) > 1 or setting.protected or setting.runs == "int8":
        raise Unsupported(
            f"{name}: training has one stream length for a linear, no INT8 and no protected channels; give "
            "such a setting."
        )
    layer = StochasticQATLinear.from_linear(linear, options.with_length(*lengths) if lengths else options)
    layer.smooth(_scales(setting, linear))
    return layer


def _scales(setting: LinearSetting, linear: Any) -> torch.Tensor | None:
    if setting.smooth_scales is None:
        return None
    return torch.tensor(setting.smooth_scales, device=linear.weight.device, dtype=torch.float32)
