"""LoRA adapters: a true PeftModel whose layers compute with fewbits.

An adapter saved here loads in plain PEFT on the plain model, and one made by plain PEFT loads here, because
everything but the layers' arithmetic is PEFT's own: names, files, configuration. peft is imported when a
function is called.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fewbits.errors import BadCheckpoint, SpecMismatch, Unsupported
from fewbits.models.branches import base_name
from fewbits.models.families import SPECS, ModelSpec
from fewbits.models.spec import model_type_of, spec_for
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.first_values import first_values, generator_of, has_first_values, orthogonal_pair
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes.recipe import LoRA

_WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_CONFIG = "adapter_config.json"


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
        model: a model, converted or not; a PeftModel gets one more adapter.
        lora: a `LoRA` (such as ``recipe.lora``), a ``peft.LoraConfig``, or None: the defaults of `LoRA`.
        adapter_name: the adapter's name.
        seed: of the first values, which then depend on it and on the parameters' names alone
            (`fewbits.nn.first_values`), on one process as on many; torch's own generator is left alone. None:
            PEFT draws them in the order of layers, from that generator.
        settings: further fields of ``peft.LoraConfig`` (``rank_pattern``, ``modules_to_save``, ...), which
            win over ``lora``.

    Returns:
        A ``peft.PeftModel``.

    Raises:
        SpecMismatch: a target matches nothing; the message lists what the model has.
        Unsupported: a variant of LoRA that changes packed weights.
    """
    import peft

    config = lora_config(model, lora, **settings)
    with _own_random_numbers(seed):
        if isinstance(model, peft.PeftModel):
            model.add_adapter(adapter_name, config)
            adapted: Any = model
        else:
            adapted = peft.get_peft_model(model, config, adapter_name=adapter_name)  # type: ignore[arg-type]
    if seed is not None:
        begin_adapter(adapted, seed, adapter_name)
    return adapted


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
    config = _lora_config(lora, settings)
    config.target_modules = resolve_targets(model, config.target_modules)
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
        SpecMismatch: adapter and base do not fit together.
    """
    import peft

    weights = read_adapter(path)
    try:
        config = peft.PeftConfig.from_pretrained(str(path))
    except (ValueError, TypeError, KeyError) as error:
        raise BadCheckpoint(
            f"{Path(path) / _CONFIG} is not an adapter's configuration ({error}); save it again."
        ) from error
    if not isinstance(config, peft.LoraConfig):
        raise Unsupported(
            f"the adapter in {path} is a {config.peft_type}, and only LoRA adapters are supported."
        )
    _check_fit(model, weights, path)
    config.inference_mode = not is_trainable
    _register(config, model)
    if not isinstance(model, peft.PeftModel):
        return peft.PeftModel.from_pretrained(
            model, str(path), adapter_name=adapter_name, is_trainable=is_trainable, config=config
        )
    model.add_adapter(adapter_name, config)
    peft.set_peft_model_state_dict(model, weights, adapter_name=adapter_name)
    return model


def read_adapter(path: str | Path) -> dict[str, Any]:
    """The tensors of an adapter folder, on the CPU.

    Raises:
        BadCheckpoint: there is none, it is damaged, or it is a pickle.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(path)
    if not (folder / _CONFIG).is_file():
        raise BadCheckpoint(f"{folder} has no {_CONFIG}; give the folder that save_pretrained wrote.")
    if not (folder / _WEIGHTS).is_file():
        if (folder / _PICKLE).is_file():
            raise BadCheckpoint(
                f"{folder / _PICKLE} is a pickle, which can run code; convert it to {_WEIGHTS} first."
            )
        raise BadCheckpoint(f"{folder} has no {_WEIGHTS}; give the folder that save_pretrained wrote.")
    try:
        return dict(load_file(folder / _WEIGHTS))
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(
            f"{folder / _WEIGHTS} is truncated or corrupt ({error}); copy or save it again."
        ) from error


def resolve_targets(model: nn.Module, targets: Any, linears: Mapping[str, nn.Module] | None = None) -> Any:
    """PEFT's ``target_modules`` for what a user asked for.

    Args:
        model: the model.
        targets: names, as the ends of full names; "all-linear"; or a regular expression over full names.
        linears: the model's linears by full name, if they are known already.

    Returns:
        A sorted list of names, or the regular expression.

    Raises:
        SpecMismatch: a name, or the expression, matches no linear.
    """
    linears = _linears(model) if linears is None else linears
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
                f"LoRA target {targets!r} matches no linear of this model; it has {_listed(linears)}."
            )
        return targets
    names = {targets} if isinstance(targets, str) else set(targets)
    if spec is not None:
        aliases = {part: fused for fused, parts in spec.fused.items() for part in parts}
        names = {aliases.get(name, name) for name in names}
    missing = sorted(n for n in names if not any(full == n or full.endswith("." + n) for full in linears))
    if missing or not names:
        wrong = ", ".join(missing) or "(none given)"
        raise SpecMismatch(f"LoRA targets match no linear of this model: {wrong}; it has {_listed(linears)}.")
    return sorted(names)


def _lora_config(lora: Any, settings: dict[str, Any]) -> Any:
    import peft

    if isinstance(lora, peft.LoraConfig):
        if settings:
            raise SpecMismatch(
                "give a peft.LoraConfig or single settings, not both; the LoraConfig has all of them."
            )
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
    }
    return peft.LoraConfig(**{**fields, **settings})


def _register(config: Any, model: nn.Module) -> None:
    """Tell PEFT, on this configuration alone, which layer class goes over which kind of linear."""
    from fewbits.nn.lora import LoRALinear

    ours = {QuantizedLinear: LoRALinear, FakeQuantizedLinear: LoRALinear}
    variants = [
        name
        for name in ("use_dora", "alora_invocation_tokens", "layer_replication")
        if getattr(config, name, None)
    ]
    changes_base = isinstance(config.init_lora_weights, str) and config.init_lora_weights not in (
        "gaussian",
        "orthogonal",
    )
    if variants or changes_base:
        what = variants[0] if variants else f"init_lora_weights={config.init_lora_weights!r}"
        if any(isinstance(module, tuple(ours)) for module in model.modules()):
            raise Unsupported(
                f"{what} needs weights that are neither packed nor fake-quantised, and this model has such; "
                "use plain LoRA, or do not convert the model."
            )
        return  # PEFT's own layers know these variants
    config._register_custom_module({**ours, nn.Linear: LoRALinear})


def _check_fit(model: nn.Module, weights: Mapping[str, Any], path: str | Path) -> None:
    """Each tensor must find a module of its size, before anything is changed."""
    linears = _linears(model)
    shapes = {base_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for key, tensor in weights.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])(\..+)?\.weight", key)
        if match is not None:
            _check_pair(linears, match.group(1), match.group(2), tensor, path)
            continue
        name = base_name(key)
        have, want = tuple(tensor.shape), shapes.get(name)
        if want is not None and have != want:
            raise SpecMismatch(
                f"the adapter in {path} holds {name!r} of shape {have}, and this model's is {want} (another "
                "vocabulary?); load its own base model."
            )


def _check_pair(linears: Mapping[str, Any], name: str, which: str, tensor: Any, path: str | Path) -> None:
    linear = linears.get(name)
    if linear is None:
        raise SpecMismatch(
            f"the adapter in {path} adapts {name!r}, which this model does not have; "
            f"it has {_listed(linears)}."
        )
    axis, side = (1, "in") if which == "A" else (0, "out")
    have, want = tensor.shape[axis], getattr(linear, f"{side}_features")
    if have != want:
        raise SpecMismatch(
            f"the adapter in {path} was made for {have} {side}puts of {name!r}, which has {want}; "
            "load its own base model."
        )


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    """Linears by the full name that the base model gives them, adapters and wrappers left out."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if ".lora_" in name or not isinstance(module, (nn.Linear, QuantizedLinear)):
            continue
        found[name.removeprefix("base_model.model.").removesuffix(".base_layer")] = module
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted({_last(name) for name in names})) or "no linears"


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _spec_or_none(model: nn.Module) -> ModelSpec | None:
    return spec_for(model) if model_type_of(model) in SPECS else None
