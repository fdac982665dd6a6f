"""One `ModelSpec` for each family that fewbits knows; defaults are Llama's.

To add one: write its spec, list it in `_DENSE`, `_UNFUSED` or `_EXPERTS`, and add a tiny config with all that
is special turned on to tests/models/tiny.py, unwritten.py (not fused in every layer) or mixtures.py
(experts); the tests run over both. Then renew docs/reference/families.md by scripts/families_table.py, and
add a line to CHANGELOG.md: docs/guide/adding-a-model.md has the steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fewbits.families.spec import MLP, Attention, Experts, ModelSpec, Norms

_HEAD_NORMS = Norms(query="self_attn.q_norm", key="self_attn.k_norm")
_SANDWICH_NORMS = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    offset=1.0,
)
_PRE_ATTENTION: dict[str, Any] = {"multiplier": "query_pre_attn_scalar", "multiplier_power": -0.5}

LLAMA = ModelSpec(model_type="llama", gguf="llama")
MISTRAL = replace(LLAMA, model_type="mistral", attention=Attention(window="config"))
QWEN2 = replace(LLAMA, model_type="qwen2", gguf="qwen2")
QWEN3 = replace(LLAMA, model_type="qwen3", norm=_HEAD_NORMS, gguf="qwen3")
GEMMA = ModelSpec(model_type="gemma", norm=Norms(offset=1.0))
GEMMA2 = ModelSpec(
    model_type="gemma2",
    norm=_SANDWICH_NORMS,
    attention=Attention(soft_cap="attn_logit_softcapping", **_PRE_ATTENTION),
    mlp=MLP(activation="hidden_activation"),
    logits_soft_cap="final_logit_softcapping",
)
GEMMA3_TEXT = replace(
    GEMMA2,
    model_type="gemma3_text",
    norm=replace(_SANDWICH_NORMS, query="self_attn.q_norm", key="self_attn.k_norm"),
    attention=Attention(**_PRE_ATTENTION),
)
PHI3 = ModelSpec(  # Phi-3 and Phi-4
    model_type="phi3",
    attention=Attention(inputs=("self_attn.qkv_proj",), window="config"),
    mlp=MLP(inputs=("mlp.gate_up_proj",)),
)

GRANITE = ModelSpec(
    model_type="granite",
    attention=Attention(multiplier="attention_multiplier"),
    embedding_multiplier="embedding_multiplier",
    residual_multiplier="residual_multiplier",
    logits_divisor="logits_scaling",
)
OLMO2 = ModelSpec(
    model_type="olmo2",
    norm=Norms(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
        query="self_attn.q_norm",
        key="self_attn.k_norm",
        query_key_over="row",
    ),
)
SMOLLM3 = ModelSpec(model_type="smollm3", attention=Attention(rotary_layers="no_rope_layers"))  # 1: turned
COHERE = ModelSpec(
    model_type="cohere",
    norm=Norms(
        before_mlp=None,
        kind="layer",
        query="self_attn.q_norm",
        key="self_attn.k_norm",
        query_key_if="use_qk_norm",
    ),
    attention=Attention(rotary="pairs"),
    logits_multiplier="logit_scale",
)
COHERE2 = replace(COHERE, model_type="cohere2", norm=Norms(before_mlp=None, kind="layer"))
GEMMA3 = replace(  # the class that sees as well; its text model is Gemma 3's
    GEMMA3_TEXT,
    model_type="gemma3",
    layers="model.language_model.layers",
    embed="model.language_model.embed_tokens",
    final_norm="model.language_model.norm",
    towers=("model.vision_tower", "model.multi_modal_projector"),
)
_DENSE_LAYERS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_SHARED = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")
MIXTRAL = ModelSpec(
    model_type="mixtral",
    attention=Attention(window="config"),
    mlp=None,
    experts=Experts(count="num_local_experts", width="intermediate_size"),
    gguf="llama",
)
QWEN2_MOE = ModelSpec(
    model_type="qwen2_moe", mlp=None, experts=Experts(shared=_SHARED), some_layers=(*_DENSE_LAYERS, *_SHARED)
)
QWEN3_MOE = ModelSpec(
    model_type="qwen3_moe",
    norm=_HEAD_NORMS,
    mlp=None,
    experts=Experts(),
    some_layers=_DENSE_LAYERS,
    gguf="qwen3moe",
)
_SHARED_ALL = tuple(path.replace("shared_expert", "shared_experts") for path in _SHARED)
GLM4_MOE = ModelSpec(  # GLM-4.5 and 4.6
    model_type="glm4_moe",
    norm=replace(_HEAD_NORMS, query_key_if="use_qk_norm"),
    mlp=None,
    experts=Experts(count="n_routed_experts", shared=_SHARED_ALL),
    some_layers=(*_DENSE_LAYERS, *_SHARED_ALL),
)
OLMOE = ModelSpec(
    model_type="olmoe",
    norm=replace(_HEAD_NORMS, query_key_over="row"),
    attention=Attention(clip="clip_qkv"),
    mlp=None,
    experts=Experts(width="intermediate_size"),
    gguf="olmoe",
)
GRANITEMOE = replace(  # Granite 3's mixtures
    GRANITE,
    model_type="granitemoe",
    mlp=None,
    experts=Experts(
        path="block_sparse_moe.experts",
        router="block_sparse_moe.router",
        count="num_local_experts",
        width="intermediate_size",
        are_linears=False,
    ),
)

_PARALLEL_EXPERTS = {
    "granitemoeshared",
    "granitemoehybrid",
}  # one parameter in transformers 4, too


def experts_at(path: str, model_type: str) -> Experts:
    """What to know of the experts of a family that nobody wrote a spec for."""
    return Experts(path=path, are_linears=model_type not in _PARALLEL_EXPERTS)


_EXPERTS = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, GLM4_MOE, OLMOE, GRANITEMOE)
_DENSE = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3_TEXT, GEMMA3, PHI3)
_UNFUSED = (GRANITE, OLMO2, SMOLLM3, COHERE, COHERE2)
SPECS: dict[str, ModelSpec] = {spec.model_type: spec for spec in (*_DENSE, *_UNFUSED, *_EXPERTS)}

# Classes of transformers that inherit from nn.Linear and compute exactly what it does; a layer of ours may
# take their place. Other subclasses may do more, and stay as they are.
SAME_AS_LINEAR = ("FalconLinear",)
