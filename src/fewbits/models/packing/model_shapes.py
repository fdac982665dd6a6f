"""A model's real shapes from its config.json: the model itself is built without memory, and read.

transformers' own class is the one that knows which linears, experts, norms and towers a family has, how wide
they are and what is tied; it is built on torch's meta device, where no value is stored. Nothing is computed
from a family's name, so what is said here holds for whatever transformers can build.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError

from fewbits.errors import BadInput
from fewbits.host.spec import find, layer_names, spec_for
from fewbits.host.transposed import as_linear
from fewbits.models.packing.experts import expert_modules

if TYPE_CHECKING:
    from torch import nn

# What building a model of numbers that its authors did not think of may raise.
_CANNOT_BUILD = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, OSError,
    RuntimeError, StrictDataclassError, TypeError, ValueError,
)  # fmt: skip
_LLAMA = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size")
_NOT_OF_SHAPES = ("quantization_config", "dtype", "torch_dtype", "_name_or_path", "transformers_version")


@dataclass(frozen=True, kw_only=True)
class LayerShapes:
    """The matrices of all decoder layers of a model.

    Attributes:
        num_layers: how many layers.
        hidden: width of the residual stream.
        linears: (outputs, inputs) of every linear in the layers.
        experts: (experts, outputs, inputs) of every 3-D weight in the layers.
        chosen: experts that a token takes.
    """

    num_layers: int
    hidden: int
    linears: tuple[tuple[int, int], ...]
    experts: tuple[tuple[int, int, int], ...] = ()
    chosen: int = 0

    @property
    def values(self) -> int:
        """Values of the matrices of an average layer."""
        return sum(map(prod, (*self.linears, *self.experts))) // self.num_layers

    @property
    def products(self) -> int:
        """Values that one token multiplies in an average layer: of experts, those that it takes."""
        of_experts = sum(self.chosen * outputs * inputs for _, outputs, inputs in self.experts)
        return (sum(map(prod, self.linears)) + of_experts) // self.num_layers

    @property
    def kept_values(self) -> int:
        """About the values of each token that an average layer keeps between its linears.

        What goes into a linear of another width than the residual stream, and what comes out of one, the
        latter once and a half: attention keeps it before and after it is turned, an activation once.
        """
        inner = sum(inputs for _, inputs in self.linears if inputs != self.hidden)
        outer = sum(outputs for outputs, _ in self.linears if outputs != self.hidden)
        pairs = sum(outputs for _, outputs, _ in self.experts if outputs != self.hidden)
        pairs += sum(inputs for _, _, inputs in self.experts if inputs != self.hidden)
        return (inner + 3 * outer // 2 + self.chosen * pairs) // self.num_layers

    @property
    def widest(self) -> int:
        """Values of the largest single matrix, all experts of a weight together."""
        return max(map(prod, (*self.linears, *self.experts)))


def layer_shapes(model: Any) -> LayerShapes:
    """The shapes of a model's decoder layers.

    Args:
        model: of transformers, on any device, plain, packed or with adapters.

    Raises:
        Unsupported: nothing says where its layers are.
    """
    spec = spec_for(model)
    names = list(layer_names(model, spec))
    linears: list[tuple[int, int]] = []
    for layer in names:
        for path in spec.linears:
            module: Any = find(model, f"{layer}.{path}")
            module = getattr(module, "base_layer", module)
            if module is not None:
                linear: Any = as_linear(module)
                linears.append((int(linear.out_features), int(linear.in_features)))
    config = model.config.get_text_config()
    experts = tuple(shape for _, module in expert_modules(model, spec) for shape in _expert_shapes(module))
    chosen = () if spec.experts is None else (spec.experts.chosen, "num_experts_per_tok", "moe_topk", "top_k")
    return LayerShapes(
        num_layers=len(names),
        hidden=int(config.hidden_size),
        linears=tuple(linears),
        experts=experts,
        chosen=next((int(n) for n in (getattr(config, name, None) for name in chosen) if n), 1),
    )


def _expert_shapes(module: nn.Module) -> list[tuple[int, int, int]]:
    from fewbits.host.expert_weights import weights_of

    packed = getattr(module, "shapes", None)
    shapes = []
    for name in weights_of(module):
        count, first, second = packed[name] if packed else getattr(module, name).shape
        is_transposed = bool(getattr(module, "is_transposed", False))
        shapes.append(
            (int(count), int(second), int(first)) if is_transposed else (int(count), int(first), int(second))
        )
    return shapes


def built_without_memory(config: Mapping[str, Any]) -> Any:
    """A fresh model of this config.json on the meta device, in bfloat16.

    Args:
        config: the mapping in config.json; one without a ``model_type`` is taken for a Llama's.

    Raises:
        BadInput: transformers can build none; the message says what is missing.
    """
    from transformers import AutoConfig

    plain = {key: value for key, value in config.items() if key not in _NOT_OF_SHAPES}
    model_type = str(plain.pop("model_type", ""))
    plain.setdefault("pad_token_id", None)  # a family's usual one may lie beyond this vocabulary
    missing = [key for key in _LLAMA if plain.get(key) is None] if not model_type else []
    if missing:
        raise BadInput(
            f"the model's configuration lacks {', '.join(missing)}; pass the mapping in its config.json."
        )
    try:
        hf_config = AutoConfig.for_model(model_type or "llama", **plain)
        with torch.device("meta"):
            model = auto_class_of(hf_config).from_config(hf_config, dtype=torch.bfloat16)
    except _CANNOT_BUILD as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise BadInput(
            f"no model of model_type {model_type or 'llama'!r} can be built of this configuration ({said}); "
            "pass the whole mapping in its config.json, of a family that transformers has."
        ) from error
    return model


def auto_class_of(config: Any) -> Any:
    """transformers' Auto class that makes the language model of a config: of text alone, or one that sees."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def class_of(config: Any) -> Any:
    """The class that `auto_class_of` makes a model of; None where more than the config's kind decides."""
    mapping = auto_class_of(config)._model_mapping
    if getattr(config, "auto_map", None) or type(config) not in mapping:
        return None
    kind = mapping[type(config)]
    return kind if isinstance(kind, type) else None


def model_of_config(config: Mapping[str, Any]) -> Any:
    """`built_without_memory`, kept: to be read, never changed."""
    return _kept(json.dumps(config, sort_keys=True, default=str))


@lru_cache(maxsize=4)
def _kept(text: str) -> Any:
    return built_without_memory(json.loads(text))


def numbers_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json's text part with the usual names for the usual numbers, whatever the family calls them.

    Args:
        config: the mapping in config.json, of a text model or of one that sees as well.

    Raises:
        BadInput: the configuration lacks a number that is needed.
    """
    text = {**config, **(config.get("text_config") or {})}
    if all(text.get(name) is not None for name in _LLAMA[:4]):
        return text
    text_config: Any = model_of_config(config).config.get_text_config()
    usual = (*_LLAMA[:4], "num_key_value_heads", "head_dim", "max_position_embeddings")
    numbers = {name: value for name in usual if (value := getattr(text_config, name, None)) is not None}
    missing = [name for name in _LLAMA[:4] if name not in numbers]
    if missing:
        raise BadInput(
            f"the configuration of {text_config.model_type!r} says nothing of {', '.join(missing)}, without "
            "which no memory can be predicted; load the model to see what it takes."
        )
    return {**text_config.to_dict(), **numbers}


def in_float32(model: nn.Module) -> set[str]:
    """Names of the parameters that transformers keeps in float32 in a model that is loaded in bfloat16."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if not patterns:
        return set()
    pattern = re.compile("|".join(rf"(^|\.){re.escape(p)}(\.|$)" for p in sorted(patterns)))
    return {name for name, _ in model.named_parameters() if pattern.search(name)}


__all__ = [
    "LayerShapes",
    "built_without_memory",
    "in_float32",
    "layer_shapes",
    "model_of_config",
    "numbers_of",
]
