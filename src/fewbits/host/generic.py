"""A spec for a dense decoder that nobody wrote one for, read from the modules of the model itself.

It says where the decoder layers, their linears, the embedding and the head are, and nothing of what they
compute: such a model is packed, adapted, trained and saved through its own forward. `ModelSpec.generic` is
then True, and whatever must know a family's arithmetic (the fused decoder, the norms' exchange, attention by
fewbits, tensor parallelism, decoding's kernels) leaves it alone and says so.

What linears alone do not describe is refused: experts, state-space and convolutional layers, models of an
encoder and a decoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fewbits.errors import Unsupported
from fewbits.families.spec import Experts, ModelSpec, Norms
from fewbits.host.expert_weights import weights_of
from fewbits.host.transposed import is_conv1d
from fewbits.nn.experts import QuantizedExperts

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


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
    wrapper: Any = model
    base = wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else model
    config: Any = getattr(base, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise _missing(model_type, "it has an encoder and a decoder, and fewbits packs decoders alone")
    decoder = _decoder_of(base)
    path, layers = _layers_of(base, decoder, model_type)
    linears: dict[str, None] = {}
    experts: str | None = None
    for layer in layers:
        experts = _experts_path(layer) or experts
        _refuse_what_is_not_dense(layer, model_type)
        routers = _routers(layer)
        linears.update(dict.fromkeys(path for path in linear_paths(layer) if path not in routers))
    if not linears:
        raise _missing(model_type, f"its layers at {path!r} hold no linears")
    return ModelSpec(
        model_type=model_type,
        layers=path,
        final_norm=None,
        norm=Norms(before_attention=None, before_mlp=None),
        attention=None,
        mlp=None,
        experts=None if experts is None else Experts(path=experts),
        other_linears=tuple(linears),
        embed=_end(base, "get_input_embeddings", "model.embed_tokens"),
        head=_end(base, "get_output_embeddings", "lm_head"),
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


def _routers(layer: nn.Module) -> set[str]:
    """Linears that choose experts or weigh a shared one: as many outputs as experts, or one."""
    counts = {shape[0] for m in layer.modules() for shape in map(_shape, weights_of(m), [m] * 3)}
    return {
        path
        for path, module in layer.named_modules()
        if counts and getattr(module, "out_features", None) in {*counts, 1}
    }


def _shape(name: str, module: Any) -> tuple[int, ...]:
    packed = getattr(module, "shapes", None)
    return tuple(packed[name] if packed else getattr(module, name).shape)


def _decoder_of(base: Any) -> nn.Module:
    """The part of a model that reads text: the model itself, unless it has towers beside."""
    decoder: Any = base.get_decoder() if hasattr(base, "get_decoder") else None
    return base if decoder is None else decoder  # type: ignore[no-any-return]


def _missing(model_type: str, what: str) -> Unsupported:
    return Unsupported(
        f"no spec for model_type {model_type!r}, and its modules do not make a generic one: {what}. Load it "
        "without a recipe (load_in_4bit=False), or write a spec and call fewbits.register_family."
    )


def _layers_of(base: nn.Module, decoder: Any, model_type: str) -> tuple[str, nn.ModuleList]:
    """Path from the model, and the list of layers: the largest in the decoder with entries of one class."""
    largest, most = None, 0
    inside = {id(module) for module in decoder.modules()}
    for path, module in base.named_modules():
        if id(module) not in inside or not isinstance(module, nn.ModuleList):
            continue
        count = sum(p.numel() for p in module.parameters())
        if len({type(entry) for entry in module}) == 1 and count > most:
            largest, most = (path, module), count
    if largest is None:
        raise _missing(model_type, "it has no list of decoder layers of one class")
    return largest


def _refuse_what_is_not_dense(layer: nn.Module, model_type: str) -> None:
    for path, module in layer.named_modules():
        inner = list(module.children())
        if isinstance(module, nn.ModuleList) and len(inner) > 1 and any(True for _ in linear_paths(module)):
            raise _missing(model_type, f"its layers hold experts ({path}), which fewbits does not pack yet")
        if isinstance(module, _CONVOLUTIONS):
            raise _missing(
                model_type,
                f"its layers hold a convolution ({path}), as state-space and linear attention do, which "
                "fewbits has not been tried on",
            )
        known = weights_of(module)
        for name, parameter in module.named_parameters(recurse=False):
            if known or isinstance(module, QuantizedExperts):
                continue
            if parameter.dim() > 2 and not isinstance(module, nn.Linear):
                raise _missing(
                    model_type,
                    f"its layers hold a parameter of {parameter.dim()} dimensions ({path}.{name}), as "
                    "experts have, which fewbits does not pack yet",
                )


def _end(base: Any, getter: str, default: str) -> str:
    """The path of the embedding or the head, by transformers' own word for it."""
    try:
        module = getattr(base, getter)()
    except (AttributeError, NotImplementedError):
        return default
    paths: list[str] = [path for path, candidate in base.named_modules() if candidate is module]
    return paths[0].removesuffix(".original_module") if paths else default
