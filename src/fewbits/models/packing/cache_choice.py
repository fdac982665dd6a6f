"""Which key/value cache a model's calls of ``generate`` use, and whether its heads can have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fewbits.errors import BadInput, Unsupported
from fewbits.families.shapes import head_dim
from fewbits.formats.kv_cache import KVCache, get_kv_cache
from fewbits.host.conversion import conversion_of
from fewbits.host.receipt import Receipt
from fewbits.host.record import part_of, put_part, take_part

if TYPE_CHECKING:
    from torch import nn

FULL, SLIDING = "full_attention", "sliding_attention"
# Published generation configurations of Gemma still say so; transformers takes it for nothing said.
_NO_CHOICE = {"cache_implementation": "hybrid"}


def layer_kinds(config: Any) -> list[str]:
    """The kind of each layer's cache: "full_attention", "sliding_attention", or its class in transformers."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    def kind_of(layer: nn.Module) -> str:
        if type(layer) is DynamicLayer:
            return FULL
        return SLIDING if isinstance(layer, DynamicSlidingWindowLayer) else type(layer).__name__

    return [kind_of(layer) for layer in DynamicCache(config=config).layers]


def check_cache(kind: KVCache | None, config: Any) -> None:
    """Raise `Unsupported` if a model of this config cannot keep its keys and values so.

    Args:
        kind: which formats; None and plain ones fit every model.
        config: the model's.
    """
    if kind is None or kind.is_plain:
        return
    text = config.get_text_config(decoder=True)
    name = getattr(text, "model_type", "this model")
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(f"{name} has an encoder, whose keys no cache in {kind.name} keeps; leave it out.")
    kinds = layer_kinds(config)
    if FULL not in kinds:
        raise Unsupported(
            f"no layer of {name} attends to all that came before ({', '.join(sorted(set(kinds)))}), and only "
            f"such a layer's keys and values are kept in {kind.name}; leave the cache out."
        )
    size = head_dim(text.to_dict()) if hasattr(text, "num_attention_heads") else 0
    if size:
        for which in ("keys", "values"):
            kind.side(which, size)


@dataclass(frozen=True)
class CacheChoice:
    """What `choose_cache` leaves on a model."""

    kind: KVCache
    receipt: Receipt


def choose_cache(model: nn.Module, kind: KVCache | str | Mapping[str, Any]) -> Receipt:
    """From now on ``model.generate`` and evaluation keep keys and values so; it wins over the recipe.

    Args:
        model: a causal language model, with or without adapters.
        kind: formats, by name, as plain data, or a value; "bfloat16" for none.

    Returns:
        The receipt; `fewbits.restore` undoes the choice.

    Raises:
        BadInput: an unknown format.
        Unsupported: the model cannot have it.
    """
    chosen = get_kv_cache(kind)
    check_cache(chosen, model.config)
    receipt = Receipt(
        "", notes=[f"kv_cache={chosen.name}: generate() and evaluation keep keys and values so"]
    )
    put_part(model, CacheChoice(chosen, receipt))
    return receipt


def forget_cache(model: nn.Module) -> Receipt:
    """Undo `choose_cache` alone: the recipe's word holds again, if there is one."""
    take_part(model, CacheChoice)
    return Receipt("", notes=["keys and values: as the recipe says, or as the model computes them"])


def chosen_cache(model: nn.Module, selection: KVCache | str | Mapping[str, Any] | None) -> KVCache | None:
    """The formats of a call's keys and values: what it asks for, else the model's choice, else its recipe's.

    Args:
        model: the model, through PEFT's wrappers too.
        selection: the call's own choice; None: the recipe's.

    Returns:
        None where keys and values stay as the model computes them.

    Raises:
        BadInput: an unknown format.
        Unsupported: the model cannot have it.
    """
    if selection is None:
        choice, conversion = part_of(model, CacheChoice), conversion_of(model)
        kind = None if conversion is None else conversion.recipe.kv_cache
        kind = kind if choice is None else choice.kind
    else:
        kind = get_kv_cache(selection)
        check_cache(kind, model.config)
    return None if kind is None or kind.is_plain else kind


def cache_of_call(model: nn.Module, arguments: Mapping[str, Any], choice: Any) -> KVCache | None:
    """The formats for one call of ``generate``; None where keys and values are not packed.

    Args:
        model: the model.
        arguments: the call's words and what they are.
        choice: what its ``kv_cache`` says.

    Raises:
        BadInput: an unknown format, or a cache of the call's own beside it.
        Unsupported: the model cannot have it.
    """
    kind = chosen_cache(model, choice)
    configs = (arguments.get("generation_config"), model.generation_config)
    said = [arguments, *(vars(config) for config in configs if config is not None)]
    own = [
        name
        for name in ("past_key_values", "cache_implementation")
        if any(words.get(name) not in (None, _NO_CHOICE.get(name)) for words in said)
    ]
    cached = next((words["use_cache"] for words in said if words.get("use_cache") is not None), True)
    if kind is None or (not own and cached):
        return kind
    if choice is not None:
        word = own[0] if own else "use_cache=False"
        raise BadInput(f"the call passes kv_cache and {word}; pass one of them.")
    return None  # the call's own cache wins over the recipe's


__all__ = [
    "CacheChoice",
    "cache_of_call",
    "check_cache",
    "choose_cache",
    "chosen_cache",
    "forget_cache",
    "layer_kinds",
]
