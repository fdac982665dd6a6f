"""Conversion replaces instances, changes no class, and its identity changes no number."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fewbits
from fewbits.decoder.fuse import fusion_of
from fewbits.errors import BadInput, SpecMismatch, Unsupported
from fewbits.formats import E4M3, INT4_G64, INT8, NF4
from fewbits.formats.kv_cache import get_kv_cache
from fewbits.host.spec import spec_for
from fewbits.models.packing.convert import convert, explain, linears_to_replace, restore
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.linear import LowPrecisionLinear, QuantizedLinear
from fewbits.nn.norm import RMSNorm
from fewbits.recipes import QAT, Recipe, Rule, get_recipe
from tests.models.tiny import FAMILIES, tiny, tokens

IDENTITY = Recipe(name="identity")
PACK = Recipe(name="pack", linear=Rule(weight=NF4))


def loss_and_gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    x = tokens()
    model.zero_grad()
    loss = model(x, labels=x, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fuse_norms", [False, True])
def test_identity_recipe_changes_no_number(family: str, fuse_norms: bool) -> None:
    model = tiny(family)
    loss, gradients = loss_and_gradients(model)
    receipt = convert(model, IDENTITY, fuse_norms=fuse_norms, strict=True)
    loss_after, gradients_after = loss_and_gradients(model)
    assert len(receipt.changes) == (2 * len(spec_for(model).norms) + 1 if fuse_norms else 0)
    assert gradients.keys() == gradients_after.keys()
    if not fuse_norms:
        assert torch.equal(loss, loss_after)
        assert all(torch.equal(g, gradients_after[n]) for n, g in gradients.items())
        return
    # Each of up to 6 norms a layer computes the same float32 expression in another order: a few units of
    # 2^-24 a norm, and the gradient passes 2 layers twice. 2^-24 * 64 bounds that with room for the model's
    # own amplification.
    torch.testing.assert_close(loss_after, loss, rtol=2**-24 * 64, atol=0)
    for name, gradient in gradients.items():
        error = (gradients_after[name] - gradient).norm() / gradient.norm()
        assert error <= 2**-24 * 64, (name, error)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_model_is_the_model_with_rounded_weights(family: str) -> None:
    model, rounded = tiny(family), tiny(family)
    receipt = convert(model, PACK, strict=True, fuse_norms=False)
    for name in linears_to_replace(rounded, PACK):
        linear = rounded.get_submodule(name)
        linear.weight.data = NF4.fake_quantize(linear.weight.data)
        assert isinstance(model.get_submodule(name), QuantizedLinear)
    x = tokens()
    assert torch.equal(model(x).logits, rounded(x).logits)
    assert receipt.bytes_after < receipt.bytes_before / 6  # 4.5 bits, and Qwen2's biases in float32
    assert len(receipt.changes) == 2 * len(spec_for(model).linears)


def test_linears_to_replace_works_on_a_meta_model_and_convert_too() -> None:
    with torch.device("meta"):
        model = tiny("llama")
    rules = linears_to_replace(model, PACK)
    assert len(rules) == 14
    assert set(rules.values()) == {Rule(weight=NF4)}
    convert(model, PACK)
    real = tiny("llama")
    convert(real, PACK)
    expected = {n: (p.shape, p.dtype) for n, p in real.named_parameters()}
    assert {n: (p.shape, p.dtype) for n, p in model.named_parameters()} == expected
    assert all(p.device.type == "meta" for p in model.parameters())
    model.load_state_dict(real.state_dict(), assign=True)
    for module, twin in zip(model.modules(), real.modules(), strict=True):
        for key, buffer in twin.named_buffers(recurse=False):
            setattr(module, key, buffer)
    assert torch.equal(model(tokens()).logits, real(tokens()).logits)
    restore(model)
    assert {type(m) for m in model.modules()}.isdisjoint({QuantizedLinear, RMSNorm})
    assert torch.equal(model.model.norm.weight, real.model.norm.weight)


def test_rules_skips_and_overrides() -> None:
    model = tiny("llama")
    recipe = replace(
        PACK,
        skip=("*.layers.0.*",),
        overrides=(
            ("*.down_proj", Rule(weight=INT8)),
            ("*.o_proj", Rule(activation=E4M3)),
            ("lm_head", Rule(weight=INT8)),
        ),
    )
    receipt = convert(model, recipe)
    layer = model.model.layers[1]
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert layer.mlp.up_proj.format == NF4
    assert layer.mlp.down_proj.format == INT8
    assert type(layer.self_attn.o_proj) is LowPrecisionLinear
    assert model.lm_head.format == INT8
    reasons = {left.name: left.reason for left in receipt.left}
    assert reasons["model.layers.0.mlp.up_proj"] == "the recipe leaves it as it is"
    assert model(tokens()).logits.isfinite().all()


def test_a_receipt_names_what_a_format_changes() -> None:
    coarse = replace(PACK, linear=Rule(weight=replace(NF4, block=32)))
    model = tiny("llama")
    assert "-> QuantizedLinear nf4 with block 32 " in str(convert(model, coarse))
    assert "-> QuantizedLinear nf4  " in str(convert(tiny("llama"), PACK))


def test_receipt_says_what_and_why() -> None:
    model = tiny("gemma2")
    receipt = convert(model, PACK)
    text = str(receipt)
    assert text.startswith("gemma2, recipe pack: 23 modules replaced")
    assert "model.layers.*.self_attn.q_proj" in text
    assert "Linear -> QuantizedLinear nf4" in text
    assert "lm_head" in text
    assert "its weight is the embedding's" in text
    assert "Gemma2RMSNorm -> RMSNorm" in text
    assert explain(model) is receipt
    assert model.lm_head.weight is model.model.embed_tokens.weight
    plain = explain(tiny("llama"))
    assert "without a recipe: 0 modules replaced" in str(plain) and "no linear is packed" in str(plain)


class OddLinear(nn.Linear):
    pass


def test_strict_refuses_a_mismatch_before_anything_is_changed() -> None:
    model = tiny("llama")
    model.model.layers[0].mlp.extra = nn.Linear(2, 2)
    odd = OddLinear(64, 64, bias=False)
    model.model.layers[1].self_attn.q_proj = odd
    with pytest.raises(SpecMismatch, match=r"q_proj: it is an OddLinear.*use strict=False"):
        convert(model, PACK, strict=True)
    assert not any(isinstance(m, QuantizedLinear) for m in model.modules())
    receipt = convert(model, PACK)
    assert {left.name for left in receipt.mismatches} == {
        "model.layers.0.mlp.extra",
        "model.layers.1.self_attn.q_proj",
    }
    assert model.model.layers[1].self_attn.q_proj is odd


def test_converting_twice_or_over_adapters_is_refused() -> None:
    from fewbits.models.adapting.adapters import get_peft_model

    model = tiny("llama")
    convert(model, PACK)
    with pytest.raises(Unsupported, match=r"converted already; call fewbits.restore"):
        convert(model, PACK)
    adapted = get_peft_model(tiny("llama"))
    with pytest.raises(Unsupported, match="has adapters already"):
        convert(adapted, PACK)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen2"])
def test_restore(family: str) -> None:
    model = tiny(family)
    before = copy.deepcopy(model)
    x = tokens()
    convert(model, PACK, keep_original=True)
    receipt = restore(model)
    assert "(the original)" in str(receipt)
    assert torch.equal(model(x).logits, before(x).logits)
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]

    convert(model, PACK, fuse_norms=False)
    packed_logits = model(x).logits
    assert "(dequantised weight)" in str(restore(model))
    assert torch.equal(model(x).logits, packed_logits)
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    with pytest.raises(Unsupported, match="nothing to restore"):
        restore(model)


def adapted(keep_original: bool) -> nn.Module:
    model = tiny("llama")
    convert(model, PACK, keep_original=keep_original)
    model = fewbits.get_peft_model(model, r=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(3))
    return model.eval()


def test_restored_originals_have_the_dtype_and_the_biases_of_now() -> None:
    model = tiny("qwen2")
    weight = model.model.layers[0].self_attn.q_proj.weight.detach().clone()
    convert(model, PACK, keep_original=True)
    model.bfloat16()
    layer = model.model.layers[0].self_attn.q_proj
    layer.bias = nn.Parameter(torch.full_like(layer.bias, 3.0))  # as a loader puts one there
    restore(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, weight.bfloat16())
    assert model.model.layers[0].self_attn.q_proj.bias is layer.bias


@pytest.mark.filterwarnings("ignore:merging into weights")
def test_restore_loses_no_merged_adapter() -> None:
    """The originals that were kept know nothing of it."""
    model = adapted(True).merge_and_unload()
    expected = model(tokens()).logits
    receipt = fewbits.restore(model)
    assert "(dequantised weight)" in str(receipt) and torch.equal(model(tokens()).logits, expected)


@pytest.mark.filterwarnings("ignore:merging into weights")
@pytest.mark.parametrize("keep_original", [True, False])
def test_a_model_with_merged_adapters_is_not_restored_and_stays_as_it_is(keep_original: bool) -> None:
    """PEFT could not have unmerged them any more, and of originals that were kept they were missing."""
    model = adapted(keep_original)
    before = model(tokens()).logits
    fewbits.fuse(model)
    model.merge_adapter()
    with pytest.raises(Unsupported, match=r"unmerge_adapter\(\)\) before restore\(\)"):
        fewbits.restore(model)
    assert fusion_of(model) is not None and any(isinstance(m, QuantizedLinear) for m in model.modules())
    model.unmerge_adapter()
    assert torch.allclose(model(tokens()).logits, before, atol=1e-4)
    fewbits.restore(model)


def test_classes_and_globals_are_untouched() -> None:
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.llama import modeling_llama

    from fewbits.models.adapting.adapters import get_peft_model

    touched = [
        getattr(module, name)
        for module in (modeling_llama, modeling_gemma2)
        for name in dir(module)
        if isinstance(getattr(module, name), type) and issubclass(getattr(module, name), nn.Module)
    ]
    touched += [nn.Linear, nn.Module]
    for family in ("llama", "gemma2"):
        tiny(family)  # with the first model of a class transformers keeps facts about it there
    before = {cls: dict(vars(cls)) for cls in touched}
    functions = (F.cross_entropy, F.linear, F.rms_norm, modeling_llama.apply_rotary_pos_emb)
    for family in ("llama", "gemma2"):
        model = tiny(family)
        convert(model, PACK)
        get_peft_model(model)(tokens(), labels=tokens()).loss.backward()
        restore(tiny_converted(family))
    assert len(touched) > 10
    assert {cls: dict(vars(cls)) for cls in touched} == before
    assert functions == (F.cross_entropy, F.linear, F.rms_norm, modeling_llama.apply_rotary_pos_emb)


def tiny_converted(family: str) -> nn.Module:
    model = tiny(family)
    convert(model, PACK)
    return model


def test_qat_recipe_gives_fake_quantised_linears() -> None:
    model = tiny("llama")
    recipe = Recipe(name="q", qat=QAT(weight=INT4_G64, activation=INT8), skip=("*.down_proj",))
    assert linears_to_replace(model, recipe) == {}
    weight = model.model.layers[0].mlp.up_proj.weight
    convert(model, recipe)
    fake = model.model.layers[0].mlp.up_proj
    assert type(fake) is FakeQuantizedLinear
    assert fake.weight is weight
    assert fake.weight_format == INT4_G64
    assert fake.activation_format == INT8
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear
    restore(model)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert model.model.layers[0].mlp.up_proj.weight is weight


def test_casting_a_packed_model_leaves_its_codes_and_scales() -> None:
    model = tiny_converted("llama")
    layer = model.model.layers[0].mlp.up_proj
    parts = {n: p.clone() for n, p in layer.packed.parts.items()}
    model.bfloat16()
    assert layer.dtype == torch.bfloat16
    assert all(p.dtype == parts[n].dtype and torch.equal(p, parts[n]) for n, p in layer.packed.parts.items())
    assert model(tokens()).logits.dtype == torch.bfloat16
    assert copy.deepcopy(model)(tokens()).logits.equal(model(tokens()).logits)


def test_a_cache_is_said_or_refused() -> None:
    recipe = replace(PACK, kv_cache=get_kv_cache("int8"))
    assert "kv_cache=int8: generate() of FastLanguageModel's models" in str(convert(tiny("llama"), recipe))
    with pytest.raises(Unsupported, match="no layer of mistral attends to all that came before"):
        convert(tiny("mistral"), recipe)


def test_communication_is_the_trainers_to_apply() -> None:
    """`fewbits.training.setup.distribute` reads it from the recipe."""
    receipt = str(convert(tiny("llama"), replace(PACK, communication=INT8), strict=True))
    assert "communication=int8: gradients travel so" in receipt and "not applied" not in receipt


def test_a_recipe_by_name_and_as_plain_data() -> None:
    by_value, by_name, by_data = tiny("llama"), tiny("llama"), tiny("llama")
    convert(by_value, get_recipe("int8"))
    assert "recipe int8" in str(fewbits.convert(by_name, "int8"))
    fewbits.convert(by_data, {"name": "int8"})
    for model in (by_name, by_data):
        assert torch.equal(model(tokens()).logits, by_value(tokens()).logits)
    with pytest.raises(BadInput, match="no recipe named 'int9'; known: "):
        fewbits.convert(tiny("llama"), "int9")
    qat = fewbits.prepare_qat(tiny("llama"), "int4_qat")
    assert "FakeQuantizedLinear" in str(explain(qat))
