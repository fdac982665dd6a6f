"""What a fused layer must not pass by: hooks, forwards, replacements, masks, caches, odd sides in float8."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewbits import FastLanguageModel
from fewbits.decoder.fuse import fuse, fusion_of, unfuse
from fewbits.formats import E4M3, E4M3_ROW, NF4
from fewbits.recipes.recipe import LoRA, Recipe, Rule
from tests.models.test_fused import adapted, assert_same, loss_and_gradients
from tests.models.tiny import tokens

FLOAT8 = Rule(weight=NF4, weight_operand=E4M3, activation=E4M3_ROW, gradient=E4M3_ROW)


def first_layer(model: Any) -> Any:
    return model.get_base_model().model.layers[0]


def twice(module: nn.Module, args: Any, output: Any) -> Any:
    return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


def half_as_much(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, "hidden_states": kwargs["hidden_states"] / 2}


def gradient_twice(module: nn.Module, *gradients: Any) -> Any:
    return tuple(None if g is None else 2 * g for g in gradients[0])


def own_forward(self: Any, x: Tensor) -> Tensor:
    return type(self).forward(self, x) + 0.1


class OtherMLP(nn.Module):
    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x))  # type: ignore[no-any-return]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _set(module: Any, name: str, value: Any) -> None:
    setattr(module, name, value)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "mlp hook": (lambda m: m.mlp.register_forward_hook(twice), "mlp has hooks"),
    "attention hook": (lambda m: m.self_attn.register_forward_hook(twice), "self_attn has hooks"),
    "attention pre-hook": (
        lambda m: m.self_attn.register_forward_pre_hook(half_as_much, with_kwargs=True),
        "self_attn has hooks",
    ),
    "activation hook": (lambda m: m.mlp.act_fn.register_forward_hook(twice), "mlp.act_fn has hooks"),
    "backward hook": (lambda m: m.mlp.register_full_backward_hook(gradient_twice), "mlp has hooks"),
    "backward pre-hook": (
        lambda m: m.self_attn.o_proj.register_full_backward_pre_hook(gradient_twice),
        "self_attn.o_proj has hooks",
    ),
    "norm backward pre-hook": (
        lambda m: m.post_attention_layernorm.register_full_backward_pre_hook(gradient_twice),
        "post_attention_layernorm has hooks",
    ),
    "adapter hook": (
        lambda m: m.mlp.up_proj.lora_A["default"].register_forward_hook(twice),
        "mlp.up_proj has hooks",
    ),
    "adapter dropout hook": (
        lambda m: m.mlp.up_proj.lora_dropout["default"].register_forward_hook(twice),
        "mlp.up_proj has hooks",
    ),
    "own forward of the MLP": (
        lambda m: _set(m.mlp, "forward", MethodType(own_forward, m.mlp)),
        "mlp has a forward of its own",
    ),
    "own forward of the activation": (
        lambda m: _set(m.mlp.act_fn, "forward", torch.tanh),
        "mlp.act_fn has a forward of its own",
    ),
    "another activation": (
        lambda m: _set(m.mlp, "act_fn", nn.Tanh()),
        "mlp.act_fn was replaced",
    ),
    "another MLP": (lambda m: _set(m, "mlp", OtherMLP(m.mlp)), "mlp was replaced"),
    "another norm": (
        lambda m: _set(m, "input_layernorm", nn.LayerNorm(64)),
        "input_layernorm is a LayerNorm",
    ),
    "a norm without learning": (
        lambda m: _set(m, "post_attention_layernorm", nn.Identity()),
        "post_attention_layernorm is a Identity",
    ),
    "another part of the adapter": (
        lambda m: _set(m.mlp.up_proj.lora_A, "default", Doubled(64, 8, bias=False)),
        "the adapter of mlp.up_proj is made of Doubled",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_inside_a_layer_count(name: str) -> None:
    """One layer computes by itself, as the plain model with the same change does; the other stays fused."""
    change, reason = CHANGES[name]
    model, ids = adapted("llama"), tokens(2, 12)
    plain = copy.deepcopy(model)
    unchanged = loss_and_gradients(model, ids)
    torch.manual_seed(5)
    change(first_layer(plain))
    fuse(model)
    loss_and_gradients(model, ids)
    assert not fusion_of(model).fallbacks
    torch.manual_seed(5)
    handle = change(first_layer(model))
    model.requires_grad_(False), plain.requires_grad_(False)
    for m in (model, plain):
        for n, p in m.named_parameters():
            p.requires_grad_("lora_" in n and ".layers.0.mlp.up_proj" not in n)
    expected = loss_and_gradients(plain, ids)
    with pytest.warns(UserWarning, match=reason):
        found = loss_and_gradients(model, ids)
    assert_same(found, expected)
    (why,) = fusion_of(model).fallbacks
    assert reason in why and fusion_of(model).fallbacks[why] == 1
    same = [torch.allclose(expected[1][n], unchanged[1][n], rtol=1e-3) for n in expected[1]]
    assert not all(same), "the change changes nothing"
    if handle is not None:
        handle.remove()
        loss_and_gradients(model, ids)
        assert fusion_of(model).fallbacks[why] == 1


@pytest.mark.parametrize("where", ["attention", "configuration"])
def test_numbers_that_change_count(where: str) -> None:
    """A layer computes with its own number; one of the configuration does not reach a layer that is made."""
    model, ids = adapted("llama"), tokens(2, 12)
    plain = adapted("llama")
    fuse(model)
    for each in (plain, model):
        attention = each.get_base_model().model.layers[0].self_attn
        if where == "attention":
            attention.scaling *= 1.5
        else:
            attention.config.hidden_act = "gelu"
    assert_same(loss_and_gradients(model, ids), loss_and_gradients(plain, ids))
    (reason,) = fusion_of(model).fallbacks
    assert "was changed after fuse" in reason


def test_a_class_that_is_patched_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = adapted("llama"), tokens(2, 12)
    fuse(model)
    kind = type(first_layer(model).mlp)
    monkeypatch.setattr(kind, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    with pytest.warns(UserWarning, match=r"LlamaMLP.forward was replaced"):
        found = loss_and_gradients(model, ids)
    unfuse(model)
    assert_same(found, loss_and_gradients(model, ids), rtol=1e-5)


def test_hooks_on_every_module_count() -> None:
    model, ids = adapted("llama"), tokens(2, 12)
    fuse(model)
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        with pytest.warns(UserWarning, match="hooks on every module"):
            loss_and_gradients(model, ids)
    finally:
        handle.remove()
    assert seen.count("LlamaMLP") == 2
    loss_and_gradients(model, ids)
    assert sum(fusion_of(model).fallbacks.values()) == 2


def test_asking_for_attention_once_leaves_the_layers_fused() -> None:
    """transformers hooks every attention module for good when it is first asked."""
    model, ids = adapted("llama"), tokens(2, 12)
    model.set_attn_implementation("eager")
    fuse(model)
    with pytest.warns(UserWarning, match="asks for attention weights"):
        out = model(input_ids=ids, output_attentions=True)
    assert len(out.attentions) == 2 and out.attentions[0].shape == (2, 4, 12, 12)
    counted = sum(fusion_of(model).fallbacks.values())
    loss_and_gradients(model, ids)
    assert sum(fusion_of(model).fallbacks.values()) == counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_at_the_left(family: str, attention: str, dtype: torch.dtype) -> None:
    """Tokens of the padding may look nowhere: a full row of the mask."""
    if family == "gemma2" and attention == "sdpa":
        pytest.skip("transformers computes its soft cap in eager only")
    model, ids = adapted(family, None, dtype=dtype), tokens(3, 20)
    model.set_attn_implementation(attention)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[1, :1] = 0
    batch = {"attention_mask": mask, "labels": ids.where(mask.bool(), -100)}
    plain = loss_and_gradients(model, ids, **batch)
    every = loss_and_gradients(model, ids, attention_mask=mask)
    fuse(model)
    fused, fused_every = (
        loss_and_gradients(model, ids, **batch),
        loss_and_gradients(model, ids, attention_mask=mask),
    )
    assert not fusion_of(model).fallbacks
    if dtype == torch.float32:
        assert_same(fused, plain)
        assert_same(fused_every, every)
        return
    for found, want in ((fused, plain), (fused_every, every)):
        for name, gradient in want[1].items():
            error = (found[1][name] - gradient).float().norm() / gradient.float().norm()
            assert error < 0.1, name  # two backward passes in bfloat16, some 40 roundings of 2**-9 apart


def test_an_added_mask_under_autocast() -> None:
    """The lowest float32 number is minus infinity in bfloat16, and a row of those has no softmax."""
    model, ids = adapted("llama"), tokens(2, 12)
    model.set_attn_implementation("sdpa")
    fuse(model)
    lowest = torch.finfo(torch.float32).min
    mask = torch.full((12, 12), lowest).triu(1).repeat(2, 1, 1, 1)
    mask[0, :, :, :3] = lowest
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradients = loss_and_gradients(model, ids, attention_mask=mask)
    assert not fusion_of(model).fallbacks
    exact = loss_and_gradients(model, ids, attention_mask=mask)
    torch.testing.assert_close(loss.float(), exact[0], rtol=0.02, atol=0.02)
    for name, gradient in gradients.items():
        assert (gradient - exact[1][name]).norm() < 0.1 * exact[1][name].norm()


def test_inference_between_steps_leaves_the_layers_fused() -> None:
    """As GRPO does: generate, then train, without a word about the cache."""
    model, ids = adapted("llama"), tokens(2, 12)
    first = loss_and_gradients(model, ids)
    fuse(model)
    for _ in range(2):
        FastLanguageModel.for_inference(model)
        model.generate(input_ids=ids[:, :4], max_new_tokens=3, do_sample=False)
        with torch.no_grad():
            assert model(input_ids=ids).past_key_values is not None
        FastLanguageModel.for_training(model)
        out = model(input_ids=ids, labels=ids)
        assert out.past_key_values is None
        model.zero_grad()
        out.loss.backward()
        found = out.loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert_same(found, first)
    assert not fusion_of(model).fallbacks
    assert model.config.use_cache, "the configuration is the user's"
    with pytest.warns(UserWarning, match="has a KV cache"):
        assert model(input_ids=ids, use_cache=True).past_key_values is not None


@pytest.mark.parametrize("sides", [{"intermediate_size": 172}, {"hidden_size": 40, "head_dim": 16}])
def test_float8_products_need_sides_of_multiples_of_16(sides: dict[str, int]) -> None:
    model, ids = (
        adapted("qwen3", Recipe(name="nf4_float8", linear=FLOAT8), lora=LoRA(r=4), **sides),
        tokens(2, 12),
    )
    plain = loss_and_gradients(model, ids)
    receipt = fuse(model)
    assert "stays unfused" in str(receipt) and "multiples of 16" in str(receipt)
    assert_same(loss_and_gradients(model, ids), plain, rtol=1e-6)
