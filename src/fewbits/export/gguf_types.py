"""Which GGUF type each tensor gets: llama.cpp's mixes, its fallbacks, and the encoders behind the types.

A method such as ``q4_k_m`` is a mix: most weights in one type, those that hurt most (half of the value and
down projections, the output head) in a better one. The rules are those of llama.cpp's own quantiser for dense
models without an importance matrix, so that a file from here has the sizes that its users know. A tensor
whose rows do not divide into a type's blocks falls back as there, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.formats import FORMATS
from fewbits.formats.gguf_layouts import LAYOUTS

# method: (type of most weights, name in gguf.LlamaFileType)
METHODS = {
    "f32": ("F32", "ALL_F32"),
    "f16": ("F16", "MOSTLY_F16"),
    "bf16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    "q6_k": ("Q6_K", "MOSTLY_Q6_K"),
    "q5_k_m": ("Q5_K", "MOSTLY_Q5_K_M"),
    "q5_k_s": ("Q5_K", "MOSTLY_Q5_K_S"),
    "q5_1": ("Q5_1", "MOSTLY_Q5_1"),
    "q5_0": ("Q5_0", "MOSTLY_Q5_0"),
    "q4_k_m": ("Q4_K", "MOSTLY_Q4_K_M"),
    "q4_k_s": ("Q4_K", "MOSTLY_Q4_K_S"),
    "q4_1": ("Q4_1", "MOSTLY_Q4_1"),
    "q4_0": ("Q4_0", "MOSTLY_Q4_0"),
    "q3_k_l": ("Q3_K", "MOSTLY_Q3_K_L"),
    "q3_k_m": ("Q3_K", "MOSTLY_Q3_K_M"),
    "q3_k_s": ("Q3_K", "MOSTLY_Q3_K_S"),
    "q2_k": ("Q2_K", "MOSTLY_Q2_K"),
    "iq4_nl": ("IQ4_NL", "MOSTLY_IQ4_NL"),
    "iq4_xs": ("IQ4_XS", "MOSTLY_IQ4_XS"),
    "tq2_0": ("TQ2_0", "MOSTLY_TQ2_0"),
    "tq1_0": ("TQ1_0", "MOSTLY_TQ1_0"),
}
_ALIASES = {
    "q5_k": "q5_k_m",
    "q4_k": "q4_k_m",
    "q3_k": "q3_k_m",
    "not_quantized": "bf16",
    "fast_quantized": "q8_0",
    "quantized": "q4_k_m",
}
_FALLBACK = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
}
_TERNARY, _TABLED = ("tq1_0", "tq2_0"), ("iq4_nl", "iq4_xs")
_FEW_EXPERTS = 8  # attention is then a small part of the model, and llama.cpp gives it more bits
_FINER_OUTPUT = ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq4_nl", "iq4_xs")
_UNBLOCKED = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Sizes:
    """What the rules ask about a model: its layers, query heads for each key head, if the head is tied.

    And how many experts a layer has; 0 for dense ones.
    """

    num_layers: int
    num_heads_per_kv: int
    head_is_tied: bool
    num_experts: int = 0


def import_gguf() -> Any:
    """The package ``gguf``.

    Raises:
        Unsupported: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise Unsupported(
            "writing GGUF needs the package gguf, which is not installed; run: pip install 'fewbits[export]'."
        ) from error
    return gguf


def method_named(name: str) -> str:
    """The method that a user's word means, in lower case and with aliases resolved.

    Raises:
        BadInput: there is no such method.
    """
    method = str(name).lower()
    method = _ALIASES.get(method, method)
    if method not in METHODS:
        raise BadInput(f"there is no GGUF method {name!r} here; it is one of {', '.join(METHODS)}.")
    return method


def type_of(name: str, shape: Sequence[int], method: str, sizes: Sizes) -> tuple[str, str | None]:
    """The type of one tensor, and the type it would have had if its rows allowed (None if it has that).

    Args:
        name: the tensor's GGUF name, such as "blk.0.ffn_down.weight".
        shape: of the tensor, rows first.
        method: a key of `METHODS`.
        sizes: of the model.
    """
    common = METHODS[method][0]
    if (
        len(shape) < 2 or "_norm." in name or ".ffn_gate_inp." in name
    ):  # norms, biases, and what chooses experts
        return "F32", None
    if common in _UNBLOCKED:
        return common, None
    kind = _wanted(name, shape[-1], method, sizes)
    if shape[-1] % _block(kind) == 0:
        return kind, None
    fallback = _FALLBACK.get(kind, kind)
    return (fallback if shape[-1] % _block(fallback) == 0 else "F16"), kind


def _block(kind: str) -> int:
    return LAYOUTS[kind].size


def _wanted(name: str, columns: int, method: str, sizes: Sizes) -> str:
    common = METHODS[method][0]
    if name == "output.weight" or (name == "token_embd.weight" and sizes.head_is_tied):
        if columns % _block(common):
            return "Q8_0"
        return "Q8_0" if common == "Q8_0" else "Q6_K"
    if name == "token_embd.weight" and method in _TERNARY:
        return "Q4_K"
    if name.startswith("blk."):
        layer, tensor = int(name.split(".")[1]), name.split(".")[2].removesuffix("_exps")
        if sizes.num_experts == _FEW_EXPERTS and tensor in ("attn_k", "attn_v"):
            return "Q8_0"
        if sizes.num_experts == _FEW_EXPERTS and tensor == "attn_output" and method in _FINER_OUTPUT:
            return "Q5_K"
        rule = _RULES.get(tensor)
        if rule is not None:
            return rule(method, layer, sizes) or common
    return common


def _has_more_bits(layer: int, sizes: Sizes) -> bool:
    """The first and last eighth of the layers, and every third one between."""
    n = sizes.num_layers
    return layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2


def _value_type(method: str, layer: int, sizes: Sizes) -> str | None:
    kind = None
    if method == "q2_k":
        kind = "Q4_K" if sizes.num_heads_per_kv >= 4 else "Q3_K"
    elif method == "q3_k_m":
        kind = "Q5_K" if layer < 2 else "Q4_K"
    elif method == "q3_k_l" or (method == "q4_k_s" and layer < 4):
        kind = "Q5_K"
    elif method in ("q4_k_m", "q5_k_m") and _has_more_bits(layer, sizes):
        kind = "Q6_K"
    elif method in _TABLED and sizes.num_heads_per_kv >= 4:
        kind = "Q5_K"
    if sizes.num_layers == 80 and (kind or METHODS[method][0]) in ("Q3_K", "Q4_K"):
        return "Q5_K"  # a 70B model's value projection is small and counts much
    return kind


def _down_type(method: str, layer: int, sizes: Sizes) -> str | None:
    n = sizes.num_layers
    if method in ("q4_k_m", "q5_k_m") and _has_more_bits(layer, sizes):
        return "Q6_K"
    if method in ("q4_k_s", *_TABLED) and layer < n // 8:
        return "Q5_K"
    if method == "q3_k_m":
        return "Q5_K" if layer < n // 16 else "Q4_K"
    return {"q2_k": "Q3_K", "q3_k_l": "Q5_K"}.get(method)


def _output_type(method: str, layer: int, sizes: Sizes) -> str | None:
    return {"q2_k": "Q3_K", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K"}.get(method)


_RULES = {"attn_v": _value_type, "ffn_down": _down_type, "attn_output": _output_type}


def encode(weight: Tensor, kind: str, importance: Tensor | None = None) -> Any:
    """The bytes of a weight in a type.

    Args:
        weight: (N, K) or (K,), or (E, N, K) of experts, floating point.
        kind: the type's name in ``gguf.GGMLQuantizationType``.
        importance: (K,), how much the squared error of each column counts; None: all the same.

    Returns:
        A numpy array: float32 or float16 of weight's shape, or uint8 (N, bytes of a row).
    """
    if (
        weight.dim() > 2
    ):  # of all experts, (E, N, K): a search takes several times the memory of what it rounds
        return np.stack([encode(one, kind, importance) for one in weight])
    if kind in LAYOUTS:
        return FORMATS[f"gguf_{kind.lower()}"].quantize_for(weight, importance).codes.cpu().numpy()
    gguf = import_gguf()
    values = weight.detach().to("cpu", torch.float32).numpy()
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
