"""Shapes of a decoder layer's weights, from a family's spec and the numbers in its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fewbits.errors import BadInput
from fewbits.families.catalog import LLAMA
from fewbits.families.registry import written_spec
from fewbits.families.spec import MLP, Attention

_NEEDED = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def linear_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Shapes (outputs, inputs) of the linears of one decoder layer, by their path within it.

    Args:
        config: the mapping in config.json, of the text model. A ``model_type`` that nobody wrote a spec for
            is taken for a Llama's, if the config has a Llama's fields.

    Raises:
        BadInput: the config lacks a number that is needed; the message lists what is missing.
    """
    spec = written_spec(config) or LLAMA
    width = () if spec.mlp is None else (spec.mlp.width,)
    missing = [key for key in (*_NEEDED, *width) if config.get(key) is None]
    if missing:
        raise BadInput(
            f"the model's configuration lacks {', '.join(missing)}; pass the mapping in its config.json."
        )
    shapes = {} if spec.attention is None else _attention_shapes(spec.attention, config)
    return shapes | ({} if spec.mlp is None else _mlp_shapes(spec.mlp, config))


def head_dim(config: Any) -> int:
    """Values in one attention head; ``config`` is the text model's, an object or plain data."""
    said = field_of(config, "head_dim")
    return int(said or int(field_of(config, "hidden_size")) // int(field_of(config, "num_attention_heads")))


def window_of(attention: Attention, config: Any, module: Any) -> int:
    """The sliding window of one layer, in tokens; 0 where it sees all.

    Args:
        attention: of the family; it says who knows the window.
        config: the text model's, an object or plain data.
        module: the layer's attention; its ``layer_idx`` is its place among the config's ``layer_types``.
    """
    types = field_of(config, "layer_types")
    if types is not None and types[module.layer_idx] != "sliding_attention":
        return 0
    return int(field_of(config if attention.window == "config" else module, "sliding_window", 0))


def kv_width(config: Mapping[str, Any]) -> int:
    """Values of all keys of a token; its values are as many."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return int(heads) * head_dim(config)


def _attention_shapes(attention: Attention, config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, keys = int(config["hidden_size"]), kv_width(config)
    queries = int(config["num_attention_heads"]) * head_dim(config)
    outputs = (queries, keys, keys) if len(attention.inputs) == 3 else (queries + 2 * keys,)
    inputs = {path: (rows, hidden) for path, rows in zip(attention.inputs, outputs, strict=True)}
    return {**inputs, attention.output: (hidden, queries)}


def _mlp_shapes(mlp: MLP, config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, inner = int(config["hidden_size"]), int(config[mlp.width])
    rows = inner * (2 if mlp.is_gated else 1) // len(mlp.inputs)
    return {**dict.fromkeys(mlp.inputs, (rows, hidden)), mlp.output: (hidden, inner)}


def field_of(config: Any, name: str | None, default: Any = None) -> Any:
    """The value of a config's field that a spec names; ``default`` where the spec names none.

    Args:
        config: an object or plain data.
        name: the field; None: the family has none.
        default: what stands for it then, and where the config does not say.
    """
    if name is None:
        return default
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if value is None else value


def scores_factor(attention: Attention, config: Any, size: int) -> float:
    """What scores of attention are multiplied by before the softmax.

    Args:
        attention: of the family.
        config: the text model's, an object or plain data.
        size: values in a head.
    """
    number = field_of(config, attention.multiplier)
    return float(size**-0.5) if number is None else float(number**attention.multiplier_power)


__all__ = ["field_of", "head_dim", "kv_width", "linear_shapes", "scores_factor", "window_of"]
