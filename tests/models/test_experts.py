"""Mixtures of experts: packed 3-D weights, adapters as PEFT has them, folders, tokens on few experts."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import fewbits
from fewbits import FastLanguageModel
from fewbits.errors import BadCheckpoint, SpecMismatch, Unsupported
from fewbits.formats import FORMATS
from fewbits.host.expert_weights import weights_of
from fewbits.models.merging.experts import WholeMerger
from fewbits.nn.experts import QuantizedExperts
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import Recipe, Rule
from tests.models.loading import logits, packed_state, perturb, same
from tests.models.mixtures import MIXTURES, mixture, save_mixture
from tests.models.tiny import tokens

TARGETS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]


def targets_of(kind: str) -> list[str]:
    """The same linears by the names that latent attention has for them."""
    names = {"q_proj": "q_b_proj", "v_proj": "kv_b_proj"} if kind == "deepseek_v3" else {}
    return [names.get(name, name) for name in TARGETS]


def loss_and_gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_identity_recipe_changes_neither_loss_nor_gradients(kind: str) -> None:
    model = mixture(kind)
    before = loss_and_gradients(model)
    receipt = fewbits.convert(model, Recipe(name="identity"))
    assert "experts that the recipe leaves as they are" in str(receipt)
    after = loss_and_gradients(model)
    torch.testing.assert_close(after[0], before[0], rtol=1e-5, atol=1e-6)
    assert after[1].keys() == before[1].keys()
    for name, gradient in before[1].items():
        torch.testing.assert_close(after[1][name], gradient, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_receipt_lists_everything_once(kind: str) -> None:
    receipt = fewbits.convert(mixture(kind), "qlora_nf4")
    changed = [change.name for change in receipt.changes]
    names = changed + [left.name for left in receipt.left]
    assert len(names) == len(set(names))
    assert any(name.endswith("experts.down_proj") for name in changed)
    experts = [left for left in receipt.left if left.name.rpartition(".")[2] == "experts"]
    assert not experts, experts


@pytest.mark.parametrize("kind", MIXTURES)
def test_adapters_train_as_pefts_own_over_the_decoded_weights(kind: str, tmp_path) -> None:
    """PEFT reads the file that we wrote, over plain 3-D weights: same loss, same gradients, same tokens."""
    save_mixture(tmp_path / "base", kind)
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=True, dtype=torch.float32)
    packed = {name for name, module in model.named_modules() if isinstance(module, QuantizedExperts)}
    receipt = str(fewbits.explain(model))
    assert packed and "QuantizedExperts nf4" in receipt and "experts.gate_up_proj" in receipt
    routers = [m for n, m in model.named_modules() if n.endswith((".gate", ".router", "expert_gate"))]
    assert routers and not any(isinstance(module, QuantizedLinear) for module in routers)
    plain = copy.deepcopy(model).dequantize()
    assert not any(isinstance(module, QuantizedExperts) for module in plain.modules())
    torch.testing.assert_close(logits(model, tokens()), logits(plain, tokens()), rtol=0, atol=2e-5)
    adapted = FastLanguageModel.get_peft_model(model, r=4, lora_dropout=0.0, target_modules=targets_of(kind))
    perturb(adapted).eval()
    trained = [n for n, p in adapted.named_parameters() if p.requires_grad and "experts" in n]
    assert len(trained) == 4 * len(packed)
    adapted.save_pretrained(tmp_path / "adapter")
    beside = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True).eval()
    ours, theirs = loss_and_gradients(adapted), loss_and_gradients(beside)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-3, atol=1e-5)
    ask = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    assert torch.equal(adapted.generate(input_ids=tokens(1, 6), **ask), beside.generate(tokens(1, 6), **ask))


@pytest.mark.parametrize("kind", MIXTURES)
def test_packed_experts_open_again_from_their_folder(kind: str, tmp_path) -> None:
    save_mixture(tmp_path / "base", kind)
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model.save_pretrained(tmp_path / "packed")
    words.save_pretrained(tmp_path / "packed")
    fewbits.register()
    for again in (
        FastLanguageModel.from_pretrained(tmp_path / "packed", dtype=torch.float32)[0],
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32).eval(),
    ):
        assert same(packed_state(again), packed_state(model))
        assert torch.equal(logits(again, tokens()), logits(model, tokens()))


def test_an_adapter_of_plain_peft_loads_over_packed_experts(tmp_path) -> None:
    save_mixture(tmp_path / "base", "qwen3_moe")
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    perturb(peft.get_peft_model(plain, config)).save_pretrained(tmp_path / "adapter")
    packed, _ = FastLanguageModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    decoded = copy.deepcopy(packed).dequantize()
    ours = fewbits.load_adapter(packed, tmp_path / "adapter").eval()
    theirs = peft.PeftModel.from_pretrained(decoded, tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(ours, tokens()), logits(theirs, tokens()), rtol=0, atol=2e-5)
    with ours.disable_adapter():
        without = logits(ours, tokens())
    assert not torch.allclose(without, logits(ours, tokens()), atol=1e-3)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_adapter_of_plain_peft_on_a_router_is_opened_and_merged(packed: bool, tmp_path) -> None:
    """PEFT's all-linear means the routers of Qwen3-MoE too, which are parameters of no linear."""
    save_mixture(tmp_path / "base", "qwen3_moe")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear")
    theirs = perturb(peft.get_peft_model(plain, config)).eval()
    assert any("mlp.gate.lora_A" in name for name, _ in theirs.named_parameters())
    theirs.save_pretrained(tmp_path / "adapter")
    need = logits(theirs, tokens())
    ours, tokenizer = FastLanguageModel.from_pretrained(
        tmp_path / "adapter", base_model=tmp_path / "base", load_in_4bit=packed, dtype=torch.float32
    )
    if not packed:
        torch.testing.assert_close(logits(ours.eval(), tokens()), need, rtol=0, atol=2e-5)
    ours.save_pretrained_merged(tmp_path / "merged", tokenizer, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(merged, tokens()), need, rtol=0, atol=2e-5)


def test_gate_and_up_have_twice_the_rank_and_nobody_says_otherwise(recwarn: Any) -> None:
    """PEFT looks for a parameter's rank among modules, and would warn that it was ignored."""
    adapted = FastLanguageModel.get_peft_model(mixture("qwen3_moe"), r=3, target_modules=TARGETS)
    ranks = {n.partition(".lora_A")[0].count("base_layer"): p.shape[0] // 8
             for n, p in adapted.named_parameters() if "experts" in n and "lora_A" in n}  # fmt: skip
    assert sorted(ranks.values()) == [3, 6]
    assert not [one for one in recwarn if "did not match any targeted module" in str(one.message)]


def host_and_packed(format: Any, kind: str = "qwen3_moe") -> tuple[Any, QuantizedExperts]:
    """Experts of one layer over the decoded weights, and the same packed."""
    host = next(module for module in mixture(kind).modules() if weights_of(module))
    packed = QuantizedExperts(host, dict.fromkeys(weights_of(host), format))
    for name in weights_of(host):
        packed.pack(name, getattr(host, name))
    return packed.host(), packed


@pytest.mark.parametrize(
    "format",
    ["nf4", "nf4_dq", "int8", "int4_g32_zp", "float8_e4m3", "float8_e4m3_row", "mxfp4", "nvfp4", "int4"],
)
def test_experts_in_every_kind_of_format(format: str) -> None:
    check_routing(*host_and_packed(FORMATS[format]), torch.randint(0, 8, (12, 2)))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("routing", ["none_on_most", "all_on_one", "no_rows", "one_row"])
def test_tokens_on_few_experts(kind: str, routing: str) -> None:
    chosen = {
        "none_on_most": torch.tensor([[0, 3]]).expand(10, 2),
        "all_on_one": torch.full((10, 2), 2),
        "no_rows": torch.zeros(0, 2, dtype=torch.long),
        "one_row": torch.tensor([[1, 2]]),
    }[routing]
    check_routing(*host_and_packed(FORMATS["nf4"], kind), chosen)


def check_routing(host: Any, packed: QuantizedExperts, chosen: torch.Tensor) -> None:
    """Outputs and gradients of rows and of routing weights, packed as over plain weights."""
    results = []
    for experts in (host, packed):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(len(chosen), 64, generator=generator, requires_grad=True)
        weights = torch.rand(chosen.shape, generator=generator, requires_grad=True)
        y = experts(x, chosen, weights)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, weights))))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_experts_do_not_take_is_refused_in_one_sentence(tmp_path) -> None:
    save_mixture(tmp_path / "base", "qwen3_moe")
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with pytest.raises(SpecMismatch, match=r"cannot be adapted alone.*name both"):
        fewbits.get_peft_model(model, target_modules=["gate_proj", "down_proj"])
    with pytest.raises(Unsupported, match="experts take no dropout"):
        fewbits.get_peft_model(model, target_modules=TARGETS, lora_dropout=0.1)


def test_restore_gives_the_experts_back() -> None:
    model = mixture("qwen3_moe")
    before = {name: p.clone() for name, p in model.named_parameters()}
    recipe = Recipe(name="pack", linear=Rule(weight=FORMATS["nf4"]))
    receipt = fewbits.convert(model, recipe, keep_original=True)
    assert sum("experts.down_proj" in change.name for change in receipt.changes) == 2
    smaller = sum(p.nbytes for p in model.parameters())
    assert smaller < sum(p.nbytes for p in before.values())
    fewbits.restore(model)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in before.items()}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def adapted_mixture(folder: Any, kind: str, targets: Any = None) -> Any:
    save_mixture(folder / "base", kind)
    model, _ = FastLanguageModel.from_pretrained(folder / "base", load_in_4bit=True, dtype=torch.float32)
    adapted = FastLanguageModel.get_peft_model(model, r=4, target_modules=targets or targets_of(kind))
    return perturb(adapted, scale=0.05).eval()


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_merged_mixture_is_the_original_with_the_adapter_in_it(kind: str, tmp_path) -> None:
    """Written as transformers writes the family, and PEFT's own merge over plain weights says the same."""
    adapted = adapted_mixture(tmp_path, kind)
    adapted.save_pretrained(tmp_path / "adapter")
    receipt = adapted.save_pretrained_merged(tmp_path / "merged", dtype=torch.float32)
    assert "the original weights" in str(receipt) and receipt.logits_error < receipt.tolerance
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload()
    torch.testing.assert_close(logits(merged, tokens()), logits(theirs, tokens()), rtol=0, atol=2e-5)
    assert tensor_names(tmp_path / "merged") == tensor_names(tmp_path / "base")


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_a_merge_in_16_bits_stands_where_a_rounding_chooses_another_expert(kind: str, tmp_path) -> None:
    """Without the same routing in both passes, two or three in eight of these merges were refused."""
    adapted = adapted_mixture(tmp_path, kind)
    for seed in range(8):
        perturb(adapted, scale=0.1, seed=seed)
        receipt = adapted.save_pretrained_merged(tmp_path / "merged", dtype=torch.bfloat16, overwrite=True)
        assert 0 < receipt.logits_error < receipt.tolerance < 0.1


@pytest.mark.parametrize("wrong", ["experts.down_proj", "gate.weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_that_went_wrong_is_not_written(
    wrong: str, dtype: torch.dtype, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One expert without its adapter, or another router: routing that is given does not hide either."""
    adapted = adapted_mixture(tmp_path, "qwen3_moe")
    perturb(adapted, scale=0.3)  # several times what rounding explains
    right = WholeMerger._sum

    def spoiled(self: WholeMerger, name: str, weight: torch.Tensor) -> torch.Tensor:
        total = right(self, name, weight)
        if name == f"model.layers.1.mlp.{wrong}":
            total = total.clone()
            total[1] = weight[1] if wrong.startswith("experts") else 2 * weight[1]
        return total

    monkeypatch.setattr(WholeMerger, "_sum", spoiled)
    with pytest.raises(BadCheckpoint, match="nothing was written"):
        adapted.save_pretrained_merged(tmp_path / "merged", dtype=dtype)
    assert not (tmp_path / "merged").exists()


def tensor_names(folder: Any) -> set[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as stream:
        return set(stream.keys())


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_a_merged_mixture_without_its_original_is_what_was_trained(kind: str, tmp_path) -> None:
    model = mixture(kind)
    fewbits.convert(model, Recipe(name="pack", linear=Rule(weight=FORMATS["int8"])))
    adapted = perturb(FastLanguageModel.get_peft_model(model, r=4, target_modules=TARGETS), scale=0.05).eval()
    write = fewbits.models.merging.merge.save_pretrained_merged
    receipt = write(adapted, tmp_path / "merged", dtype=torch.float32)
    assert "the dequantised weights" in str(receipt)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(merged, tokens()), logits(adapted, tokens()), rtol=0, atol=2e-5)


def test_a_mixture_merged_and_packed_again_opens(tmp_path) -> None:
    adapted = adapted_mixture(tmp_path, "qwen3_moe")
    expected = logits(adapted, tokens())
    adapted.save_pretrained_merged(tmp_path / "packed", save_method="merged_4bit")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    assert any(isinstance(module, QuantizedExperts) for module in again.modules())
    found = logits(again, tokens())  # the sum is rounded to NF4 once: as far off as packing itself is
    assert (found - expected).norm() < 0.5 * expected.norm()


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_merging_in_place_rounds_again_and_unmerging_brings_back_every_bit(kind: str, tmp_path) -> None:
    adapted = adapted_mixture(tmp_path, kind)
    before, beside = packed_state(adapted), logits(adapted, tokens())
    with (
        pytest.warns(UserWarning, match="merging into experts stored as nf4_dq rounds them again"),
        torch.inference_mode(),  # whose tensors no backward pass may save
    ):
        adapted.merge_adapter()
    assert not any(p.is_inference() for p in adapted.parameters())
    merged = logits(adapted, tokens())
    assert not same(packed_state(adapted), before)
    assert (merged - beside).norm() < 0.5 * beside.norm()
    adapted.unmerge_adapter()
    assert same(packed_state(adapted), before)
    assert torch.equal(logits(adapted, tokens()), beside)


def test_several_adapters_on_experts_add_up(tmp_path) -> None:
    adapted = adapted_mixture(tmp_path, "qwen3_moe")
    alone = logits(adapted, tokens())
    adapted.save_pretrained(tmp_path / "adapter")
    fewbits.load_adapter(adapted, tmp_path / "adapter", adapter_name="again")
    adapted.base_model.set_adapter(["default", "again"])
    both = logits(adapted, tokens())
    plain, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=True, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(plain.dequantize(), tmp_path / "adapter")
    theirs.load_adapter(tmp_path / "adapter", adapter_name="again")
    theirs.base_model.set_adapter(["default", "again"])
    assert not torch.allclose(both, alone, atol=1e-3)
    torch.testing.assert_close(both, logits(theirs.eval(), tokens()), rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore:merging into")
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_an_adapter_merged_into_experts_before_is_not_lost(kind: str, tmp_path) -> None:
    """Experts were taken from the original checkpoint again, and the proof compared with that."""
    targets = [*TARGETS, "k_proj", "o_proj"]
    model = adapted_mixture(tmp_path, kind, targets).merge_and_unload()
    expected = logits(model, tokens())
    receipt = fewbits.models.merging.merge.save_pretrained_merged(
        model, tmp_path / "merged", dtype=torch.float32
    )
    assert "that were changed in this model" in str(receipt)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(merged, tokens()), expected, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore:merging into")
def test_experts_that_were_kept_come_back_unless_an_adapter_was_merged() -> None:
    def made() -> Any:
        model = mixture("qwen3_moe")
        fewbits.convert(model, Recipe(name="pack", linear=Rule(weight=FORMATS["nf4"])), keep_original=True)
        return perturb(FastLanguageModel.get_peft_model(model, r=4, target_modules="all-linear")).eval()

    merged = made().merge_and_unload()
    expected = logits(merged, tokens())
    fewbits.restore(merged)
    torch.testing.assert_close(logits(merged, tokens()), expected, rtol=0, atol=2e-5)
    unmerged = made()
    unmerged.merge_adapter()
    with pytest.raises(Unsupported, match="merged into its packed weight"):
        fewbits.restore(unmerged)
    unmerged.unmerge_adapter()
    plain = unmerged.unload().bfloat16()
    fewbits.restore(plain)
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}
    theirs = mixture("qwen3_moe").bfloat16()
    assert torch.equal(logits(plain, tokens()), logits(theirs, tokens()))


@pytest.mark.filterwarnings("ignore:merging into")
@pytest.mark.parametrize("way", ["restore", "dequantize"])
def test_adapters_stay_over_experts_that_become_plain_again(way: str, tmp_path) -> None:
    adapted = adapted_mixture(tmp_path, "qwen3_moe", "all-linear")
    expected = loss_and_gradients(adapted)
    fewbits.restore(adapted) if way == "restore" else adapted.dequantize()
    assert not any(isinstance(module, QuantizedExperts) for module in adapted.modules())
    found = loss_and_gradients(adapted)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-5)
    before = logits(adapted, tokens())
    adapted.merge_adapter()
    torch.testing.assert_close(logits(adapted, tokens()), before, rtol=0, atol=2e-5)
    adapted.unmerge_adapter()
    torch.testing.assert_close(logits(adapted, tokens()), before, rtol=0, atol=2e-5)


@pytest.mark.parametrize("leaf", ["gate_up_proj", "down_proj"])
def test_what_stands_plain_beside_a_packed_weight_does_not_train(leaf: str) -> None:
    """It got no gradient, and adapters ended with a KeyError."""
    model = mixture("qwen3_moe").train()
    recipe = Recipe(name="half", linear=Rule(weight=FORMATS["nf4"]), skip=(f"*.experts.{leaf}",))
    names = [name for name, _ in model.model.layers[0].mlp.experts.named_parameters()]
    fewbits.convert(model, recipe)
    restored = copy.deepcopy(model)
    fewbits.restore(restored)  # PEFT nests adapters in this order
    assert [name for name, _ in restored.model.layers[0].mlp.experts.named_parameters()] == names
    with pytest.raises(Unsupported, match=f"^{leaf} of these experts is plain, and gets no gradient"):
        model(input_ids=tokens())
    with pytest.raises(Unsupported, match=f"^{leaf} of .* is plain beside a packed weight"):
        fewbits.get_peft_model(model)
    adapted = fewbits.get_peft_model(model, exclude_modules=["experts"])
    adapted(input_ids=tokens(), labels=tokens()).loss.backward()
