"""Adapters are PEFT's own: they travel between fewbits and plain PEFT with equal logits, both ways."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fewbits.errors import BadCheckpoint, BadInput, SpecMismatch, Unsupported
from fewbits.formats import INT8, NF4
from fewbits.host.spec import spec_for
from fewbits.models.adapting.adapters import get_peft_model, load_adapter, resolve_targets
from fewbits.models.loading import in_memory
from fewbits.models.packing.convert import convert, restore
from fewbits.nn.linear import QuantizedLinear
from fewbits.nn.lora import LoRALinear
from fewbits.recipes.recipe import LoRA, Recipe, Rule
from tests import peers
from tests.models.tiny import FAMILIES, tiny, tokens

PACK = Recipe(name="pack", linear=Rule(weight=NF4))

# Two float32 sums over K <= 128 in different orders: sqrt(K) * 2^-24 of the terms' size a product, 14
# products in a row.
TOLERANCE = {"rtol": 0.0, "atol": 14 * 128**0.5 * 2**-24 * 8}


def packed(family: str = "llama", recipe: Recipe = PACK, **changes: Any) -> nn.Module:
    model = tiny(family, **changes)
    convert(model, recipe)
    return model


def rounded(family: str = "llama", **changes: Any) -> nn.Module:
    """The plain Hugging Face model with the weights that the packed one stands for."""
    model = packed(family, **changes)
    restore(model)
    return model


def test_a_frozen_base_stays_frozen() -> None:
    """As under a learned prompt, which puts no layer into the base."""
    base = tiny("llama")
    in_memory.convert(base, PACK)
    base.requires_grad_(False)
    assert not any(p.requires_grad for p in base.dequantize().parameters())
    assert all(p.requires_grad for p in rounded().parameters())


@pytest.mark.parametrize("way", ["restored", "restored from kept weights", "dequantised"])
def test_a_base_that_leaves_few_bits_under_adapters_stays_frozen(way: str) -> None:
    """It would otherwise train beside the adapter, and nobody would be told."""
    base = tiny("llama")
    in_memory.convert(base, PACK, keep_original=way == "restored from kept weights")
    model = get_peft_model(base, LoRA(targets=("q_proj",), bias="lora_only"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if way == "dequantised":
        base.dequantize()
    else:
        in_memory.restore(base)
    assert not any(isinstance(m, QuantizedLinear) for m in model.modules())
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}


def randomise(model: nn.Module, seed: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return peers.steady_peft(model, lambda: model(tokens()).logits)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "r": 8, "lora_alpha": 5},
        {"lora_dropout": 0.3, "target_modules": ["q_proj", "down_proj"]},
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 64}},
        {"target_modules": r".*layers\.1\..*_proj"},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "gaussian"},
    ],
    ids=lambda s: ",".join(s) or "plain",
)
def test_adapters_travel_both_ways(settings: dict[str, Any], tmp_path: Path) -> None:
    ours = get_peft_model(packed(), **settings)
    assert isinstance(ours, peft.PeftModel)
    assert any(isinstance(m, LoRALinear) for m in ours.modules())
    randomise(ours)
    ours.eval().save_pretrained(tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(rounded(), tmp_path / "ours")
    assert not any(isinstance(m, LoRALinear) for m in theirs.modules())
    torch.testing.assert_close(logits(theirs), logits(ours), **TOLERANCE)
    assert not torch.allclose(logits(ours), logits(packed()), atol=1e-2)

    theirs.save_pretrained(tmp_path / "theirs")
    a, b = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)
    again = load_adapter(packed(), tmp_path / "theirs")
    assert isinstance(again, peft.PeftModel)
    assert torch.equal(logits(again), logits(ours))
    assert not any(p.requires_grad for p in again.parameters())
    assert any(
        p.requires_grad for p in load_adapter(packed(), tmp_path / "theirs", is_trainable=True).parameters()
    )


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_bias_settings_train_and_save_what_peft_does(bias: str, tmp_path: Path) -> None:
    kwargs = {"bias": bias, "target_modules": ["q_proj", "o_proj"]}
    ours = get_peft_model(packed("qwen2"), **kwargs)
    theirs = peft.get_peft_model(
        rounded("qwen2"), peft.LoraConfig(r=16, lora_alpha=16, task_type="CAUSAL_LM", **kwargs)
    )
    trained = {n for n, p in ours.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in theirs.named_parameters() if p.requires_grad}
    assert any(n.endswith("bias") for n in trained) == (bias != "none")
    randomise(ours)
    ours.save_pretrained(tmp_path)
    theirs = peft.PeftModel.from_pretrained(rounded("qwen2"), tmp_path)
    torch.testing.assert_close(logits(theirs), logits(ours.eval()), **TOLERANCE)
    assert torch.equal(logits(load_adapter(packed("qwen2"), tmp_path)), logits(ours))


@pytest.mark.parametrize("family", FAMILIES)
def test_training_step_equals_peft(family: str) -> None:
    """Same dropout mask, loss and gradients as PEFT's layers over the rounded weights."""
    kwargs = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.2}
    ours = get_peft_model(packed(family), **kwargs).train()
    targets = list(spec_for(ours).linear_names)
    theirs = peft.get_peft_model(
        rounded(family), peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **kwargs)
    ).train()
    randomise(ours)
    randomise(theirs)
    results = []
    for model in (ours, theirs):
        torch.manual_seed(7)
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        results.append(
            (loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        )
    (loss, gradients), (loss_peft, gradients_peft) = results
    torch.testing.assert_close(loss, loss_peft, rtol=2**-24 * 128, atol=0)
    assert gradients.keys() == gradients_peft.keys()
    for name, gradient in gradients_peft.items():
        # as in test_convert: order of sums alone, through two layers and back
        assert (gradients[name] - gradient).norm() <= 2**-24 * 256 * gradient.norm(), name


def test_several_adapters_switch_disable_and_delete(tmp_path: Path) -> None:
    base = logits(packed())
    model = get_peft_model(packed(), LoRA(r=4), adapter_name="one")
    get_peft_model(model, LoRA(r=2, targets=("q_proj", "lm_head")), adapter_name="two")
    randomise(model)
    model.set_adapter("one")
    one = logits(model)
    model.set_adapter("two")
    two = logits(model)
    assert not torch.allclose(one, two)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    model.base_model.set_adapter(["one", "two"])
    both = logits(model)
    model.set_adapter("one")
    model.save_pretrained(tmp_path)
    twice = load_adapter(load_adapter(packed(), tmp_path / "two"), tmp_path / "one", adapter_name="other")
    assert torch.equal(logits(twice), two)
    twice.set_adapter("other")
    assert torch.equal(logits(twice), one)
    with pytest.raises(BadInput, match=r"delete_adapter\('other'\)"):
        load_adapter(twice, tmp_path / "two", adapter_name="other")
    assert torch.equal(logits(twice), one)
    plain = peft.PeftModel.from_pretrained(rounded(), tmp_path / "one", adapter_name="one")
    plain.load_adapter(tmp_path / "two", adapter_name="two")
    plain.base_model.set_adapter(["one", "two"])
    torch.testing.assert_close(logits(plain), both, **TOLERANCE)
    mixed = model.eval()(tokens(), adapter_names=["one", "__base__"]).logits.detach()
    torch.testing.assert_close(mixed[0], one[0], **TOLERANCE)
    torch.testing.assert_close(mixed[1], base[1], **TOLERANCE)
    model.delete_adapter("one")
    model.set_adapter("two")
    assert torch.equal(logits(model), two)


def test_merging_into_packed_weights_says_so_and_unmerging_is_exact() -> None:
    model = get_peft_model(packed())
    randomise(model)
    before = logits(model)
    base = {n: p.clone() for n, p in model.named_parameters() if "weight_" in n}
    with pytest.warns(UserWarning, match="merging into weights stored as nf4 rounds them again"):
        model.merge_adapter()
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    expected = NF4.fake_quantize(
        NF4.dequantize(packed().model.layers[0].mlp.up_proj.packed)
        + layer.get_delta_weight("default").detach()
    )
    assert torch.equal(layer.base_layer.dequantize(), expected)
    model.unmerge_adapter()
    assert all(torch.equal(p, base[n]) for n, p in model.named_parameters() if "weight_" in n)
    assert torch.equal(logits(model), before)
    with pytest.warns(UserWarning, match="rounds them again"):
        merged = model.merge_and_unload()
    assert type(merged.model.layers[0].mlp.up_proj) is QuantizedLinear
    fine = get_peft_model(packed(recipe=Recipe(name="i8", linear=Rule(weight=INT8))))
    randomise(fine)
    before = logits(fine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = fine.merge_and_unload(safe_merge=True)
    assert (logits(merged) - before).norm() < 0.1 * before.norm()


def test_merging_into_plain_weights_equals_peft() -> None:
    ours = get_peft_model(rounded(), r=4)
    assert any(isinstance(m, LoRALinear) for m in ours.modules())
    theirs = peft.get_peft_model(
        rounded(), peft.LoraConfig(r=4, lora_alpha=16, target_modules=list(spec_for(ours).linear_names))
    )
    randomise(ours)
    randomise(theirs)
    torch.testing.assert_close(logits(ours), logits(theirs), **TOLERANCE)
    merged = ours.merge_and_unload()
    theirs = theirs.merge_and_unload()
    assert torch.equal(merged.model.layers[1].mlp.up_proj.weight, theirs.model.layers[1].mlp.up_proj.weight)
    assert type(merged.model.layers[0].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize("trainable", [True, False])
def test_an_adapter_with_the_same_settings_is_trained_on(trainable: bool, tmp_path: Path) -> None:
    """As a script does that loads its adapter and runs its own lines again; PEFT had a bare ValueError."""
    asked: dict[str, Any] = {"r": 4, "modules_to_save": ["lm_head"], "rank_pattern": {"q_proj": 2}}
    first = get_peft_model(packed(), **asked)
    first.base_model.model.model.layers[0].mlp.up_proj.lora_B["default"].weight.data.fill_(0.05)
    first.save_pretrained(tmp_path)
    model = load_adapter(packed(), tmp_path, is_trainable=trainable)
    again = get_peft_model(model, **asked, seed=3)
    assert again is model and "is trained on" in model.get_base_model().fewbits_notes[-1]
    assert torch.equal(again(tokens()).logits, first(tokens()).logits)
    trains = [{n for n, p in m.named_parameters() if p.requires_grad} for m in (first, again)]
    assert trains[0] == trains[1] and trains[0]
    with pytest.raises(BadInput, match="'default' with lora_alpha=16, and 32 is asked for"):
        get_peft_model(model, **asked, lora_alpha=32)
    assert set(get_peft_model(model, LoRA(r=8), adapter_name="other").peft_config) == {"default", "other"}


@pytest.mark.parametrize("way", ["off", "deleted"])
def test_get_peft_model_gives_adapters_that_train(way: str) -> None:
    """Also where they were switched off, or all deleted: they computed nothing then, in silence."""
    model = get_peft_model(packed(), r=4)
    if way == "off":
        model.base_model.disable_adapter_layers()
    else:
        model.delete_adapter("default")
    again = get_peft_model(model, r=4)
    assert again is model and again.active_adapters == ["default"]
    again(input_ids=tokens(), labels=tokens()).loss.backward()
    trained = [p for p in again.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None for p in trained)


def test_targets_that_match_nothing_are_listed() -> None:
    model = packed("phi3")
    assert resolve_targets(model, "all-linear") == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
    assert resolve_targets(model, ["q_proj", "v_proj", "up_proj"]) == ["gate_up_proj", "qkv_proj"]
    with pytest.raises(
        SpecMismatch, match=r"no linear of this model: c_attn; it has down_proj, gate_up_proj, lm_head"
    ):
        get_peft_model(model, target_modules=["c_attn", "o_proj"])
    with pytest.raises(SpecMismatch, match=r"'\.\*c_attn' matches no linear"):
        get_peft_model(model, target_modules=".*c_attn")
    with pytest.raises(SpecMismatch, match="none given"):
        get_peft_model(model, target_modules=[])


def test_variants_are_left_to_peft_and_refused_over_rounded_weights() -> None:
    fake = tiny("llama")
    convert(fake, "int4_qat")
    with pytest.raises(Unsupported, match="use_dora needs the weight itself"):
        get_peft_model(fake, use_dora=True)
    with pytest.raises(Unsupported, match="init_lora_weights='pissa' takes a part"):
        get_peft_model(packed(), init_lora_weights="pissa")
    dora = get_peft_model(tiny("llama"), use_dora=True)
    dora(tokens(), labels=tokens()).loss.backward()
    assert any("lora_magnitude_vector" in n for n, p in dora.named_parameters() if p.grad is not None)


@pytest.mark.filterwarnings("ignore:merging into weights")
def test_dora_over_packed_weights_is_pefts_and_unmerges_to_the_bit(tmp_path: Path) -> None:
    """PEFT's layer divides and subtracts, and an NF4 weight was rounded anew: 8 % of it at each time."""
    ours = get_peft_model(packed(), use_dora=True, r=4)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(len(name)))
            elif "magnitude" in name:
                parameter.mul_(1.1)
    ours.save_pretrained(tmp_path)
    theirs = peft.PeftModel.from_pretrained(rounded(), tmp_path, is_trainable=True)
    for model in (ours, theirs):
        model(tokens(), labels=tokens()).loss.backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    assert any("magnitude" in name for name in gradients)
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)
    before = ours(tokens()).logits
    torch.testing.assert_close(before, theirs(tokens()).logits, **TOLERANCE)
    stored = {name: p.clone() for name, p in ours.named_parameters() if ".weight_" in name}
    ours.merge_adapter()
    assert not torch.equal(ours(tokens()).logits, before)
    with ours.disable_adapter():  # which takes a merged adapter out
        torch.testing.assert_close(ours(tokens()).logits, packed()(tokens()).logits, **TOLERANCE)
    ours.merge_adapter()
    ours.unmerge_adapter()
    assert all(torch.equal(p, stored[name]) for name, p in ours.named_parameters() if name in stored)
    assert torch.equal(ours(tokens()).logits, before)


def begun(model: nn.Module, **settings: Any) -> dict[str, torch.Tensor]:
    """The first values of a seeded adapter."""
    adapted = get_peft_model(model, **{"seed": 3, "r": 4, **settings})
    return {n: p.detach().clone() for n, p in adapted.named_parameters() if ".lora_" in n}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"init_lora_weights": "gaussian", "rank_pattern": {"q_proj": 2}},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": False, "use_rslora": True},
    ],
    ids=lambda s: ",".join(s) or "plain",
)
def test_seeded_values_depend_on_names_alone(settings: dict[str, Any]) -> None:
    """Not on the base's format or dtype, the other layers, the adapter before, or what was drawn before."""
    want = begun(tiny("llama"), **settings)
    torch.manual_seed(8)
    for base in (packed(), tiny("llama", dtype=torch.bfloat16)):
        found = begun(base, **settings)
        assert found.keys() == want.keys()
        assert all(torch.equal(tensor, want[name]) for name, tensor in found.items())
    second = begun(packed(), **settings, adapter_name="second")
    twice = begun(get_peft_model(packed(), r=4), **settings, adapter_name="second")
    assert all(torch.equal(tensor, twice[name]) for name, tensor in second.items())
    renamed = {name.replace(".second.", ".default."): tensor for name, tensor in second.items()}
    assert not any(torch.equal(tensor, want[n]) for n, tensor in renamed.items() if "lora_A" in n)
    some = begun(packed(), **settings, target_modules=["down_proj", "v_proj"])
    assert 0 < len(some) < len(want) and all(torch.equal(tensor, want[n]) for n, tensor in some.items())
    matrices = [tensor for name, tensor in want.items() if "lora_A" in name]
    assert len({float(tensor.sum()) for tensor in matrices}) == len(matrices)
    other = begun(packed(), **settings, seed=4)
    assert not any(torch.equal(other[n], tensor) for n, tensor in want.items() if tensor.any())


def test_seeded_values_leave_what_peft_computes() -> None:
    """DoRA's magnitudes are the weight's norms, PiSSA's A and B the weight's own; both repeat by the seed."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    dora, plain = begun(tiny("llama"), use_dora=True), begun(tiny("llama"))
    assert all(torch.equal(tensor, dora[n]) for n, tensor in plain.items())
    magnitude = dora[name.replace("lora_A.default", "lora_magnitude_vector.default")]
    weight = tiny("llama").model.layers[0].self_attn.q_proj.weight
    torch.testing.assert_close(magnitude, weight.detach().norm(dim=1))
    pissa, again = (begun(tiny("llama"), init_lora_weights="pissa") for _ in range(2))
    assert all(torch.equal(tensor, again[n]) for n, tensor in pissa.items())
    b = pissa[name.replace("lora_A", "lora_B")]
    torch.testing.assert_close(b.T @ b, torch.diag((b.T @ b).diag()), rtol=0, atol=1e-4)  # singular vectors
    assert b.any() and not torch.equal(pissa[name], plain[name])


def test_seeded_values_that_say_nothing_are_those_of_false() -> None:
    """PEFT takes None so."""
    q_proj = {"target_modules": ["q_proj"]}
    found, of_false = (begun(tiny("llama"), **q_proj, init_lora_weights=init) for init in (None, False))
    assert found and all(
        torch.equal(found[name], tensor) and tensor.any() for name, tensor in of_false.items()
    )


def test_seeded_orthogonal_values_beside_an_embedding() -> None:
    """Of which PEFT makes A zero and B normal, whatever the linears begin with."""
    targets = {"target_modules": r".*\.(q_proj|embed_tokens)"}
    found = begun(tiny("llama"), **targets, init_lora_weights="orthogonal")
    embedding = {
        name: tensor for name, tensor in begun(tiny("llama"), **targets).items() if "embedding" in name
    }
    assert len(embedding) == 2 < len(found)
    assert all(torch.equal(tensor, found[name]) for name, tensor in embedding.items())
    some = begun(tiny("llama"), target_modules=["q_proj"], init_lora_weights="orthogonal")
    assert all(torch.equal(tensor, found[name]) and tensor.any() for name, tensor in some.items())


def test_adapter_and_base_that_do_not_fit(tmp_path: Path) -> None:
    get_peft_model(packed(), r=4).save_pretrained(tmp_path)
    with pytest.raises(SpecMismatch, match=r"was made for 64 (in|out)puts of '.*', which has 32"):
        load_adapter(packed(hidden_size=32, head_dim=16), tmp_path)
    with pytest.raises(SpecMismatch, match=r"adapts 'model.layers.1.*', which this model does not have"):
        load_adapter(packed(num_hidden_layers=1), tmp_path)
    with pytest.raises(SpecMismatch, match=r"which this model does not have; it has down_proj, gate_up_proj"):
        load_adapter(packed("phi3"), tmp_path)


def test_vocabularies_that_disagree(tmp_path: Path) -> None:
    get_peft_model(packed(), r=4, modules_to_save=["lm_head"]).save_pretrained(tmp_path)
    with pytest.raises(
        SpecMismatch, match=r"'lm_head.weight' of shape \(96, 64\), and this model's is \(100, 64\)"
    ):
        load_adapter(packed(vocab_size=100), tmp_path)


def test_damaged_adapters(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"has no adapter_config.json"):
        load_adapter(packed(), tmp_path)
    get_peft_model(packed(), r=4).save_pretrained(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    tensors = {
        k: t.clone() for k, t in load_file(weights).items()
    }  # load_file maps the file, which is cut next
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(BadCheckpoint, match="truncated or corrupt"):
        load_adapter(packed(), tmp_path)
    weights.unlink()
    with pytest.raises(BadCheckpoint, match=r"has no adapter_model.safetensors"):
        load_adapter(packed(), tmp_path)
    torch.save(tensors, tmp_path / "adapter_model.bin")
    with pytest.raises(BadCheckpoint, match="is a pickle, which can run code"):
        load_adapter(packed(), tmp_path)
    save_file(tensors, weights)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))
    with pytest.raises((Unsupported, BadCheckpoint)):
        load_adapter(packed(), tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(BadCheckpoint):
        load_adapter(packed(), tmp_path)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("settings", [{}, {"target_modules": ["q_proj", "v_proj"]}], ids=["all", "two"])
def test_gradient_checkpointing_gives_the_same_gradients(settings: dict[str, Any], reentrant: bool) -> None:
    """Also through packed linears without an adapter, which PEFT's default targets leave."""
    gradients = []
    for checkpointing in (False, True):
        model = get_peft_model(packed(), lora_dropout=0.1, **settings)
        randomise(model)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.train()
        torch.manual_seed(0)
        model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(g, gradients[1][n]) for n, g in gradients[0].items())


def _without(weights: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if part not in name}


def _damages() -> dict[str, Any]:
    """What may be wrong with an adapter's file, and what the refusal names."""
    wrong = torch.zeros(3, 3)
    return {
        "a tensor is missing": (
            lambda w: _without(w, "layers.1.mlp.up_proj.lora_B"),
            r"lacks '[^']*layers\.1\.mlp\.up_proj\.lora_B",
        ),
        "a layer is missing": (
            lambda w: _without(w, "layers.0."),
            r"lacks '[^']*layers\.0\.[^']*' \(and 13 more\)",
        ),
        "all are missing": (lambda w: {"x": wrong}, "lacks|holds 'x'"),
        "one is left over": (
            lambda w: {**w, "base_model.model.model.norm.lora_C": wrong},
            "holds 'model.norm.lora_C",
        ),
        "an inner size differs": (
            lambda w: {n: (t[:2] if "1.mlp.up_proj.lora_A" in n else t) for n, t in w.items()},
            r"mismatch for [^ ]*layers\.1\.mlp\.up_proj\.lora_A",
        ),
        "a trained copy is missing": (lambda w: _without(w, "lm_head"), "lacks [^ ]*lm_head"),
    }


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("damage", _damages())
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: str, second: bool) -> None:
    from safetensors.torch import load_file, save_file

    change, named = _damages()[damage]
    saved = get_peft_model(packed(), r=4, modules_to_save=["lm_head"])
    saved.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    model = packed()
    names = [name for name, _ in model.named_modules()]
    plain = logits(model)
    target = get_peft_model(model, r=4) if second else model
    with pytest.raises(SpecMismatch, match=named) as caught:
        load_adapter(target, tmp_path, adapter_name="second" if second else "default")
    assert "\n" not in str(caught.value)
    if second:
        assert list(target.peft_config) == ["default"]
        assert not any("second" in name for name, _ in target.named_parameters())
    else:  # as it was
        assert [name for name, _ in model.named_modules()] == names and not hasattr(model, "peft_config")
        assert torch.equal(logits(model), plain)
        saved.save_pretrained(tmp_path)
        load_adapter(model, tmp_path)
