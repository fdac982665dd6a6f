"""A tiny model of every family, made from its config; in a test: ``from tests.models.tiny import tiny``."""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 16, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": False},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16},
    "phi3": {"tie_word_embeddings": False},
}
FAMILIES = tuple(_CHANGES)


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A config of this family, small enough for a test."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **{**_COMMON, **_CHANGES[model_type], **changes})


def tiny(model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of this family with random weights; norms and biases too, so that no error can hide there."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        tiny_config(model_type, **changes), dtype=dtype, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter.dim() == 2:
                parameter.mul_(4)
    return model.eval()


def tokens(rows: int = 2, length: int = 24, *, seed: int = 1) -> torch.Tensor:
    """Random token ids (rows, length), none of them special."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
