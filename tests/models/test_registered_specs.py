"""A user's own spec: what does not fit its model is refused by name, and what fits is taken as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import fewbits
from fewbits.errors import BadInput, SpecMismatch
from fewbits.families import registry
from fewbits.families.catalog import LLAMA, SPECS
from fewbits.families.spec import MLP, Attention, Experts, Norms
from fewbits.host.spec import spec_for
from tests.models.mixtures import MIXTURES, mixture
from tests.models.tiny import FAMILIES, tiny
from tests.models.unwritten import UNFUSED, unwritten


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"layers": "model.layers.0.mlp"}, r"names its layers as 'model.layers.0.mlp', which is a LlamaMLP"),
    ({"embed": "model.norm"}, r"has embed='model.norm'; the model's own is 'model.embed_tokens'"),
    ({"head": "model.embed_tokens"}, r"the model's own is 'lm_head'"),
    ({"final_norm": "model.layers.0.input_layernorm"}, r"must be the norm behind the last layer"),
    ({"attention": Attention(output="self_attn.out_proj")}, r"linear 'self_attn.out_proj'; no layer has"),
    ({"attention": Attention(inputs=("self_attn.q_proj",))}, r"names no self_attn.k_proj, self_attn.v_proj;"),
    ({"attention": Attention(path="mlp")}, r"must be the module that holds 'self_attn.o_proj'"),
    ({"attention": Attention(multiplier="nope")}, r"Attention.multiplier='nope'.*no such field"),
    ({"mlp": MLP(inputs=("mlp.up_proj",), is_gated=False)}, r"names no mlp.gate_proj"),
    ({"mlp": MLP(activation="hidden_activation")}, r"MLP.activation='hidden_activation'"),
    ({"mlp": None}, r"names no mlp.down_proj, mlp.gate_proj, mlp.up_proj"),
    ({"norm": Norms(query="self_attn.q_norm")}, r"names a norm 'self_attn.q_norm'"),
    ({"towers": ("model.layers",)}, r"names a tower 'model.layers'"),
    ({"experts": Experts()}, r"names experts 'mlp.experts'"),
    ({"logits_divisor": "logits_scaling"}, r"logits_divisor='logits_scaling'"),
]


def test_a_spec_that_does_not_fit_its_model_is_refused_by_name() -> None:
    """A linear under a wrong name was left in 16 bits and without an adapter; nothing said so."""
    model = tiny("llama")
    for changes, message in UNFIT:
        fewbits.register_family(replace(LLAMA, **changes), replace=True)
        with pytest.raises(SpecMismatch, match=message):
            fewbits.convert(model, "qlora_nf4")
        with pytest.raises(SpecMismatch, match=message):
            fewbits.fuse(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "self_attn"}, r"ModelSpec.attention is 'self_attn'; it must be an Attention or None"),
        ({"attention": Attention(inputs="self_attn.qkv")}, r"Attention.inputs is .*must be a tuple"),  # type: ignore[arg-type]
        ({"attention": Attention(inputs=("q", "k"))}, r"names 2 linears"),
        ({"attention": Attention(rotary="pair")}, r"must be 'halves' or 'pairs' or 'none'"),  # type: ignore[arg-type]
        ({"mlp": MLP(is_gated=False)}, r"MLP.inputs names 2 linears"),
        ({"norm": Norms(offset="1")}, r"Norms.offset is '1'; it must be a number"),  # type: ignore[arg-type]
        ({"left": ("mlp.gate",)}, r"ModelSpec.left"),
        ({"generic": True}, r"leave it out"),
    ],
)
def test_values_that_no_model_has_are_refused_at_once(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        fewbits.register_family(replace(LLAMA, **changes), replace=True)
    assert not registry._REGISTERED


@pytest.mark.parametrize("kind", sorted({*FAMILIES, *MIXTURES, *UNFUSED} & set(SPECS)))
def test_a_spec_that_fits_is_taken(kind: str) -> None:
    """fewbits' own specs, registered by a user: plain, packed and with adapters, and without a head."""
    from peft import get_peft_model

    spec = replace(SPECS[kind], gguf=SPECS[kind].gguf)
    fewbits.register_family(spec, replace=True)
    model = tiny(kind) if kind in FAMILIES else mixture(kind) if kind in MIXTURES else unwritten(kind)
    assert spec_for(model) is spec and spec_for(model.base_model) is spec
    fewbits.convert(model, "qlora_nf4")
    adapted = get_peft_model(model, fewbits.lora_config(model=model, r=2))
    assert spec_for(adapted) is spec
