"""Predicted bytes beside those of real models: dense ones, generic ones, experts, in several formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fewbits.errors import BadInput
from fewbits.families.shapes import linear_shapes
from fewbits.formats.kv_cache import get_kv_cache
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.adapting.predicted_memory import predict_memory
from fewbits.models.packing.convert import convert
from fewbits.models.packing.model_shapes import layer_shapes, model_of_config, numbers_of
from fewbits.recipes import LoRA, get_recipe, qlora_nf4
from tests.model_configs import LLAMA
from tests.models.mixtures import MIXTURES, mixture
from tests.models.tiny import tiny
from tests.models.unwritten import UNFUSED, unwritten

TABLES = 2 * 16 * 4  # of the rotary embedding, in float32: one for pairs of 32 channels, and its first values
MODELS: dict[str, Callable[[], Any]] = {
    **{kind: lambda kind=kind: tiny(kind) for kind in ("llama", "qwen3", "phi3", "gemma2")},
    **{kind: lambda kind=kind: unwritten(kind) for kind in UNFUSED},
    **{kind: lambda kind=kind: mixture(kind) for kind in MIXTURES},
}


@pytest.mark.parametrize("kind", MODELS)
def test_predicted_bytes_are_the_bytes_of_the_model(kind: str) -> None:
    for name in ("qlora_nf4", "int8", "float8_full"):
        model, recipe = MODELS[kind](), get_recipe(name)
        predicted = predict_memory(model.config.to_dict(), recipe, dtype_bytes=4)
        convert(model, recipe)
        assert predicted.weights == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        if recipe.lora is not None:
            adapted = get_peft_model(model, recipe.lora)
            assert predicted.lora == sum(p.nbytes for p in adapted.parameters() if p.requires_grad)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if name == "float8_full":
            assert predicted.gradients == trained * 4 and predicted.optimizer == trained * 8


def test_adapters_on_experts_are_counted_as_peft_has_them() -> None:
    targets = ("q_proj", "gate_proj", "up_proj", "down_proj")
    recipe = replace(qlora_nf4(), lora=LoRA(r=4, targets=targets))
    model = mixture("qwen3_moe")
    predicted = predict_memory(model.config.to_dict(), recipe)
    adapted = get_peft_model(model, recipe.lora)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert predicted.lora == trained * 2 and predicted.optimizer == trained * 8


def test_the_same_bytes_in_bfloat16() -> None:
    model = mixture("qwen3_moe").bfloat16()
    predicted = predict_memory(model.config.to_dict(), get_recipe("lora_bf16"))
    tables = sum(b.numel() * 4 for b in model.buffers())  # loaded, they stay in float32
    assert predicted.weights == sum(p.nbytes for p in model.parameters()) + tables


def test_predicted_memory() -> None:
    """Counted by hand for stories3m, whose 3,148,224 parameters the shared data's page states."""
    plain = predict_memory(LLAMA, get_recipe("lora_bf16"), dtype_bytes=4, training=False)
    assert plain.weights == 3_148_224 * 4 + TABLES
    linears = sum(n * k for n, k in linear_shapes(LLAMA).values()) * 6
    adapters = 16 * sum(n + k for n, k in linear_shapes(LLAMA).values()) * 6
    qlora = predict_memory(LLAMA, qlora_nf4(), num_tokens=100)
    rest = 3_148_224 - linears
    # 4 bits, 8 for 64 values, 32 for 64 * 256 (rounded up per tensor), one offset per tensor
    assert (
        qlora.weights - rest * 2 - TABLES
        == sum(
            n * k // 2 + n * k // 64 + 4 * -(-n * k // (64 * 256)) + 4
            for n, k in linear_shapes(LLAMA).values()
        )
        * 6
    )
    assert qlora.lora == adapters * 2
    assert qlora.optimizer == adapters * 8
    assert qlora.kv_cache == 6 * 2 * 100 * 64 * 2
    packed = predict_memory(LLAMA, replace(qlora_nf4(), kv_cache=get_kv_cache("int8")), num_tokens=100)
    # 6 layers of 2 heads of 32: 36 tokens of 32 codes and a scale of 2 bytes, 64 and 4 tokens in 16 bits
    assert packed.kv_cache == 6 * 2 * 2 * (36 * (32 + 2) + 68 * 32 * 2)
    assert qlora.total == qlora.weights + qlora.lora + qlora.gradients + qlora.optimizer + qlora.kv_cache
    full = predict_memory(LLAMA, get_recipe("float8_full"))
    assert full.optimizer == 3_148_224 * 8
    with pytest.raises(BadInput, match="lacks"):
        predict_memory({"hidden_size": 3}, qlora_nf4())


def test_phi3_has_fused_linears_of_the_same_size() -> None:
    fused = predict_memory({**LLAMA, "model_type": "phi3"}, get_recipe("lora_bf16"), training=False)
    assert fused.weights == predict_memory(LLAMA, get_recipe("lora_bf16"), training=False).weights


def test_a_layer_of_experts_counts_what_a_token_takes() -> None:
    model = mixture("qwen3_moe")  # 8 experts of 64 x 64 x 3, 2 of them for a token; attention 4 x 64 x 64
    for known in (layer_shapes(model), layer_shapes(model_of_config(model.config.to_dict()))):
        attention = 2 * 64 * 64 + 2 * 32 * 64
        assert (known.num_layers, known.hidden, known.chosen) == (2, 64, 2)
        assert known.values == attention + 8 * 3 * 64 * 64
        assert known.products == attention + 2 * 3 * 64 * 64
    recipe = qlora_nf4()
    convert(model, recipe)
    assert layer_shapes(get_peft_model(model, recipe.lora)) == known


def test_numbers_have_their_usual_names_whatever_the_family_calls_them() -> None:
    numbers = numbers_of(unwritten("gpt2").config.to_dict())
    assert (numbers["hidden_size"], numbers["num_hidden_layers"], numbers["num_attention_heads"]) == (
        64,
        2,
        4,
    )
    gpt2 = predict_memory(unwritten("gpt2").config.to_dict(), qlora_nf4(), num_tokens=10)
    assert gpt2.kv_cache == 2 * 2 * 10 * 64 * 2


def test_what_cannot_be_built_is_one_sentence() -> None:
    with pytest.raises(
        BadInput, match=r"no model of model_type 'nobody' can be built .*pass the whole mapping"
    ):
        predict_memory({"model_type": "nobody", "hidden_size": 64}, qlora_nf4())
    with pytest.raises(BadInput, match="no model of model_type 'llama' can be built"):
        predict_memory({**LLAMA, "model_type": "llama", "hidden_size": "wide"}, qlora_nf4())
