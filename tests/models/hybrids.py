"""Tiny hybrids: attention beside gated delta nets, Mamba-2, short convolutions; all that is special on."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.loading import tokenizer
from tests.models.tiny import VOCAB

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
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SPECIAL: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_DELTA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1, "mlp_only_layers": [1],
    },
    "qwen3_5_text": _DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        **_EXPERTS, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "num_experts": 4,
        "num_dense_layers": 1,
    },
    "falcon_h1": {
        **_MAMBA2, "head_dim": 16, "mamba_d_ssm": 128, "mamba_rms_norm": True,
        "ssm_multipliers": [0.5, 0.7, 0.8, 0.9, 1.1], "mlp_multipliers": [0.7, 1.2], "key_multiplier": 0.8,
        "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0,
    },
    "granitemoehybrid": {
        **_MAMBA2, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 64, "embedding_multiplier": 2.0, "residual_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "nemotron_h": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "mlp", "moe"], "head_dim": 16,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16,
    },
}  # fmt: skip
HYBRIDS = tuple(_SPECIAL)


def hybrid(kind: str) -> Any:
    """A model of this family with random weights, norms and decays, in evaluation mode and float32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**_COMMON, **_SPECIAL[kind]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


def save_hybrid(folder: Any, kind: str) -> None:
    hybrid(kind).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
