"""Mixtures of experts in the fused decoder: their attention in one node, their experts by their modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewbits.decoder import own_mlp
from fewbits.decoder.fuse import forget_weights, fuse, fused_layers, fusion_of, unfuse
from fewbits.decoder.keep import KEEP_NONE, KEEP_ON_HOST, KEEPS, Keep
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.fast import FastLanguageModel
from fewbits.models.packing.convert import convert
from fewbits.nn.experts import QuantizedExperts
from fewbits.recipes.recipe import LoRA, Recipe
from tests.models.mixtures import mixture
from tests.models.test_fused import NF4_ONLY, assert_same, loss_and_gradients
from tests.models.tiny import tokens

FUSED = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "olmoe", "granitemoe")
LORA = LoRA(r=4, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


def adapted(kind: str, recipe: Recipe | None = NF4_ONLY, *, lora: LoRA | None = LORA) -> Any:
    """A tiny mixture that trains, packed, with adapters on attention and experts, whose B is not zero."""
    torch.manual_seed(0)
    model = mixture(kind)
    model.set_attn_implementation("sdpa")
    if recipe is not None:
        convert(model, recipe)
    if lora is not None:
        model = get_peft_model(model, lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    return model.train()


@pytest.mark.parametrize("kind", FUSED)
def test_a_mixture_learns_the_same(kind: str) -> None:
    """With the routers' loss where the configuration asks for it (Mixtral's here)."""
    model, ids = adapted(kind), tokens(2, 20)
    plain = loss_and_gradients(model, ids)
    receipt = str(fuse(model))
    assert "its attention computed as one fused autograd node, its experts by modules of the model" in receipt
    dense = [forward.parts.own_mlp is None for forward in fused_layers(model)]
    assert dense == [kind in ("qwen2_moe", "glm4_moe"), False]  # whose first layers are dense: two nodes
    assert_same(loss_and_gradients(model, ids), plain)
    assert any("experts" in name for name in plain[1]) and not fusion_of(model).fallbacks
    unfuse(model)
    assert_same(loss_and_gradients(model, ids), plain, rtol=1e-7)


def test_every_weight_of_a_plain_mixture_trains_the_same() -> None:
    """Routers, experts and norms."""
    model, ids = adapted("qwen3_moe", None, lora=None), tokens(2, 20)
    plain = loss_and_gradients(model, ids)
    fuse(model)
    assert_same(loss_and_gradients(model, ids), plain)
    assert any(name.endswith("mlp.gate.weight") for name in plain[1]) and not fusion_of(model).fallbacks


def test_the_norm_before_experts_is_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's own operations are not called, and its weight's gradient is that of the module."""
    model, ids = adapted("qwen3_moe", None, lora=None), tokens(2, 20)
    plain = loss_and_gradients(model, ids)
    fuse(model)
    before, called = [layer.layer.post_attention_layernorm for layer in fused_layers(model)], []
    real = type(before[0]).forward
    monkeypatch.setattr(type(before[0]), "forward", lambda self, x: called.append(self) or real(self, x))
    assert_same(loss_and_gradients(model, ids), plain)
    assert any(name.endswith("post_attention_layernorm.weight") for name in plain[1])
    assert len(before) == 2 and not any(norm is module for norm in before for module in called)


@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_what_is_kept_changes_nothing(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = adapted("mixtral"), tokens(2, 20)
    fuse(model)
    everything = loss_and_gradients(model, ids)
    for layer in fused_layers(model):
        layer.keep = keep
    calls: list[Any] = []
    monkeypatch.setattr(own_mlp, "checkpoint", _counting(own_mlp.checkpoint, calls))
    stash = fusion_of(model).stash
    monkeypatch.setattr(stash, "put", _counting(stash.put, calls))
    assert_same(loss_and_gradients(model, ids), everything, rtol=1e-6)
    # two layers: each with a checkpoint where the MLP is not kept, and two inputs on the host
    assert len(calls) == (0 if keep.mlp else 2) + (4 if keep.offload else 0) and not len(stash)


def _counting(function: Any, calls: list[Any]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return function(*args, **kwargs)

    return counted


@pytest.mark.parametrize("keep", [KEEP_NONE, KEEP_ON_HOST], ids=str)
def test_a_layer_that_keeps_its_inputs_holds_nothing_of_its_experts(keep: Keep) -> None:
    model, ids = adapted("qwen3_moe"), tokens(2, 20)
    fuse(model)

    def kept_bytes() -> int:
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.base_model.model.model(input_ids=ids)
        return sum(saved.values())

    everything = kept_bytes()
    for layer in fused_layers(model):
        layer.keep = keep
    assert kept_bytes() < everything / 3


@pytest.mark.parametrize("kind", ["olmoe", "granitemoe"])
@pytest.mark.parametrize("keep", [KEEP_NONE, Keep()], ids=["nothing kept", "kept"])
def test_norms_of_whole_rows_and_multiplied_halves_learn_the_same(kind: str, keep: Keep) -> None:
    """Plain weights that all train, norms of queries and keys among them; computed again and kept."""
    model, ids = adapted(kind, None, lora=None), tokens(2, 20)
    plain = loss_and_gradients(model, ids)
    fuse(model, keep=keep)
    assert_same(loss_and_gradients(model, ids), plain)
    assert kind != "olmoe" or any(name.endswith("k_norm.weight") for name in plain[1])
    assert len(fused_layers(model)) == 2 and not fusion_of(model).fallbacks


def test_values_that_are_cut_stay_unfused() -> None:
    """A few random tokens need not reach the bound, so the spec says it, not the comparison."""
    model = mixture("olmoe")
    model.config.clip_qkv = 8.0
    assert "its queries, keys and values are cut to clip_qkv (8)" in str(fuse(model))
    assert not fused_layers(model)


def test_a_multiplied_half_with_a_bias_stays_unfused() -> None:
    model = mixture("granitemoe")
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias = nn.Parameter(torch.ones(64))
    assert "its attention's output is multiplied before it is added, and has a bias" in str(fuse(model))
    assert not fused_layers(model)


@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe", "granitemoe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mixture_is_proved(dtype: torch.dtype, kind: str) -> None:
    """Where roundings choose other experts too: of 64 values in bfloat16 two are often as large."""
    model = mixture(kind).to(dtype)
    receipt = str(fuse(model))
    assert len(fused_layers(model)) == 2 and "outputs and gradients agree" in receipt, receipt


def test_another_attention_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof of such a layer compares its first half as it does those of others."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    real = modeling_qwen3_moe.Qwen3MoeAttention.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        y, *rest = real(self, *args, **kwargs)
        return (y * 1.02, *rest)

    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeAttention, "forward", scaled)
    model = mixture("qwen3_moe")
    receipt = str(fuse(model))
    assert not fused_layers(model) and "attention" in receipt and "stays unfused" in receipt


def test_hooks_and_changes_below_the_experts_count() -> None:
    """They are modules that are called, as in the layer's own forward."""
    model, ids = adapted("qwen3_moe"), tokens(2, 20)
    fuse(model)
    before = loss_and_gradients(model, ids)
    block = fused_layers(model)[0].layer.mlp
    handle = block.register_forward_hook(lambda module, args, y: 0 * y)
    changed = loss_and_gradients(model, ids)
    assert not torch.allclose(changed[0], before[0]) and not fusion_of(model).fallbacks
    handle.remove()
    assert_same(loss_and_gradients(model, ids), before, rtol=1e-7)
    norm = fused_layers(model)[0].layer.post_attention_layernorm  # computed by the node but for hooks
    handle = norm.register_forward_hook(lambda module, args, y: 2 * y)
    doubled = loss_and_gradients(model, ids)
    assert not torch.allclose(doubled[0], before[0]) and not fusion_of(model).fallbacks
    handle.remove()
    assert_same(loss_and_gradients(model, ids), before, rtol=1e-7)
    handle = fused_layers(model)[0].layer.self_attn.register_forward_hook(lambda *args: None)
    with pytest.warns(UserWarning, match="self_attn has hooks"):
        assert_same(loss_and_gradients(model, ids), before)
    handle.remove()


def test_logits_of_routers_are_collected() -> None:
    model, ids = adapted("mixtral"), tokens(2, 20)
    ask = {"input_ids": ids, "labels": ids, "output_router_logits": True, "use_cache": False}
    plain = model(**ask)
    fuse(model)
    for keep in (Keep(), KEEP_NONE):
        for layer in fused_layers(model):
            layer.keep = keep
        fused = model(**ask)
        assert len(fused.router_logits) == len(plain.router_logits) == 2
        torch.testing.assert_close(fused.router_logits, plain.router_logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fused.aux_loss, plain.aux_loss, rtol=1e-5, atol=1e-6)
        assert fused.aux_loss.requires_grad


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_by_transformers(use_reentrant: bool) -> None:
    model, ids = adapted("qwen3_moe"), tokens(2, 20)
    plain = loss_and_gradients(model, ids)
    fuse(model)
    base = model.base_model.model
    base.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    base.enable_input_require_grads()
    assert_same(loss_and_gradients(model, ids), plain)
    assert not fusion_of(model).fallbacks


def test_a_models_days() -> None:
    """Train, evaluate, generate, leave the adapter out, merge, unfuse, train on: as an unfused model does."""
    fused, plain = adapted("qwen3_moe"), adapted("qwen3_moe")
    fuse(fused)
    ids = tokens(2, 20)
    trained = [[p for p in model.parameters() if p.requires_grad] for model in (fused, plain)]
    optimizers = [torch.optim.SGD(parameters, 0.1) for parameters in trained]

    def train() -> None:
        for model, optimizer in zip((fused, plain), optimizers, strict=True):
            model.train()
            loss_and_gradients(model, ids)
            optimizer.step()
        torch.testing.assert_close(*trained, rtol=1e-4, atol=1e-5)

    def same_logits() -> None:
        with torch.no_grad():
            torch.testing.assert_close(
                *(m.eval()(input_ids=ids).logits[:] for m in (fused, plain)), rtol=1e-4, atol=1e-4
            )

    train()
    same_logits()
    ask = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(fused.generate(input_ids=ids, **ask), plain.generate(input_ids=ids, **ask))
    with fused.disable_adapter(), plain.disable_adapter():
        same_logits()
    train()
    state = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
    for model in (fused, plain):
        model.merge_adapter()
    same_logits()
    for model in (fused, plain):
        model.unmerge_adapter()
    train()
    unfuse(fused)
    train()
    fuse(fused)
    for optimizer, saved in zip(optimizers, state, strict=True):
        optimizer.load_state_dict(saved)
    train()
    assert not fusion_of(fused).fallbacks


def test_decoded_weights_of_experts_stay_where_the_plan_keeps_weights() -> None:
    model, ids = adapted("qwen3_moe"), tokens(2, 20)
    fuse(model)
    made_anew = loss_and_gradients(model, ids)
    layers = fused_layers(model)
    experts = [m for m in model.modules() if isinstance(m, QuantizedExperts)]
    for layer in layers:
        layer.keep = Keep(weights=True)
    for _ in range(2):
        assert_same(loss_and_gradients(model, ids), made_anew, rtol=1e-7)
    kept = [tensor for module in experts for _, tensor in module.kept.values()]
    assert len(kept) == 4
    forget_weights(model)
    assert not any(module.kept for module in experts) and all(module.keeps_values for module in experts)
    assert_same(loss_and_gradients(model, ids), made_anew, rtol=1e-7)
    layers[0].keep = Keep()
    assert [bool(module.kept) for module in experts] == [False, True]
    unfuse(model)
    assert not any(module.kept or module.keeps_values for module in experts)


def test_what_the_user_chose_holds_for_experts_too() -> None:
    model, ids = adapted("qwen3_moe"), tokens(2, 20)
    plain = loss_and_gradients(model, ids)
    fuse(model)
    for choice in (True, "unsloth", False):
        FastLanguageModel.for_training(model, use_gradient_checkpointing=choice)
        assert_same(loss_and_gradients(model, ids), plain)
        assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
