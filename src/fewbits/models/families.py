"""The families: what `fewbits.models.spec` knows about each, in a few lines each.

To add one: write its spec, list it in `SPECS`, add a tiny config in tests/models/tiny.py; the tests run over
both.
"""

from __future__ import annotations

from dataclasses import replace

from fewbits.models.spec import ModelSpec

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_SANDWICH_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")

LLAMA = ModelSpec(model_type="llama", linears=_ATTENTION + _MLP, norms=_NORMS)
MISTRAL = replace(LLAMA, model_type="mistral")
QWEN2 = replace(LLAMA, model_type="qwen2")
QWEN3 = replace(LLAMA, model_type="qwen3", norms=_NORMS + _HEAD_NORMS)
GEMMA = replace(LLAMA, model_type="gemma", norm_offset=1.0)
GEMMA2 = replace(GEMMA, model_type="gemma2", norms=_SANDWICH_NORMS, logits_are_final=False)
GEMMA3_TEXT = replace(GEMMA2, model_type="gemma3_text", norms=_SANDWICH_NORMS + _HEAD_NORMS)
PHI3 = ModelSpec(  # Phi-3 and Phi-4
    model_type="phi3",
    linears=("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    norms=_NORMS,
    fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
)

SPECS: dict[str, ModelSpec] = {
    spec.model_type: spec for spec in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3_TEXT, PHI3)
}
