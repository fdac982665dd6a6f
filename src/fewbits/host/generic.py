"""A spec for a dense decoder that nobody wrote one for, read from the modules of the model itself.

It says where the decoder layers, their linears, the embedding and the head are, and nothing of what they
compute: such a model is packed, adapted, trained and saved through its own forward. `ModelSpec.generic` is
then True, and whatever must know a family's arithmetic (the fused decoder, the norms' exchange, attention by
fewbits, tensor parallelism, decoding's kernels) leaves it alone and says so.

What stands beside the linears (norms, the convolutions and decays of state-space and linear attention) stays
as it is, and the receipt lists it. What linears do not describe at all is refused: layers that are mostly
something else, models of an encoder and a decoder.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

from fewbits.errors import Unsupported
from fewbits.families.catalog import experts_at
from fewbits.families.spec import ModelSpec, Norms
from fewbits.host.expert_weights import weights_of
from fewbits.host.transposed import is_conv1d
from fewbits.host.unwrap import unwrap
from fewbits.nn.experts import QuantizedExperts

READ_PAST = "the host's code reads its weight past the module"
_LOOKS_AT = ("dtype", "device", "shape", "size", "numel", "dim")


def generic_spec(model: nn.Module, model_type: str) -> ModelSpec:
    """The spec that the modules of ``model`` tell.

    Args:
        model: a model of transformers, converted or not, with or without adapters, on any device.
        model_type: what its config.json calls it.

    Returns:
        A generic spec whose paths are those of the model without PEFT's wrapper.

    Raises:
        Unsupported: it is no dense decoder; the message says what is missing.
    """
    base = unwrap(model)
    config: Any = getattr(base, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise _missing(model_type, "it has an encoder and a decoder, and fewbits packs decoders alone")
    decoder = _decoder_of(base)
    path, layers = _layers_of(base, decoder, model_type)
    linears: dict[str, None] = {}
    left: dict[str, str] = {}
    experts: str | None = None
    for layer in layers:
        experts = _experts_path(layer) or experts
        _refuse_what_cannot_be_packed(layer, model_type)
        left.update(dict.fromkeys(routers(layer), "it chooses experts"))
        left.update(dict.fromkeys(_read_past_the_module(layer), READ_PAST))
        linears.update(dict.fromkeys(path for path in linear_paths(layer) if path not in left))
    if not linears:
        raise _missing(model_type, f"its layers at {path!r} hold no linears")
    return ModelSpec(
        model_type=model_type,
        layers=path,
        final_norm=None,
        norm=Norms(before_attention=None, before_mlp=None),
        attention=None,
        mlp=None,
        experts=None if experts is None else experts_at(experts, model_type),
        other_linears=tuple(path for path in linears if path not in left),
        left=tuple(left.items()),
        embed=_end(base, "get_input_embeddings", "model.embed_tokens"),
        head=_end(base, "get_output_embeddings", "lm_head"),
        towers=tuple(_towers(base, decoder)),
        generic=True,
    )


def linear_paths(layer: nn.Module) -> Iterator[str]:
    """Paths of the linears inside one layer, in order; one under an adapter by the name it had without."""
    adapted: tuple[str, ...] = ()
    for path, module in layer.named_modules():
        if path.startswith(adapted or ("\0",)):
            continue
        base = getattr(module, "base_layer", module)
        if isinstance(base, nn.Linear) or is_conv1d(base):
            adapted += (f"{path}.",)
            yield path


def _experts_path(layer: nn.Module) -> str | None:
    """Path of the module that holds the layer's experts as transformers does, in 3-D parameters."""
    for path, module in layer.named_modules():
        if weights_of(module):
            return str(path).replace(".base_layer", "")
    return None


def routers(layer: nn.Module) -> set[str]:
    """Linears that choose experts, or weigh a shared one; all stand beside the module of the experts.

    A router has one output for each expert. So may a key projection and the shared expert have by chance (512
    experts, 2 key heads of 256), so neither counts: the one stands elsewhere, and the other is a module of
    several linears of which one leads back to the hidden size. The weight of a shared expert is one output of
    a linear that is called a gate.
    """
    linears = {path: _outputs(layer.get_submodule(path)) for path in linear_paths(layer)}
    chosen = set()
    for path, module in layer.named_modules():
        shapes = [_shape(name, module) for name in weights_of(module)]
        if not shapes:
            continue
        place = path.replace(".base_layer", "").rpartition(".")[0]
        beside = {name: name[len(place) + bool(place) :] for name in linears if _is_inside(name, place)}
        hidden = set.intersection(*(set(shape[1:]) for shape in shapes))
        for name, inside in beside.items():
            child = inside.partition(".")[0]
            outputs = [linears[other] for other, its in beside.items() if its.partition(".")[0] == child]
            is_block = len(outputs) > 1 and not hidden.isdisjoint(outputs)
            is_gate = linears[name] == 1 and inside == child and child.endswith("gate")
            if is_gate or (linears[name] == shapes[0][0] and not is_block):
                chosen.add(name)
    return chosen


def _is_inside(path: str, place: str) -> bool:
    return not place or path.startswith(f"{place}.")


def _outputs(linear: Any) -> int:
    """Outputs of a linear, or of the one under an adapter."""
    base = getattr(linear, "base_layer", linear)
    return int(base.nf if is_conv1d(base) else base.out_features)


def _read_past_the_module(layer: nn.Module) -> Iterator[str]:
    """Linears whose weight the code around them reads, in place of calling them.

    A kernel that is handed ``self.out_proj.weight`` (Mamba's, which computes the projection too) would see
    nothing of an adapter, and wants a plain tensor.
    """
    for path, module in layer.named_modules():
        kind: Any = type(module)
        names = _weights_read(kind)
        for name, inner in module.named_children():
            base = getattr(inner, "base_layer", inner)
            if name in names and (isinstance(base, nn.Linear) or is_conv1d(base)):
                yield f"{path}.{name}".lstrip(".")


@lru_cache(maxsize=256)
def _weights_read(kind: Any) -> frozenset[str]:
    """Names ``x`` whose ``self.x.weight`` the methods of a class read, and more than its dtype or shape."""
    if kind.__module__.startswith(("torch.", "fewbits.", "peft.")):
        return frozenset()
    names = set()
    for method in vars(kind).values():
        code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
        steps = [] if code is None else [(i.opname, i.argval) for i in dis.get_instructions(code)]
        for (_, name), (read, what), (_, after) in zip(
            steps, steps[1:], [*steps[2:], ("", "")], strict=False
        ):
            if read == "LOAD_ATTR" and what == "weight" and after not in _LOOKS_AT:
                names.add(str(name))
    return frozenset(names)


def _shape(name: str, module: nn.Module) -> tuple[int, ...]:
    packed = getattr(module, "shapes", None)
    return tuple(packed[name] if packed else getattr(module, name).shape)


def _decoder_of(base: Any) -> nn.Module:
    """The part of a model that reads text: the model itself, unless it has towers beside."""
    decoder: Any = base.get_decoder() if hasattr(base, "get_decoder") else None
    return base if decoder is None else decoder  # type: ignore[no-any-return]


def _towers(base: nn.Module, decoder: nn.Module) -> Iterator[str]:
    """Paths of what a class for more than text has beside its decoder: all but the output head."""
    config: Any = getattr(base, "config", None)
    if decoder is base or config is None or config.get_text_config() is config:
        return
    way = next(path for path, module in base.named_modules() if module is decoder)
    heads = [_head_of(base)]
    for path, module in base.named_modules():
        parent = path.rpartition(".")[0]
        beside = (not parent or f"{way}.".startswith(f"{parent}.")) and not f"{way}.".startswith(f"{path}.")
        is_tower = path and beside and module not in heads and not path.startswith(f"{way}.")
        if is_tower and next(module.parameters(), None) is not None:
            yield path


def _head_of(base: Any) -> Any:
    try:
        return base.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _missing(model_type: str, what: str) -> Unsupported:
    return Unsupported(
        f"no spec for model_type {model_type!r}, and its modules do not make a generic one: {what}. Load it "
        "without a recipe (load_in_4bit=False), or write a spec and call fewbits.register_family."
    )


def _layers_of(base: nn.Module, decoder: Any, model_type: str) -> tuple[str, nn.ModuleList]:
    """Path from the model, and the list of layers, of one class or of several: the largest in the decoder."""
    largest, most = None, 0
    inside = {id(module) for module in decoder.modules()}
    for path, module in base.named_modules():
        if id(module) not in inside or not isinstance(module, nn.ModuleList):
            continue
        count = sum(p.numel() for p in module.parameters())
        if count > most:
            largest, most = (path, module), count
    if largest is None:
        raise _missing(model_type, "it has no list of decoder layers")
    return largest


def _refuse_what_cannot_be_packed(layer: nn.Module, model_type: str) -> None:
    """Small parameters of other kinds stay, and are listed; a layer that is mostly such is refused.

    So convolutions, decays and the like of state-space and linear attention stay beside packed linears.
    """
    whole, unknown, largest = sum(p.numel() for p in layer.parameters()), 0, ("", 0)
    for path, module in layer.named_modules():
        inner = list(module.children())
        if isinstance(module, nn.ModuleList) and len(inner) > 1 and any(True for _ in linear_paths(module)):
            raise _missing(model_type, f"its layers hold experts ({path}), which fewbits does not pack yet")
        if weights_of(module) or isinstance(module, (QuantizedExperts, nn.Linear)):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 2:
                unknown += parameter.numel()
                largest = max(largest, (f"{path}.{name}", parameter.numel()), key=lambda entry: entry[1])
    if 2 * unknown > whole:
        raise _missing(
            model_type,
            f"most of a layer is in parameters of three dimensions and more ({largest[0]}, for one), which "
            "fewbits does not know how to pack",
        )


def _end(base: nn.Module, getter: str, default: str) -> str:
    """The path of the embedding or the head, by transformers' own word for it."""
    try:
        module = getattr(base, getter)()
    except (AttributeError, NotImplementedError):
        return default
    paths: list[str] = [path for path, candidate in base.named_modules() if candidate is module]
    return paths[0].removesuffix(".original_module") if paths else default
