"""Experts whose products take both operands in E4M3, as a recipe asks: learning, keeping, merging, texts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import fewbits
from fewbits import FastLanguageModel
from fewbits.decoder.fuse import fuse, fused_layers, fusion_of
from fewbits.decoder.keep import KEEP_NONE, Keep
from fewbits.formats import FORMATS
from fewbits.kernels.product.matmul_packed import PLAIN
from fewbits.nn import expert_products
from fewbits.nn import experts as packed_experts
from fewbits.nn.experts import QuantizedExperts
from fewbits.recipes import Recipe, Rule
from tests.models.loading import logits, perturb
from tests.models.mixtures import mixture, save_mixture
from tests.models.test_fused import assert_same, loss_and_gradients
from tests.models.tiny import tokens

TARGETS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
SAID = "are computed in the dtype of the activations"


def adapted(kind: str, recipe: str) -> Any:
    model = mixture(kind)
    fewbits.convert(model, recipe)
    options = {"use_gradient_checkpointing": False, "random_state": 3}
    return perturb(
        FastLanguageModel.get_peft_model(model, r=4, target_modules=TARGETS, **options), scale=0.05
    )


def experts_of(model: Any) -> list[QuantizedExperts]:
    return [module for module in model.modules() if isinstance(module, QuantizedExperts)]


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "granitemoe"])
def test_experts_learn_nearly_as_in_16_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E4M3 rounds by up to a sixteenth; sums over 64 values of random signs by less.

    Routing is by weights that are not rounded, but of inputs that are: the same experts are forced.
    """
    model = adapted(kind, "qlora_nf4_fp8").train()
    calls, real = [], expert_products.grouped_float8
    monkeypatch.setattr(
        expert_products, "grouped_float8", lambda *a, **k: (calls.append(1), real(*a, **k))[1]
    )
    layer = experts_of(model)[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 64, generator=generator)
    index = torch.stack([torch.randperm(layer.num_stored, generator=generator)[:2] for _ in range(40)])
    weights, dy = torch.rand(40, 2, generator=generator), torch.randn(40, 64, generator=generator)
    wrapped = next(m for m in model.modules() if type(m).__name__ == "ParamWrapper")

    def computed() -> list[torch.Tensor]:
        rows = x.clone().requires_grad_()
        routing = weights.clone().requires_grad_()
        y = wrapped(rows, index, routing)
        trained = [p for n, p in wrapped.named_parameters() if "lora_" in n]
        return [y, *torch.autograd.grad(y, [rows, routing, *trained], dy)]

    in_8_bits = computed()
    assert len(calls) == 4
    layer.operands = PLAIN
    for got, want in zip(in_8_bits, computed(), strict=True):
        assert 0 < (got - want).norm() / want.norm() < 0.08
    assert len(calls) == 4


@pytest.mark.parametrize("keep", [Keep(), Keep(weights=True), KEEP_NONE], ids=["kept", "weights", "none"])
def test_fused_layers_learn_the_same(keep: Keep) -> None:
    model, ids = adapted("qwen3_moe", "qlora_nf4_fp8").train(), tokens(2, 20)
    for module in model.modules():  # attention rounds otherwise in a fused node
        if hasattr(module, "operands") and not isinstance(module, QuantizedExperts):
            module.operands = PLAIN
    plain = loss_and_gradients(model, ids)
    fuse(model, keep=keep)
    for _ in range(2):
        assert_same(loss_and_gradients(model, ids), plain)
    assert len(fused_layers(model)) == 2 and not fusion_of(model).fallbacks


def test_kept_values_are_made_once_and_follow_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = adapted("qwen3_moe", "qlora_nf4_fp8").train(), tokens(2, 20)
    plain = loss_and_gradients(model, ids)
    made, real = [], packed_experts.float8_weight
    monkeypatch.setattr(packed_experts, "float8_weight", lambda *a, **k: (made.append(1), real(*a, **k))[1])
    for layer in experts_of(model):
        layer.keep_values(True)
    for _ in range(2):
        assert_same(loss_and_gradients(model, ids), plain, rtol=1e-7)
    assert len(made) == 2 * 2 * 2  # layers, weights, orientations
    again = pickle.loads(pickle.dumps(experts_of(model)[0]))
    assert not again.kept and not again.scales and again.operands == experts_of(model)[0].operands
    twin = copy.deepcopy(model)
    for layer in experts_of(model):
        layer.pack("down_proj", 2 * layer.dequantize("down_proj"))
    other = loss_and_gradients(model, ids)
    assert not torch.equal(other[0], plain[0])
    assert_same(loss_and_gradients(twin, ids), plain, rtol=1e-7)
    for layer in experts_of(model):
        layer.keep_values(False)
    assert_same(loss_and_gradients(model, ids), other, rtol=1e-7)


def test_the_receipt_names_the_operands() -> None:
    receipt = str(fewbits.convert(mixture("qwen3_moe"), "qlora_nf4_fp8"))
    (line,) = [line for line in receipt.splitlines() if "experts.gate_up_proj" in line]
    assert "QuantizedExperts nf4" in line and "float8_e4m3_row" in line and SAID not in receipt
    assert "float8" not in str(fewbits.convert(mixture("qwen3_moe"), "qlora_nf4"))


def test_weights_that_the_kernel_does_not_take_are_told() -> None:
    """One scale for all experts' values: they are not decoded row by row."""
    rows = FORMATS["float8_e4m3_row"]
    linear = Rule(
        weight=FORMATS["float8_e4m3"], weight_operand=FORMATS["float8_e4m3"], activation=rows, gradient=rows
    )
    model = mixture("qwen3_moe")
    receipt = str(fewbits.convert(model, Recipe(name="other", linear=linear)))
    assert all(layer.operands == PLAIN for layer in experts_of(model))
    assert f"products of experts in 2 layers {SAID}" in receipt


def test_texts_and_merges_take_16_bits(tmp_path) -> None:
    save_mixture(tmp_path / "base", "qwen3_moe")
    load = {"recipe": "qlora_nf4_fp8", "dtype": torch.float32, "load_in_4bit": False}
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "base", **load)
    assert all(layer.operands != PLAIN for layer in experts_of(model))
    model = perturb(FastLanguageModel.get_peft_model(model, r=4, target_modules=TARGETS), scale=0.05).eval()
    receipt = model.save_pretrained_merged(tmp_path / "merged", dtype=torch.float32)
    assert receipt.logits_error < receipt.tolerance
    model.save_pretrained(tmp_path / "adapter")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "base", **load)
    again = fewbits.load_adapter(again, tmp_path / "adapter").eval()
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))


def test_a_packed_folder_opens_with_its_operands(tmp_path) -> None:
    save_mixture(tmp_path / "base", "mixtral")
    load = {"recipe": "qlora_nf4_fp8", "dtype": torch.float32, "load_in_4bit": False}
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", **load)
    model.save_pretrained(tmp_path / "packed")
    words.save_pretrained(tmp_path / "packed")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    assert [layer.operands for layer in experts_of(again)] == [layer.operands for layer in experts_of(model)]
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))
