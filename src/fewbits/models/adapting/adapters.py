"""LoRA adapters: a true PeftModel whose layers compute with fewbits.

An adapter saved here loads in plain PEFT on the plain model, and one made by plain PEFT loads here, because
everything but the layers' arithmetic is PEFT's own: names, files, configuration. peft is imported when a
function is called.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fewbits.decoder.fuse import fusion_of
from fewbits.errors import BadCheckpoint, BadInput, SpecMismatch, Unsupported
from fewbits.families.spec import ModelSpec
from fewbits.host.generic import READ_PAST
from fewbits.host.record import add_notes, notes_of
from fewbits.host.spec import spec_for
from fewbits.host.walks import shorten_walks
from fewbits.models.adapting.files import (
    CONFIG,
    check_fit,
    check_loaded,
    embeddings_of,
    linears_of,
    listed,
    named_errors,
    read_adapter,
    restored_on_error,
)
from fewbits.models.adapting.more_adapters import add_to, train_on
from fewbits.models.adapting.quantization_error import (
    FROM_ERROR,
    begin_from_error,
    check_base,
    mark,
    take_request,
)
from fewbits.models.loading.longer_positions import check_length, mark_stretched
from fewbits.models.merging.branches import base_name, plain_name
from fewbits.models.packing.expert_targets import (
    check_on_experts,
    check_packed_alike,
    told_of_all_linear,
    with_experts,
)
from fewbits.nn.experts import QuantizedExperts
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.first_values import first_values, generator_of, has_first_values, orthogonal_pair
from fewbits.nn.linear import QuantizedLinear
from fewbits.nn.lora_variants import check_variant, variant_of
from fewbits.recipes.recipe import LoRA


def get_peft_model(
    model: nn.Module,
    lora: Any = None,
    *,
    adapter_name: str = "default",
    seed: int | None = None,
    **settings: Any,
) -> Any:
    """Wrap ``model`` with LoRA adapters.

    Args:
        model: a model, converted or not; a PeftModel gets one more adapter, or trains the one of that name on
            if it has the very settings asked for.
        lora: a `LoRA` (such as ``recipe.lora``), a ``peft.LoraConfig``, which stays as it is, or None: the
            defaults of `LoRA`.
        adapter_name: the adapter's name.
        seed: of the first values, which then depend on it and on the parameters' names alone
            (`fewbits.nn.first_values`), on one process as on many; torch's own generator is left alone. None:
            PEFT draws them in the order of layers, from that generator.
        settings: further fields of ``peft.LoraConfig`` (``rank_pattern``, ``modules_to_save``, ...), which
            win over ``lora``.

    Returns:
        A ``peft.PeftModel``.

    Raises:
        BadInput: the model has an adapter of that name with other settings.
        SpecMismatch: a target matches nothing; the message lists what the model has.
        Unsupported: a variant of LoRA that changes packed weights.
    """
    import peft

    if isinstance(lora, peft.LoraConfig):  # it is completed for this model, and may be used for another
        lora = copy.deepcopy(lora)
    named = getattr(lora, "target_modules", getattr(lora, "targets", LoRA().targets))
    targets = settings.get("target_modules", named)
    from_error = take_request(lora, settings)
    config, spec = lora_config(model, lora, **settings), _spec_or_none(model)
    if isinstance(model, peft.PeftModel) and adapter_name in model.peft_config:
        return train_on(model, config, adapter_name)
    told = told_of_all_linear(model, spec, config.target_parameters) if targets == "all-linear" else None
    if from_error:
        if spec is not None and spec.experts is not None and config.target_parameters:
            check_on_experts({"init_lora_weights": FROM_ERROR}, spec)
        mark(config, model)
    mark_stretched(config, model)
    with _own_random_numbers(seed), _parameters_matched(config):
        if isinstance(model, peft.PeftModel):
            adapted: Any = add_to(model, config, adapter_name)
        else:
            adapted = peft.get_peft_model(model, config, adapter_name=adapter_name)  # type: ignore[arg-type]
    if seed is not None:
        begin_adapter(adapted, seed, adapter_name)
    if from_error:
        begin_from_error(adapted, adapter_name, seed=seed)
    if fusion_of(adapted) is not None:
        shorten_walks(adapted)
    if told is not None and told not in notes_of(model):
        add_notes(model, [told])
    return adapted


@contextmanager
def _parameters_matched(config: Any) -> Iterator[None]:
    """Within it, PEFT does not say that a pattern for parameters was ignored, where these have what it says.

    It looks for ranks and alphas of ``target_parameters`` among the names of modules, and warns of each.
    """
    with warnings.catch_warnings():
        for field in ("rank_pattern", "alpha_pattern"):
            patterns = sorted(getattr(config, field, None) or {})
            if patterns and all(_names_a_parameter(config, pattern) for pattern in patterns):
                said = re.escape(f"The following {field} keys did not match any targeted module")
                listed = re.escape(str(patterns))
                warnings.filterwarnings("ignore", f"{said}.*: {listed}", RuntimeWarning)
        yield


def _names_a_parameter(config: Any, pattern: str) -> bool:
    names = getattr(config, "target_parameters", None) or ()
    return any(re.fullmatch(pattern, f"layers.0.{name}") for name in names)


@torch.no_grad()
def begin_adapter(model: Any, seed: int, adapter_name: str = "default") -> None:
    """Give an adapter its first values by the seed and its parameters' names (`fewbits.nn.first_values`).

    What PEFT computes from weights or data stays as PEFT made it (PiSSA, EVA, ...; of DoRA the magnitudes),
    and so do the other variants of LoRA.
    """
    from peft.tuners.lora import LoraLayer

    init = model.peft_config[adapter_name].init_lora_weights or False  # as peft takes None
    if not has_first_values(init):
        return
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or not _is_plain(layer, adapter_name, init):
            continue
        if init == "orthogonal" and adapter_name in layer.lora_A:  # an embedding's begin as ever
            _begin_orthogonal(layer, seed, base_name(path), adapter_name)
            continue
        for leaf, parameter in layer.named_parameters():
            if re.match(rf"lora_(embedding_)?[AB]\.{re.escape(adapter_name)}(\.|$)", leaf):
                name, rank = base_name(f"{path}.{leaf}"), layer.r[adapter_name]
                parameter.copy_(first_values(name, parameter.shape, seed=seed, init=init, rank=rank))


def _is_plain(layer: Any, adapter_name: str, init: bool | str) -> bool:
    """True if nothing but A and B depends on A and B: a magnitude of DoRA does, where B is not zero."""
    variant = getattr(layer, "lora_variant", {}).get(adapter_name)
    return variant is None or (layer.use_dora.get(adapter_name, False) and init in (True, "gaussian"))


def _begin_orthogonal(layer: Any, seed: int, name: str, adapter_name: str) -> None:
    a, b = layer.lora_A[adapter_name].weight, layer.lora_B[adapter_name].weight
    generator = generator_of(seed, f"{name}.lora_A.{adapter_name}.weight")
    pair = orthogonal_pair(a.shape[0], a.shape[1], b.shape[0], generator)
    for parameter, values in zip((a, b), pair, strict=True):
        parameter.copy_(values)


@contextmanager
def _own_random_numbers(seed: int | None) -> Iterator[None]:
    """What is drawn inside follows the seed, and nothing outside is moved by it; None: nothing changes."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def lora_config(model: nn.Module, lora: Any = None, **settings: Any) -> Any:
    """A ``peft.LoraConfig`` that fits ``model``, for callers of PEFT itself and for TRL's ``peft_config``.

    Args:
        model: the model that the adapters go over.
        lora: as for `get_peft_model`; a ``peft.LoraConfig`` is completed in place.
        settings: as for `get_peft_model`.

    Returns:
        A ``peft.LoraConfig`` with targets that exist, and with this library's layers for packed linears.

    Raises:
        SpecMismatch, Unsupported: as `get_peft_model`.
    """
    if FROM_ERROR in (settings.get("init_lora_weights"), getattr(lora, "init_lora_weights", None)):
        raise Unsupported(
            "init_lora_weights='loftq' compares the packed weights with the original ones, which a "
            "configuration alone cannot; call fewbits.get_peft_model, and give its model to the trainer "
            "without a peft_config."
        )
    config = _lora_config(model, lora, settings)
    _check_trained_copies(config, model)
    _check_single_tokens(config)
    _check_parameters(config, model)
    _register(config, model)
    return config


def load_adapter(
    model: nn.Module, path: str | Path, *, adapter_name: str = "default", is_trainable: bool = False
) -> Any:
    """Load an adapter that fewbits or plain PEFT saved.

    Args:
        model: the base model, converted or not; or a PeftModel, which gets one more adapter.
        path: the adapter's folder.
        adapter_name: its name in the model.
        is_trainable: train it on; False freezes it.

    Returns:
        A ``peft.PeftModel``.

    Raises:
        BadCheckpoint: the folder has no adapter, a damaged one, or one stored as a pickle.
        BadInput: the model has an adapter of that name.
        SpecMismatch: adapter and base do not fit together.
        Unsupported: no LoRA, or it trained a weight that is packed here.
    """
    import peft

    if isinstance(model, peft.PeftModel) and adapter_name in model.peft_config:
        raise BadInput(
            f"this model has an adapter {adapter_name!r}; give that in {path} another adapter_name, or call"
            f" model.delete_adapter({adapter_name!r}) first."
        )
    weights = read_adapter(path)
    try:
        config = peft.PeftConfig.from_pretrained(str(path))
    except (ValueError, TypeError, KeyError) as error:
        raise BadCheckpoint(
            f"{Path(path) / CONFIG} is not an adapter's configuration ({error}); save it again."
        ) from error
    if not isinstance(config, peft.LoraConfig):
        raise Unsupported(
            f"the adapter in {path} is a {config.peft_type}, and fewbits loads LoRA only; merge it with PEFT"
            " (merge_and_unload) and load the merged model."
        )
    check_fit(model, weights, path)
    check_base(config, model, path)
    check_length(vars(config), model, path)
    config.inference_mode = not is_trainable
    _check_trained_copies(config, model)
    _check_parameters(config, model)
    _register(config, model)
    if isinstance(model, peft.PeftModel):
        model.add_adapter(adapter_name, config)
        try:
            with named_errors(path):
                check_loaded(model, weights, adapter_name, path)
        except SpecMismatch:
            model.delete_adapter(adapter_name)
            raise
        return model
    with restored_on_error(model), named_errors(path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found missing adapter keys")  # refused below
        adapted = peft.PeftModel.from_pretrained(
            model, str(path), adapter_name=adapter_name, is_trainable=is_trainable, config=config
        )
        check_loaded(adapted, weights, adapter_name, path)
    return adapted


def resolve_targets(model: nn.Module, targets: Any, linears: Mapping[str, nn.Module] | None = None) -> Any:
    """PEFT's ``target_modules`` for what a user asked for.

    Args:
        model: the model.
        targets: names, as the ends of full names, of linears and embeddings; "all-linear", which are those of
            the decoder layers; or a regular expression over full names.
        linears: the model's linears by full name, if they are known already.

    Returns:
        A sorted list of names, or the regular expression.

    Raises:
        SpecMismatch: a name, or the expression, matches no linear.
    """
    linears = linears_of(model) if linears is None else linears
    spec = _spec_or_none(model)
    if targets is None or targets == "all-linear":
        return (
            sorted(set(spec.linear_names))
            if spec
            else sorted({_last(name) for name in linears} - {"lm_head"})
        )
    if isinstance(targets, str) and not re.fullmatch(r"\w+", targets):
        if not any(re.fullmatch(targets, name) for name in linears):
            raise SpecMismatch(
                f"LoRA target {targets!r} matches no linear of this model; it has {listed(linears)}."
            )
        return targets
    names = {targets} if isinstance(targets, str) else set(targets)
    names = _as_the_model_has_them(names, linears)
    if spec is not None:
        aliases = {part: fused for fused, parts in spec.fused.items() for part in parts}
        names = {aliases.get(name, name) for name in names}
        past = {_last(path) for path in _passed_by(spec)} - set(spec.linear_names)
        if names & past:
            raise SpecMismatch(
                f"an adapter on {', '.join(sorted(names & past))} would do nothing: {READ_PAST}; leave it "
                "out."
            )
    module_names = {*linears, *embeddings_of(model)}
    missing = sorted(
        n for n in names if not any(full == n or full.endswith("." + n) for full in module_names)
    )
    if missing or not names:
        wrong = ", ".join(missing) or "(none given)"
        raise SpecMismatch(f"LoRA targets match no linear of this model: {wrong}; it has {listed(linears)}.")
    return sorted(names)


def _as_the_model_has_them(names: set[str], linears: Mapping[str, nn.Module]) -> set[str]:
    """Gate and up by their own names where a model has two linears of what others store as one."""
    own = {_last(name) for name in linears}
    if "gate_up_proj" in names and "gate_up_proj" not in own and own >= {"gate_proj", "up_proj"}:
        return names - {"gate_up_proj"} | {"gate_proj", "up_proj"}
    return names


def _lora_config(model: nn.Module, lora: Any, settings: dict[str, Any]) -> Any:
    import peft

    if isinstance(lora, peft.LoraConfig):
        if settings:
            raise SpecMismatch(
                "give a peft.LoraConfig or single settings, not both; the LoraConfig has all of them."
            )
        only_parameters = lora.target_parameters and lora.target_modules is not None
        if lora.target_modules or not only_parameters:
            named = not isinstance(lora.target_modules, str) or lora.target_modules == "all-linear"
            if lora.target_modules == "all-linear":
                _take_experts(model, lora)
            lora.target_modules = _as_peft_has_them(resolve_targets(model, lora.target_modules))
            if named and lora.exclude_modules is None:
                lora.exclude_modules = _towers(model)
        return lora
    lora = LoRA() if lora is None else lora
    fields = {
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        "bias": lora.bias,
        "use_rslora": lora.rslora,
        "task_type": "CAUSAL_LM",
        **settings,
    }
    fields = with_experts(model, _spec_or_none(model), fields)
    # first, because PEFT takes layers_to_transform only with names
    if fields["target_modules"] or not fields.get("target_parameters"):
        fields["target_modules"] = _as_peft_has_them(resolve_targets(model, fields["target_modules"]))
    if isinstance(fields["target_modules"], str) and fields.get("layers_to_transform") is not None:
        raise SpecMismatch(
            "layers_to_transform goes with names in target_modules, and these are a regular expression; "
            "write the layers into the expression."
        )
    if not isinstance(fields["target_modules"], str):  # an expression says itself which it means
        fields.setdefault("exclude_modules", _towers(model))
    return peft.LoraConfig(**fields)


def _take_experts(model: nn.Module, config: Any) -> None:
    """Let a ``peft.LoraConfig`` of "all-linear" mean the same experts as ours does."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, value in with_experts(model, _spec_or_none(model), fields).items():
        if value is not fields[name]:
            setattr(config, name, value)


def _towers(model: nn.Module) -> str | None:
    """What names of linears do not mean, as PEFT's ``exclude_modules``.

    These are towers for other things than text, and linears whose adapters the host would pass by.
    """
    spec = _spec_or_none(model)
    excluded = () if spec is None else (*spec.towers, *_passed_by(spec))
    return rf"(?:.*\.)?(?:{'|'.join(map(re.escape, excluded))})(?:\..*)?" if excluded else None


def _passed_by(spec: ModelSpec) -> tuple[str, ...]:
    """Paths of linears in a layer that their host does not call."""
    return tuple(path for path, reason in spec.left if reason == READ_PAST)


def _as_peft_has_them(targets: Any) -> Any:
    """A set, which PEFT makes of any list, and which its add_weighted_adapter needs."""
    return targets if isinstance(targets, str) else set(targets)


def _check_trained_copies(config: Any, model: nn.Module) -> None:
    names = tuple(config.modules_to_save or ())
    for path, module in model.named_modules():
        if not names or not path.endswith(names):  # as PEFT finds them
            continue
        packed = (QuantizedLinear, QuantizedExperts)
        inner = next(((n, m) for n, m in module.named_modules() if isinstance(m, packed)), None)
        if inner is None:
            continue
        name, layer = inner
        whole = plain_name(f"{path}.{name}" if name else path)
        formats = [layer.format] if isinstance(layer, QuantizedLinear) else layer.formats.values()
        stored = " and ".join(sorted({format.name for format in formats}))
        raise Unsupported(
            f"modules_to_save would train a copy of {whole}, whose weight is stored as {stored}; leave it as "
            "it is with the recipe's skip, or put an adapter on it."
        )


def _check_single_tokens(config: Any) -> None:
    """PEFT ends in its middle, or in the first forward pass, where an embedding is to train in two ways."""
    indices = config.trainable_token_indices
    named = config.target_modules if isinstance(config.target_modules, (set, list)) else ()
    for field, names in (("modules_to_save", config.modules_to_save or ()), ("target_modules", named)):
        ends = set(map(_last, indices)) if isinstance(indices, dict) else {"embed_tokens"}
        if indices and (both := sorted(ends.intersection(map(_last, names)))):
            raise BadInput(
                f"trainable_token_indices trains single rows of {both[0]}, which {field} names too; leave it"
                " out of one of the two."
            )


def _check_parameters(config: Any, model: nn.Module) -> None:
    """PEFT only warns where a name in ``target_parameters`` fits no parameter, and adapts something else."""
    check_packed_alike(model, config.target_parameters)
    packed = [path for path, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    for ending in config.target_parameters or ():
        path = next((path for path in packed if f".{path}.weight".endswith(f".{ending}")), None)
        if path is not None:
            raise Unsupported(
                f"target_parameters names {ending!r}, and the weight of {path} is packed; name the linear in "
                "target_modules."
            )


def _register(config: Any, model: nn.Module) -> None:
    """Tell PEFT, on this configuration alone, which layer class goes over which kind of linear.

    What the user has registered comes first. Variants of LoRA keep PEFT's own layers, which read the weight:
    a packed one is decoded for them. DoRA over packed linears alone has our layer, which computes as PEFT's
    and gives back every bit when it is unmerged.
    """
    from fewbits.nn.lora import lora_layer
    from fewbits.nn.lora_experts import LoRAExperts

    variant = variant_of(config)
    ours: dict[Any, Any] = {}
    if variant is None:
        ours = dict.fromkeys((QuantizedLinear, FakeQuantizedLinear, nn.Linear), lora_layer)
        ours[QuantizedExperts] = LoRAExperts
    else:
        check_variant(variant, {type(module) for module in model.modules()})
        if variant == "use_dora":
            ours[QuantizedLinear] = lora_layer
    users = config._custom_modules or {}
    config._custom_modules = None
    # PEFT takes the first kind that fits
    if both := {**users, **{k: v for k, v in ours.items() if k not in users}}:
        config._register_custom_module(both)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _spec_or_none(model: nn.Module) -> ModelSpec | None:
    try:
        return spec_for(model)
    except Unsupported:  # adapters go over any linears, by their names
        return None
