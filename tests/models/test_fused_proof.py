"""`fuse` proves a layer of each kind: what differs stays unfused, what is proved leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from fewbits import FastLanguageModel
from fewbits.decoder import proof
from fewbits.decoder.fuse import fuse, fused_layers, fusion_of
from fewbits.decoder.keep import KEEPS, Keep
from fewbits.decoder.projection import Projection
from fewbits.families import catalog
from fewbits.families.catalog import LLAMA
from fewbits.families.spec import Attention, ModelSpec, Norms
from fewbits.host.attention import decoder_of
from fewbits.recipes.recipe import LoRA
from tests.models.test_fused import NF4_ONLY, adapted, assert_same, loss_and_gradients
from tests.models.tiny import _COMMON, FAMILIES, tiny, tokens

HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
OLMO2_NORMS = Norms(
    before_attention=None,
    before_mlp=None,
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
    query="self_attn.q_norm",
    key="self_attn.k_norm",
)
GRANITE_SCORES = replace(LLAMA, attention=Attention(multiplier="attention_multiplier"))
OTHERS: dict[str, tuple[ModelSpec, dict[str, Any], int, str]] = {
    "granite": (GRANITE_SCORES, {"residual_multiplier": 0.22}, 0, "attention differs by 3.5 of its size"),
    "olmo2": (replace(LLAMA, norm=OLMO2_NORMS), {}, 0, "its norms stand behind attention and MLP"),
    "smollm3": (LLAMA, {"no_rope_layers": [1, 0]}, 1, "queries differs by"),
    "stablelm": (LLAMA, {}, 0, "input_layernorm"),
    "cohere": (replace(LLAMA, norm=Norms(before_mlp=None)), {}, 0, "side by side behind one norm"),
}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes a spec that a user might, and makes a model of that family."""

    def make(
        model_type: str, spec: ModelSpec, dtype: torch.dtype, attention: str = "sdpa", **changes: Any
    ) -> Any:
        monkeypatch.setitem(catalog.SPECS, model_type, replace(spec, model_type=model_type))
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **{**_COMMON, **changes})
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).train()

    yield make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", OTHERS)
def test_a_family_that_differs_stays_unfused(model_type: str, dtype: torch.dtype, written: Any) -> None:
    spec, changes, fused, words = OTHERS[model_type]
    model, ids = written(model_type, spec, dtype, **changes), tokens(2, 12)
    plain = loss_and_gradients(model, ids)
    receipt = str(fuse(model))
    assert len(fused_layers(model)) == fused
    assert "stays unfused: " in receipt and words in receipt
    if dtype == torch.float32:
        assert_same(loss_and_gradients(model, ids), plain)
    else:
        torch.testing.assert_close(loss_and_gradients(model, ids)[0], plain[0], rtol=0.01, atol=0.01)


def test_a_family_that_differs_in_nothing_is_fused(written: Any) -> None:
    """Granite's multipliers at one, and a scale of its own for attention."""
    changes = {"residual_multiplier": 1.0, "attention_multiplier": 0.05}
    model, ids = written("granite", GRANITE_SCORES, torch.float32, **changes), tokens(2, 12)
    plain = loss_and_gradients(model, ids)
    fuse(model)
    assert len(fused_layers(model)) == 2
    assert_same(loss_and_gradients(model, ids), plain)


@pytest.mark.parametrize("cap", [None, 5.0])
def test_a_soft_cap_that_transformers_does_not_apply(cap: float | None) -> None:
    model, ids = adapted("gemma3_text", attn_logit_softcapping=cap), tokens(2, 24)
    plain = loss_and_gradients(model, ids)
    fuse(model)
    assert_same(loss_and_gradients(model, ids), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_proved(family: str, dtype: torch.dtype) -> None:
    """In float32 to a few units of 2**-24; in the others an eighth of the bound is used."""
    model = adapted(family, dtype=dtype)
    receipt = str(fuse(model))
    kinds = 2 if family == "gemma2" else 1  # every other layer has a window
    assert len(fused_layers(model)) == 2 and f"one of each kind ({kinds})" in receipt
    error = float(receipt.split("agree to ")[1].split()[0])
    assert 0 < error < {torch.float32: 2e-6, torch.bfloat16: 0.04, torch.float16: 0.005}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_neither_rank_nor_alpha_nor_training_decides(family: str, dtype: torch.dtype) -> None:
    """Under rank 1 and alpha 128 scores of thousands came of values that the proof itself had drawn."""
    for rank, alpha, size in ((1, 16, 0.0), (2, 16, 0.1), (1, 128, 0.0), (1, 128, 0.1)):
        model = FastLanguageModel.get_peft_model(
            tiny(family).to(dtype), r=rank, lora_alpha=alpha, use_gradient_checkpointing=False
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=size)
        receipt = str(fuse(model))
        assert len(fused_layers(model)) == 2, (rank, alpha, size, receipt)


def test_a_small_rank_over_nf4_is_fused_in_float32() -> None:
    model = adapted("llama", NF4_ONLY, lora=LoRA(r=2), dtype=torch.float32)
    fuse(model)
    assert len(fused_layers(model)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_multiplier_one_per_cent_off_is_seen(factor: float, dtype: torch.dtype, written: Any) -> None:
    """Single values of 16 bits are rounded by as much; their common factor is not."""
    model = written("granite", GRANITE_SCORES, dtype, residual_multiplier=factor)
    receipt = str(fuse(model))
    assert not fused_layers(model) and "stays unfused: " in receipt


@pytest.mark.parametrize("cap", [49.5, 50.5])
def test_a_soft_cap_one_per_cent_off_is_seen(cap: float, written: Any) -> None:
    of_spec = replace(catalog.SPECS["gemma2"].attention, soft_cap="cap_of_the_spec")
    spec = replace(catalog.SPECS["gemma2"], attention=of_spec)
    changes = {"attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 16, "attention": "eager"}
    model = written("gemma2", spec, torch.float32, cap_of_the_spec=cap, **changes)
    receipt = str(fuse(model))
    assert not fused_layers(model)
    assert f"its attention has the soft_cap 50.0, and the fused nodes would take {cap}" in receipt
    model = written("gemma2", spec, torch.float32, cap_of_the_spec=50.0, **changes)
    fuse(model)
    assert len(fused_layers(model)) == 2


def test_large_scores_are_no_other_arithmetic(written: Any) -> None:
    """Softmax turns a rounding of such a score into a large relative error; a factor is still seen."""
    models = [tiny("qwen2")]
    models += [written("granite", GRANITE_SCORES, torch.float32, residual_multiplier=f) for f in (1.0, 1.01)]
    for model, number in zip(models, (2, 2, 0), strict=True):
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data *= 30
            layer.self_attn.k_proj.weight.data *= 30
        receipt = str(fuse(model))
        assert len(fused_layers(model)) == number, receipt


def test_every_kind_of_layer_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = tiny("gemma3_text", num_hidden_layers=3, layer_types=kinds)
    compared: list[nn.Module] = []
    real = proof.compare_layer

    def compare(layer: Any, *rest: Any) -> float:
        compared.append(layer)
        return real(layer, *rest)

    monkeypatch.setattr(proof, "compare_layer", compare)
    fuse(model)
    assert [layer.self_attn.sliding_window for layer in compared] == [16, None]
    assert len(fused_layers(model)) == 3


def test_adapters_that_begin_with_zeros_are_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FastLanguageModel.get_peft_model(tiny("llama"), r=4, use_gradient_checkpointing=False)
    assert not any(p.any() for n, p in model.named_parameters() if "lora_B" in n)
    real = Projection.branch_inputs

    def twice(self: Projection, x: Tensor) -> Tensor | None:
        xa = real(self, x)
        return None if xa is None else 2 * xa

    monkeypatch.setattr(Projection, "branch_inputs", twice)
    receipt = str(fuse(model))
    assert not fused_layers(model) and "differs by" in receipt


def state(model: Any) -> dict[str, Any]:
    """All that a proof might change, by value and by version."""
    found: dict[str, Any] = {
        "generator": torch.get_rng_state(),
        "attention": {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")},
        "attributes": {n: sorted(vars(m)) for n, m in model.named_modules()},
        "training": [m.training for m in model.modules()],
    }
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = tensor.detach().clone(), tensor._version, tensor.grad, tensor.requires_grad
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("keep", [None, *KEEPS], ids=str)
@pytest.mark.parametrize("recipe", [NF4_ONLY, None], ids=["nf4", "plain"])
def test_a_proof_leaves_no_trace(recipe: Any, keep: Keep | None) -> None:
    model = adapted("qwen3", recipe, lora=LoRA(r=4, dropout=0.3))
    calls: list[Any] = []
    for name, module in model.named_modules():
        if "layers." in name:
            module.register_forward_pre_hook(lambda *args: calls.append(args))
    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(calls.append)
    before = state(model)
    decoder = decoder_of(model)
    proofs = proof.Proofs(decoder, catalog.SPECS["qwen3"], keep or Keep())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert [proofs.why_not(layer, proofs.spec) for layer in decoder.layers] == [None, None]
    after = state(model)
    assert before.keys() == after.keys() and not calls
    assert [name for name in before if not same(before[name], after[name])] == []
    fuse(model, keep=keep)
    assert all(not f.parts._decoded and not f.parts._scales for f in fused_layers(model))


def test_a_model_that_was_made_in_inference_mode_is_proved() -> None:
    with torch.inference_mode():
        model = tiny("llama")
        expected = model(tokens()).logits
        fuse(model)
        assert len(fused_layers(model)) == 2
        torch.testing.assert_close(model(tokens()).logits, expected, rtol=1e-4, atol=1e-4)


def test_layers_without_values_are_said() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **_COMMON))
    receipt = str(fuse(model))
    assert "were not compared with the layers' own forward: its weights have no values yet" in receipt
    assert len(fused_layers(model)) == 2


def test_a_layer_that_adds_nothing_follows_its_kind() -> None:
    """As LLaMA-Pro's new blocks; it says nothing about the other layers."""
    for empty in (0, 1):
        model = tiny("llama", num_hidden_layers=3)
        for path in ("self_attn.o_proj", "mlp.down_proj"):
            nn.init.zeros_(model.model.layers[empty].get_submodule(path).weight)
        receipt = str(fuse(model))
        assert len(fused_layers(model)) == (2 if empty == 0 else 3)
        assert ("proves nothing" in receipt) == (empty == 0)


def test_what_cannot_be_compared_now_is_not_fused() -> None:
    model, ids = tiny("llama", hidden_act="relu").train(), tokens(2, 12)
    plain = loss_and_gradients(model, ids)
    receipt = str(fuse(model))
    assert "stays unfused: no kernel for the activation 'relu'" in receipt
    with pytest.warns(UserWarning, match="no kernel for the activation"):
        assert_same(loss_and_gradients(model, ids), plain)
    assert sum(fusion_of(model).fallbacks.values()) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_proofs_on_a_gpu(family: str, dtype: torch.dtype) -> None:
    model = adapted(family, dtype=dtype).cuda()
    random = torch.cuda.get_rng_state()
    receipt = str(fuse(model))
    assert len(fused_layers(model)) == 2 and "agree to" in receipt, receipt
    assert torch.equal(random, torch.cuda.get_rng_state())


@pytest.mark.gpu
def test_a_family_that_differs_stays_unfused_on_a_gpu(written: Any) -> None:
    spec, changes, _, words = OTHERS["granite"]
    for dtype in (torch.float32, torch.bfloat16):
        receipt = str(fuse(written("granite", spec, dtype, **changes).cuda()))
        assert words in receipt
