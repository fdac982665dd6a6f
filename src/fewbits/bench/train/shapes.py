"""What is trained: the shape of a model, made of a configuration alone, and the tokens it sees."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = ALPHA = 16
WEIGHTS_SEED, DATA_SEED = 0, 1234

_COMMON = {
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "attention_bias": False,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN3 = {
    **_COMMON,
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
_LLAMA = {
    **_COMMON,
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_parameters": _LLAMA3_ROPE,
}
SHAPES: dict[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen3-0.6b": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "tiny": {
        **_LLAMA,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model to be made with random weights.

    Attributes:
        name: as in the table.
        fields: of its config.json.
    """

    name: str
    fields: Mapping[str, Any]

    def config(self) -> Any:
        """The configuration as transformers has it."""
        from transformers import AutoConfig

        fields = dict(self.fields)
        return AutoConfig.for_model(fields.pop("model_type"), **fields)


def shape_of(name: str) -> Shape:
    """A shape by its name, or from a config.json.

    Raises:
        BadInput: neither.
    """
    if name in SHAPES:
        return Shape(name=name, fields=SHAPES[name])
    path = Path(name)
    if not path.is_file():
        raise BadInput(f"{name!r} is no shape: write {', '.join(SHAPES)} or the path of a config.json.")
    fields = json.loads(path.read_text(encoding="utf-8"))
    if "model_type" not in fields:
        raise BadInput(f"{path} has no model_type: give the config.json of a language model.")
    dropped = ("architectures", "dtype", "torch_dtype", "transformers_version", "quantization_config")
    return Shape(
        name=path.resolve().parent.name, fields={k: v for k, v in fields.items() if k not in dropped}
    )


def batch_of(text: str) -> tuple[int, int]:
    """``4x2048`` as (sequences, tokens in each).

    Raises:
        BadInput: it is not of that form.
    """
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None or "0" in match.groups():
        raise BadInput(f"{text!r} is no batch: write sequences x tokens, such as 4x2048.")
    return int(match[1]), int(match[2])


def random_model(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A model with the weights that everyone gets: random, from one seed, made on the device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(WEIGHTS_SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.to(device)


def batches(vocab_size: int, batch: tuple[int, int], count: int, device: torch.device) -> list[Tensor]:
    """The tokens of ``count`` steps, (sequences, tokens) each; the same for everyone."""
    generator = torch.Generator(device=device).manual_seed(DATA_SEED)
    return [torch.randint(0, vocab_size, batch, device=device, generator=generator) for _ in range(count)]


def flops_per_token(config: Any, length: int, *, full: bool) -> float:
    """Operations of the products that one training token cannot do without.

    Forward and gradient of the inputs, with ``full`` the gradient of the weights too, causal attention; no
    recomputation, and not the 1 % of the adapters.
    """
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    keys = config.num_key_value_heads * head_dim
    linears = layers * (
        2 * hidden * heads * head_dim + 2 * hidden * keys + 3 * hidden * config.intermediate_size
    )
    products = linears + config.vocab_size * hidden
    return float((6 if full else 4) * products + 3.5 * layers * 2 * length * heads * head_dim)
