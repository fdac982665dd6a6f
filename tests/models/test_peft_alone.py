"""PEFT's own calls, with its own configurations, over plain and packed bases; variants keep PEFT's layers."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from fewbits import convert, get_peft_model, load_adapter
from fewbits.decoder.fuse import fuse
from fewbits.errors import Unsupported
from fewbits.formats import E4M3
from fewbits.models.merging.branches import base_name
from fewbits.nn.linear import QuantizedLinear
from fewbits.nn.lora import LoRALinear
from fewbits.recipes import Recipe, Rule
from tests.models.loading import logits, packed_state, perturb, same
from tests.models.mixtures import mixture
from tests.models.tiny import tiny, tokens

NAMES = ["q_proj", "v_proj"]
VARIANTS: dict[str, dict[str, Any]] = {
    "use_dora": {"use_dora": True},
    "alora_invocation_tokens": {"alora_invocation_tokens": [5], "task_type": "CAUSAL_LM"},
    "use_bdlora": {"use_bdlora": "BdLoraConfig"},
    "velora_config": {"velora_config": "VeloraConfig"},
    "monteclora_config": {"monteclora_config": "MontecloraConfig"},
    "kasa_config": {"kasa_config": "KasaConfig"},
    "arrow_config": {"arrow_config": "ArrowConfig"},
}
MARKED = [f.name for f in dataclasses.fields(peft.LoraConfig) if f.metadata.get("is_lora_variant")]
TESTED = [name for name in MARKED if name != "arrow_config"]  # that needs adapters to route between


def base(recipe: str | None) -> Any:
    model = tiny("llama")
    if recipe is not None:
        convert(model, recipe)
    return model


def settings(name: str) -> dict[str, Any]:
    """What asks for a variant, with PEFT's default settings of it."""
    found = dict(VARIANTS[name])
    for key, value in found.items():
        if isinstance(value, str) and value.endswith("Config"):
            kind = getattr(peft, value, None) or getattr(peft.tuners.lora.config, value)
            if value == "BdLoraConfig":
                found[key] = kind(target_modules_bd_a=["v_proj"], target_modules_bd_b=["q_proj"], nblocks=2)
            else:
                found[key] = kind()
    return found


@pytest.mark.parametrize("recipe", ["qlora_nf4", "int8"])
@pytest.mark.parametrize("targets", [NAMES, "all-linear"])
def test_peft_alone_over_a_packed_base(recipe, targets, tmp_path):
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base(recipe), config)
    wrapped = [m for m in adapted.modules() if isinstance(m, PeftLinear)]
    assert len(wrapped) == 2 * (len(NAMES) if targets is NAMES else 7)
    adapted(tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None for n, p in adapted.named_parameters() if ".lora_" in n)
    expected = logits(adapted, tokens())
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base(recipe), tmp_path)
    assert torch.equal(logits(again, tokens()), expected)
    # the same adapter by our own layers, and by PEFT's over the decoded weights
    torch.testing.assert_close(logits(load_adapter(base(recipe), tmp_path), tokens()), expected)
    decoded = base(recipe)
    for name, layer in [(n, m) for n, m in decoded.named_modules() if isinstance(m, QuantizedLinear)]:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        plain.weight = nn.Parameter(layer.dequantize())
        decoded.set_submodule(name, plain)
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(decoded, tmp_path), tokens()), expected)


@pytest.mark.parametrize("safe", [True, False])
def test_peft_merges_into_a_packed_base_and_back(safe):
    model = base("qlora_nf4")
    before, plain = packed_state(model), logits(model, tokens())
    config = peft.LoraConfig(r=4, target_modules=NAMES, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.add_adapter("second", config)
    adapted.base_model.set_adapter(["default", "second"])
    expected = logits(adapted, tokens())
    with pytest.warns(UserWarning, match="rounded to it again"):
        adapted.merge_adapter(safe_merge=safe)
    merged = logits(adapted, tokens())
    assert not torch.equal(merged, plain)
    assert (merged - expected).norm() < 0.5 * (expected - plain).norm()
    with adapted.disable_adapter():  # PEFT unmerges first
        assert torch.equal(logits(adapted, tokens()), plain)
    adapted.base_model.unmerge_adapter()
    now = {base_name(name): part for name, part in packed_state(adapted).items()}
    assert same(now, before)
    torch.testing.assert_close(logits(adapted, tokens()), expected)


@pytest.mark.parametrize("recipe", [None, "qlora_nf4", "int8"])
@pytest.mark.parametrize("variant", TESTED)
def test_a_variant_computes_as_pefts_own_layers(variant, recipe):
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": NAMES, **settings(variant)}
    if variant == "kasa_config" and recipe is not None:
        with pytest.raises(Unsupported, match="kasa_config takes a part of the base weight away"):
            get_peft_model(base(recipe), **chosen)
        return
    torch.manual_seed(0)
    ours = get_peft_model(base(recipe), **chosen)
    torch.manual_seed(0)
    alone = peft.get_peft_model(base(recipe), peft.LoraConfig(**{"task_type": "CAUSAL_LM", **chosen}))
    # our layer unmerges DoRA to the bit, where PEFT's would round once more
    unmerges = variant == "use_dora" and recipe is not None
    assert any(isinstance(m, LoRALinear) for m in ours.modules()) == unmerges
    for model in (ours, alone):
        perturb(model).eval()
    options = {"alora_offsets": [3, 3]} if variant.startswith("alora") else {}
    with torch.no_grad():
        found, expected = (model(tokens(), **options).logits for model in (ours, alone))
    assert torch.equal(found, expected)
    loss = ours.train()(tokens(), labels=tokens(), **options).loss
    loss.backward()
    assert any(p.grad is not None and p.grad.any() for n, p in ours.named_parameters() if "lora_" in n)


def test_every_marked_field_is_tested():
    assert set(MARKED) == set(VARIANTS)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga"])
def test_what_changes_the_base_is_refused_over_a_packed_one(init):
    with pytest.raises(Unsupported, match=f"init_lora_weights='{init}' takes a part of the base"):
        get_peft_model(base("int8"), init_lora_weights=init)


def test_dora_over_a_packed_base_is_dora_over_its_decoded_weights():
    packed, decoded = base("qlora_nf4"), tiny("llama")
    for name, layer in packed.named_modules():
        if isinstance(layer, QuantizedLinear):
            decoded.get_submodule(name).weight.data = layer.dequantize()
    config = {"use_dora": True, "r": 4, "target_modules": NAMES, "seed": 1}
    one, two = (perturb(get_peft_model(model, **config)) for model in (packed, decoded))
    torch.testing.assert_close(logits(one, tokens()), logits(two, tokens()))


@pytest.mark.parametrize("how", ["modules_to_save", "requires_grad", "fused", "lora"])
def test_stored_weights_of_floating_dtype_are_not_silently_frozen(how):
    """torch refuses gradients for integers; codes in float8, and scales, it lets "train" without one."""
    model = tiny("llama")
    convert(model, Recipe(name="stored", linear=Rule(weight=E4M3)))
    if how == "modules_to_save":
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["up_proj"])
        model = peft.get_peft_model(model, config)
    if how == "lora":
        model = get_peft_model(model, r=4, target_modules=NAMES)
    if how == "fused":
        fuse(model)
    if how != "modules_to_save":
        model.requires_grad_(True)
    with pytest.raises(
        Unsupported, match=r"stored as float8_e4m3 is to train \(by requires_grad_.* put an adapter"
    ):
        model.train()(tokens(), labels=tokens())
    logits(model, tokens())  # without gradients it serves
    if how == "requires_grad":
        model.requires_grad_(False)
        model(tokens(), labels=tokens())


@pytest.mark.parametrize("names", [["up_proj"], ["0.mlp.up_proj"], ["layers.0.mlp"], ["lm_head", "mlp"]])
@pytest.mark.parametrize("second", [False, True])
def test_a_packed_layer_cannot_be_a_trained_copy(names, second, tmp_path):
    """By any name that PEFT takes for it, a module around it too, and where it has an adapter already."""
    model = base("int8")
    if second:
        model = get_peft_model(model, r=4, target_modules=["up_proj"])
    stored = r"copy of [\w.]*model\.layers\.0\.mlp\.\w+_proj, whose weight is stored as int8"
    with pytest.raises(Unsupported, match=stored):
        get_peft_model(model, adapter_name="second", target_modules=NAMES, modules_to_save=names)
    config = peft.LoraConfig(r=4, target_modules=NAMES, modules_to_save=names)
    peft.get_peft_model(base(None), config).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=stored):
        load_adapter(model, tmp_path, adapter_name="second")
    saved = get_peft_model(base("int8"), target_modules=NAMES, modules_to_save=["lm_head"])
    saved(tokens(), labels=tokens()).loss.backward()


def test_weighted_adapters_of_ours():
    model = get_peft_model(base("qlora_nf4"), r=4, target_modules=NAMES)
    get_peft_model(model, r=4, target_modules=NAMES, adapter_name="second")
    perturb(model)
    for kind in ("linear", "svd", "cat"):
        model.add_weighted_adapter(["default", "second"], [0.25, 0.75], kind, combination_type=kind)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    expected = 0.25 * layer.get_delta_weight("default") + 0.75 * layer.get_delta_weight("second")
    torch.testing.assert_close(layer.get_delta_weight("cat"), expected)
    model.set_adapter("cat")
    assert logits(model, tokens()).isfinite().all()


@pytest.mark.parametrize("recipe", [None, "qlora_nf4"])
@pytest.mark.parametrize("fused", [False, True])
def test_disabled_while_merged_is_the_base(recipe, fused):
    from fewbits import fuse

    model = base(recipe)
    plain = logits(model, tokens())
    adapted = perturb(get_peft_model(model, r=4))
    if fused:
        fuse(adapted)
    expected = logits(adapted, tokens())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.merge_adapter()
    assert (logits(adapted, tokens()) - plain).norm() > 0.1 * plain.norm()
    with adapted.disable_adapter():
        torch.testing.assert_close(logits(adapted, tokens()), plain)
    torch.testing.assert_close(logits(adapted, tokens()), expected)


def test_layers_by_number_with_the_default_targets():
    from fewbits.errors import SpecMismatch

    model = get_peft_model(base("qlora_nf4"), layers_to_transform=[0])
    names = [n for n, m in model.named_modules() if isinstance(m, LoRALinear)]
    assert len(names) == 7 and all(".layers.0." in name for name in names)
    with pytest.raises(SpecMismatch, match="layers_to_transform goes with names"):
        get_peft_model(base(None), target_modules=".*q_proj", layers_to_transform=[0])


@pytest.mark.parametrize("recipe", [None, "qlora_nf4", "int8"])
@pytest.mark.parametrize("variant", [name for name in TESTED if name != "kasa_config"])  # PEFT refuses it
def test_a_variant_is_added_to_a_plain_adapter(variant, recipe):
    """Layers of ours that are there already compute as PEFT's do, which are there without us."""
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": NAMES, **settings(variant)}
    plain = {"r": 4, "target_modules": NAMES, "task_type": "CAUSAL_LM"}
    ours = get_peft_model(base(recipe), peft.LoraConfig(**plain))
    assert any(isinstance(m, LoRALinear) for m in ours.modules())
    alone = peft.get_peft_model(base(recipe), peft.LoraConfig(**plain))
    options = {"alora_offsets": [3, 3]} if variant.startswith("alora") else {}
    found = []
    for model in (ours, alone):
        torch.manual_seed(0)
        model.add_adapter("second", peft.LoraConfig(**{"task_type": "CAUSAL_LM", **chosen}))
        model.base_model.set_adapter(["default", "second"])
        perturb(model).eval()
        with torch.no_grad():
            found.append(model(tokens(), **options).logits)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    ours.set_adapter("second")
    loss = ours.train()(tokens(), labels=tokens(), **options).loss
    loss.backward()
    assert any(p.grad is not None and p.grad.any() for n, p in ours.named_parameters() if ".second" in n)


@pytest.mark.parametrize("recipe", [None, "qlora_nf4", "int8"])
@pytest.mark.parametrize("safe", [True, False])
def test_dora_beside_a_plain_adapter_merges_and_comes_back(recipe, safe):
    model = base(recipe)
    before, plain = packed_state(model), logits(model, tokens())
    adapted = get_peft_model(model, peft.LoraConfig(r=4, target_modules=NAMES, init_lora_weights=False))
    for name in ("second", "third"):
        adapted.add_adapter(
            name, peft.LoraConfig(r=4, target_modules=NAMES, use_dora=True, init_lora_weights=False)
        )
    adapted.base_model.set_adapter(["default", "second", "third"])
    expected = logits(adapted.eval(), tokens())
    adapted.merge_adapter(safe_merge=safe)
    merged = logits(adapted, tokens())
    if recipe is None:
        torch.testing.assert_close(merged, expected, atol=1e-4, rtol=1e-4)
    else:
        assert (merged - expected).norm() < 0.5 * (expected - plain).norm()
    adapted.unmerge_adapter()
    torch.testing.assert_close(logits(adapted, tokens()), expected, atol=1e-4, rtol=1e-4)
    now = {base_name(name): part for name, part in packed_state(adapted).items()}
    assert same(now, before)


@pytest.mark.parametrize("init", ["pissa", "olora", "mica"])
def test_an_initialisation_from_the_weight_is_added_to_a_plain_adapter(init):
    plain = {"r": 4, "target_modules": NAMES}
    ours = get_peft_model(base(None), peft.LoraConfig(**plain))
    alone = peft.get_peft_model(base(None), peft.LoraConfig(**plain))
    found = []
    for model in (ours, alone):
        model.add_adapter("second", peft.LoraConfig(init_lora_weights=init, **plain))
        model.set_adapter("second")
        found.append(logits(perturb(model).eval(), tokens()))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    if init != "mica":
        packed = get_peft_model(base("int8"), peft.LoraConfig(**plain))
        with pytest.raises(Unsupported, match=f"init_lora_weights='{init}' takes a part of the base"):
            packed.add_adapter("second", peft.LoraConfig(init_lora_weights=init, **plain))


class UsersLayer(PeftLinear):
    """A layer class of the user's own."""


@pytest.mark.parametrize("recipe", [None, "int8"])
def test_a_layer_class_that_the_user_registers_stays(recipe):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    config._register_custom_module({nn.Linear: UsersLayer})  # a packed linear is one too
    for _ in range(2):  # one configuration, two models
        adapted = get_peft_model(base(recipe), config)
        kinds = {type(m) for m in adapted.modules() if isinstance(m, (PeftLinear, LoRALinear))}
        assert kinds == {UsersLayer}
        adapted(tokens(), labels=tokens()).loss.backward()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    config._register_custom_module({nn.Embedding: UsersLayer})
    assert any(type(m) is LoRALinear for m in get_peft_model(base(recipe), config).modules())


@pytest.mark.parametrize("modules", [[], ["v_proj"]])
def test_a_single_parameter_of_a_linear_has_pefts_own_layer(modules):
    settings = {"r": 4, "target_modules": modules, "target_parameters": ["q_proj.weight"]}
    ours = get_peft_model(base(None), peft.LoraConfig(**settings))
    alone = peft.get_peft_model(base(None), peft.LoraConfig(**settings))
    found = [{n: p.shape for n, p in m.named_parameters() if "lora_" in n} for m in (ours, alone)]
    assert found[0] == found[1]
    assert any(isinstance(m, ParamWrapper) for m in ours.modules())
    assert any(isinstance(m, LoRALinear) for m in ours.modules()) == bool(modules)
    torch.testing.assert_close(*(logits(perturb(m).eval(), tokens()) for m in (ours, alone)))
    with pytest.raises(
        Unsupported, match=r"'q_proj\.weight', and the weight of model\.layers\.0.* is packed; name"
    ):
        get_peft_model(base("int8"), peft.LoraConfig(**settings))


@pytest.mark.parametrize("recipe", [None, "int8"])
@pytest.mark.parametrize("safe", [True, False])
def test_a_bias_that_has_no_place_is_not_merged(recipe, safe):
    with pytest.warns(UserWarning, match="has no bias"):
        adapted = get_peft_model(base(recipe), r=4, target_modules=NAMES, lora_bias=True)
    perturb(adapted).eval()
    expected = logits(adapted, tokens())
    with pytest.raises(RuntimeError, match="because the base layer has no bias; adapter 'default' was not"):
        adapted.merge_adapter(safe_merge=safe)
    assert torch.equal(logits(adapted, tokens()), expected)


@pytest.mark.parametrize("names", [["experts"], ["mlp"]])
def test_packed_experts_cannot_be_a_trained_copy(names):
    model = mixture("qwen3_moe")
    convert(model, "qlora_nf4")
    with pytest.raises(
        Unsupported, match=r"copy of model\.layers\.0\.mlp\.experts, whose weight is stored as nf4"
    ):
        get_peft_model(model, r=4, target_modules=NAMES, modules_to_save=names)


def test_pefts_own_layer_over_packed_experts_is_refused():
    """It would add to the codes, as whole numbers: the adapter would neither count nor train."""
    settings = {"r": 4, "target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}
    model = mixture("qwen3_moe")
    convert(model, "qlora_nf4")
    alone = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with pytest.raises(Unsupported, match=r"add to codes, not to weights; call fewbits\.get_peft_model"):
        alone(tokens())
    ours = get_peft_model(alone.unload(), peft.LoraConfig(**settings))
    assert ours(tokens()).logits.requires_grad
