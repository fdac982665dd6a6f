"""What adapters stand in a model: rank, where, and what of them is trained, for `fewbits.explain`.

PEFT's layers are known by what they say of themselves (``adapter_layer_names``), so that nothing is imported
for a model without adapters, and adapters of any kind are told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from fewbits.host.receipt import Receipt
from fewbits.host.record import notes_of
from fewbits.host.unwrap import unwrap
from fewbits.models.packing.expert_targets import ALL_LINEAR
from fewbits.words import counted


def adapters_told(model: nn.Module) -> list[Receipt]:
    """One receipt with a sentence for each adapter of this model; empty where it has none."""
    base = unwrap(model)
    layers = {path: layer for path, layer in base.named_modules() if _names_of(layer)}
    adapters = dict.fromkeys(name for layer in layers.values() for name in _adapters_in(layer))
    configs = getattr(base, "peft_config", None) or {}
    notes = [_sentence(name, configs.get(name), layers) for name in adapters]
    if notes:
        trained = sum(p.numel() for p in base.parameters() if p.requires_grad)
        notes.append(f"{counted(trained, 'parameter')} of the model trained in all")
        notes.extend(note for note in notes_of(model) if note.startswith(ALL_LINEAR))
    return [Receipt("", notes=notes)] if notes else []


def _names_of(layer: nn.Module) -> tuple[str, ...]:
    """The attributes in which one of PEFT's layers keeps its adapters' parameters, by the adapter's name."""
    # Not by getattr alone: what wraps a layer, torch.compile for one, answers with the layer's attributes.
    names = vars(layer).get("adapter_layer_names", getattr(type(layer), "adapter_layer_names", ()))
    return names if isinstance(names, tuple) else ()


def _adapters_in(layer: nn.Module) -> Iterator[str]:
    for attribute in _names_of(layer):
        if isinstance(held := getattr(layer, attribute, None), (nn.ModuleDict, nn.ParameterDict)):
            yield from held.keys()


def _sentence(name: str, config: Any, layers: dict[str, nn.Module]) -> str:
    """Rank, targets, parameters, and whether the adapter takes part."""
    own = {path: layer for path, layer in layers.items() if name in _adapters_in(layer)}
    whole = [path for path, layer in own.items() if hasattr(layer, "original_module")]
    places = [_place(path, layer) for path, layer in own.items() if path not in whole]
    parameters = {id(p): p for layer in own.values() for p in _parameters_of(layer, name)}
    trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
    total = sum(p.numel() for p in parameters.values())
    kind = str(getattr(getattr(config, "peft_type", None), "value", "adapter")).replace("LORA", "LoRA")
    parts = [f"adapter {name!r}: {kind}{_rank(name, own.values())}"]
    if places:
        parts.append(f"on {counted(len(places), 'weight')} ({', '.join(dict.fromkeys(places))})")
    if whole:
        parts.append(f"whole copies of {', '.join(dict.fromkeys(map(_last, whole)))}")
    parts.append(
        f"{counted(total, 'parameter')}, {'all' if trained == total else f'{trained:,}'} trained"
        if trained
        else f"{counted(total, 'parameter')}, none trained"
    )
    return ", ".join(parts) + _state(name, own.values())


def _parameters_of(layer: nn.Module, name: str) -> Iterator[nn.Parameter]:
    for attribute in _names_of(layer):
        held = getattr(layer, attribute, None)
        if isinstance(held, (nn.ModuleDict, nn.ParameterDict)) and name in held:
            value = held[name]
            yield from value.parameters() if isinstance(value, nn.Module) else [value]


def _rank(name: str, layers: Iterable[Any]) -> str:
    """Of what has a rank, such as LoRA: one, or from the least to the largest; and alpha where it is one."""
    layers = [*layers]
    ranks, alphas = (sorted({*_values(layers, attribute, name)}) for attribute in ("r", "lora_alpha"))
    if not ranks:
        return ""
    told = f" of rank {ranks[0]}" if len(ranks) == 1 else f" of ranks {ranks[0]} to {ranks[-1]}"
    return f"{told}, alpha {alphas[0]}" if len(alphas) == 1 else told


def _values(layers: Iterable[Any], attribute: str, name: str) -> Iterator[Any]:
    for layer in layers:
        values = getattr(layer, attribute, None)
        if isinstance(values, dict) and name in values:
            yield values[name]


def _place(path: str, layer: nn.Module) -> str:
    """The last name of what is adapted: a linear's, or an expert's and its weight's."""
    weight = getattr(layer, "parameter_name", None)  # PEFT wraps a module once for each of its weights
    name = _last(path.replace(".base_layer", ""))
    return f"{name}.{weight}" if isinstance(weight, str) else name


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _state(name: str, layers: Iterable[Any]) -> str:
    """What keeps an adapter out of the model's answers, or has put it into the weights."""
    layers = [*layers]
    if any(name in getattr(layer, "merged_adapters", ()) for layer in layers):
        return ", merged into the weights"
    if all(getattr(layer, "disable_adapters", False) is True for layer in layers):
        return ", switched off"
    if not any(name in getattr(layer, "active_adapters", (name,)) for layer in layers):
        return ", not active"
    return ""
