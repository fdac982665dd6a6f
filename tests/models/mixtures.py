"""Tiny mixtures of experts, with all that is special about each turned on."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fewbits.families.catalog import SPECS
from tests.models.loading import tokenizer
from tests.models.tiny import VOCAB

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "router_aux_loss_coef": 0.02, "output_router_logits": True},
    "qwen2_moe": {
        "num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [0], "decoder_sparse_step": 1,
    },
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 64, "head_dim": 16, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "clip_qkv": None},
    "granitemoe": {
        "num_local_experts": 4, "residual_multiplier": 0.22, "embedding_multiplier": 12.0,
        "attention_multiplier": 0.2, "logits_scaling": 2.0,
    },
    "deepseek_v3": {  # latent attention, groups of experts of which some are looked at, shared experts
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 64,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    },
    "glm4_moe": {
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "head_dim": 16,
        "first_k_dense_replace": 1, "use_qk_norm": True, "partial_rotary_factor": 0.5, "attention_bias": True,
        "moe_intermediate_size": 64,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 16},
}  # fmt: skip
MIXTURES = tuple(_SPECIAL)
UNWRITTEN_MIXTURES = tuple(name for name in MIXTURES if name not in SPECS)


def mixture(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**_COMMON, **_SPECIAL[kind], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def save_mixture(folder: Any, kind: str) -> None:
    mixture(kind).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
