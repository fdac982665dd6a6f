"""Tiny models of families that run unfused, with or without a spec, all that is special turned on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fewbits.families.catalog import SPECS
from tests.models.loading import tokenizer
from tests.models.tiny import VOCAB

_ENDS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDE = {
    **_ENDS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "granite": {
        **_WIDE, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.05, "attention_bias": True, "mlp_bias": True,
    },
    "olmo2": {**_WIDE, "tie_word_embeddings": False},
    "smollm3": {**_WIDE, "no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 16},
    "cohere": {**_WIDE, "logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {**_WIDE, "logit_scale": 0.25, "sliding_window": 16},
    "starcoder2": {**_WIDE, "sliding_window": 16, "use_bias": True},
    "stablelm": {**_WIDE, "use_qkv_bias": True, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    "gpt_neox": {
        **_ENDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 128, "rotary_pct": 0.5,
    },
    "gpt2": {**_ENDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "opt": {
        **_ENDS, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 128, "word_embed_proj_dim": 32,
    },
    "falcon": {
        **_ENDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2,
        "new_decoder_architecture": True, "bias": True, "max_position_embeddings": 128,
    },
}  # fmt: skip
UNFUSED = tuple(_SPECIAL)  # the fused decoder computes none of them, or not all their layers
UNWRITTEN = tuple(name for name in UNFUSED if name not in SPECS)


def unwritten(model_type: str, *, seed: int = 0, **changes: Any) -> Any:
    """A model of this family with random weights, biases and norms, in evaluation mode and float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**_SPECIAL[model_type], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def save_unwritten(folder: Path, model_type: str, **changes: Any) -> Any:
    """Write such a model with a tokenizer of characters into ``folder``; returns the model."""
    model = unwritten(model_type, **changes)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model
