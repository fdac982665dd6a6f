"""Adapters that begin as the error of packing; those on embeddings, heads and single tokens; and merges."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fewbits import FastLanguageModel, fuse, get_peft_model, lora_config, restore
from fewbits.cli.models import merge_adapter
from fewbits.errors import BadInput, SpecMismatch, Unsupported
from fewbits.formats import NF4
from fewbits.models.adapting.adapters import load_adapter
from fewbits.models.adapting.quantization_error import low_rank
from fewbits.nn.linear import QuantizedLinear
from fewbits.nn.loss import LazyLogits
from fewbits.recipes import Recipe, Rule
from tests import peers
from tests.models.loading import logits, save_tiny
from tests.models.tiny import tokens

IDS = tokens(2, 20)


def loaded(folder, **options):
    return FastLanguageModel.from_pretrained(folder, dtype=torch.float32, **options)


def step(model) -> None:
    """Some training: every parameter that trains moves."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(folder) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def same(found, need, atol: float = 2e-5) -> None:
    torch.testing.assert_close(logits(found.eval(), IDS), logits(need.eval(), IDS), atol=atol, rtol=1e-4)


def reference_pair(weight: Tensor, rank: int) -> Tensor:
    """PEFT's LoftQ with one iteration: bitsandbytes' error, its product of the rank."""
    functional = pytest.importorskip("bitsandbytes").functional
    from peft.utils.loftq_utils import _low_rank_decomposition

    codes, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=False)
    parts = _low_rank_decomposition(weight - peers.live_bitsandbytes(codes, state), reduced_rank=rank)
    return parts["L"] @ parts["R"]


def test_the_error_of_packing_as_peft_finds_it(tmp_path) -> None:
    save_tiny(tmp_path / "base")
    model, _ = loaded(tmp_path / "base", recipe=Recipe(name="blocks", linear=Rule(weight=NF4)))
    packed = {
        n: m.dequantize(torch.float32) for n, m in model.named_modules() if isinstance(m, QuantizedLinear)
    }
    model = FastLanguageModel.get_peft_model(
        model, r=4, lora_alpha=12, init_lora_weights="loftq", loftq_config=peft.LoftQConfig(loftq_bits=4)
    )
    originals = dict(plain(tmp_path / "base").named_parameters())
    layers = {
        n.removeprefix("base_model.model."): m for n, m in model.named_modules() if hasattr(m, "lora_A")
    }
    assert layers and layers.keys() == packed.keys()
    for name, layer in layers.items():
        assert torch.equal(layer.get_base_layer().dequantize(torch.float32), packed[name])
        product = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        weight = originals[f"{name}.weight"].detach()
        torch.testing.assert_close(product, reference_pair(weight, 4), atol=1e-5, rtol=1e-3)
        assert (weight - packed[name] - product).norm() < (weight - packed[name]).norm()


def test_merged_and_loaded_it_is_what_was_trained(tmp_path) -> None:
    """Into what was packed: over the original weights the error would count twice."""
    save_tiny(tmp_path / "base")
    model, tokenizer = loaded(tmp_path / "base")
    model = FastLanguageModel.get_peft_model(model, r=4, init_lora_weights="loftq")
    step(model)
    receipt = model.save_pretrained_merged(tmp_path / "merged", tokenizer, dtype=torch.float32)
    assert "changed in this model" in str(receipt)
    same(plain(tmp_path / "merged"), model)
    model.save_pretrained(tmp_path / "adapter")
    again, _ = loaded(tmp_path / "adapter", load_in_4bit=False)  # its own recipe wins
    same(again, model, atol=0)
    assert any("began as the error of packing" in note for note in again.get_base_model().fewbits_notes)
    merge_adapter(str(tmp_path / "adapter"), str(tmp_path / "by_command"))
    same(plain(tmp_path / "by_command"), model, atol=2e-2)  # in 16 bits
    base, _ = loaded(tmp_path / "base")
    restore(base)
    same(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"), model)
    with pytest.raises(Unsupported, match="belongs to that"):
        load_adapter(plain(tmp_path / "base"), tmp_path / "adapter")


def test_what_cannot_begin_so(tmp_path) -> None:
    save_tiny(tmp_path / "base")
    model, _ = loaded(tmp_path / "base", load_in_4bit=False)
    with pytest.raises(Unsupported, match="nothing of this model is packed"):
        get_peft_model(model, init_lora_weights="loftq")
    with pytest.raises(Unsupported, match="draw anew"):
        get_peft_model(model, init_lora_weights="pissa_niter_4")
    model, tokenizer = loaded(tmp_path / "base")
    with pytest.raises(BadInput, match="loftq_iter is 2"):
        get_peft_model(model, init_lora_weights="loftq", loftq_config={"loftq_iter": 2})
    with pytest.raises(Unsupported, match="configuration alone"):
        lora_config(model, init_lora_weights="loftq")
    model.save_pretrained(tmp_path / "packed")
    tokenizer.save_pretrained(tmp_path / "packed")
    model, _ = loaded(tmp_path / "packed")
    with pytest.raises(Unsupported, match="load the model from its unpacked folder"):
        get_peft_model(model, init_lora_weights="loftq")


def test_a_large_matrix_comes_near_the_best() -> None:
    matrix = torch.randn(1100, 1030)
    left, right = low_rank(matrix, 8, torch.Generator().manual_seed(1))
    best = torch.linalg.svdvals(matrix)[8:].square().sum().sqrt()
    assert left.shape == (1100, 8) and (matrix - left @ right).norm() < 1.001 * best


WAYS = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "both": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7, 9]},
    "tokens, head": {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [3, 7, 9]},
    "pissa": {"init_lora_weights": "pissa", "load_in_4bit": False},
    "olora": {"init_lora_weights": "olora", "load_in_4bit": False},
    "patterns": {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 32}, "use_rslora": True},
}

QUICK = [("embedding", True), ("head", True), ("tokens", True), ("pissa", False)]


@pytest.mark.parametrize(
    ("way", "tied"),
    [
        pytest.param(way, tied, marks=() if (way, tied) in QUICK else pytest.mark.slow)
        for way in WAYS
        for tied in (True, False)
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_peft_alone_computes_it_and_a_merge_keeps_it(way: str, tied: bool, tmp_path) -> None:
    save_tiny(tmp_path / "base", tie_word_embeddings=tied)
    settings = dict(WAYS[way])
    packed = settings.pop("load_in_4bit", True)
    model, tokenizer = loaded(tmp_path / "base", load_in_4bit=packed)
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False, **settings)
    fuse(model)
    before = logits(model.eval(), IDS)
    step(model)
    assert (logits(model.eval(), IDS) - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "adapter")
    again, _ = loaded(tmp_path / "adapter", load_in_4bit=packed)
    same(again, model, atol=1e-5)
    base, _ = loaded(tmp_path / "base", load_in_4bit=packed)
    if packed:
        restore(base)
    same(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"), model)
    model.save_pretrained_merged(tmp_path / "merged", tokenizer, dtype=torch.float32)
    same(
        plain(tmp_path / "merged"),
        peft.PeftModel.from_pretrained(plain(tmp_path / "base"), tmp_path / "adapter"),
    )


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_added_tokens_that_train_alone_are_opened_and_merged(tied: bool, tmp_path) -> None:
    """PEFT writes the whole embedding of a vocabulary that grew, and of a tied head the rows once more."""
    save_tiny(tmp_path / "base", tie_word_embeddings=tied)
    model, _ = loaded(tmp_path / "base", load_in_4bit=False)
    first = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(first + 3)
    model = FastLanguageModel.get_peft_model(model, r=4, trainable_token_indices=[first, first + 2])
    ids = IDS.clone()
    ids[:, ::3], ids[:, 1::3] = first, first + 2
    model.train()(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.grad is not None):
            parameter.sub_(parameter.grad)
    need = logits(model.eval(), ids)
    model.save_pretrained(tmp_path / "adapter")
    again, tokenizer = loaded(tmp_path / "adapter", load_in_4bit=False)
    torch.testing.assert_close(logits(again.eval(), ids), need)
    packed, _ = loaded(tmp_path / "adapter")
    packed.save_pretrained_merged(tmp_path / "merged", tokenizer, dtype=torch.float32)
    torch.testing.assert_close(logits(plain(tmp_path / "merged"), ids), need, atol=2e-5, rtol=1e-4)
    base, _ = loaded(tmp_path / "base")
    with pytest.raises(SpecMismatch, match="another vocabulary"):
        load_adapter(base, tmp_path / "adapter")


@pytest.mark.parametrize(("target", "tied"), [("lm_head", True), ("embed_tokens", False)])
@pytest.mark.filterwarnings("ignore")
def test_what_an_adapter_holds_of_added_tokens(target: str, tied: bool, caplog, tmp_path) -> None:
    """PEFT writes the grown weight of its targets alone: all there is if it is tied, else half of it."""
    save_tiny(tmp_path / "base", tie_word_embeddings=tied)
    model, _ = loaded(tmp_path / "base", load_in_4bit=False)
    first = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(first + 3)
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", target])
    model = peft.get_peft_model(model, config)
    step(model)
    model.save_pretrained(tmp_path / "adapter")
    again, _ = loaded(tmp_path / "adapter", load_in_4bit=False)
    ids = IDS.clone()
    ids[:, ::3] = first + 2
    # transformers begins added rows as the mean, give or take a thousandth of the rows' spread
    torch.testing.assert_close(
        logits(again.eval(), ids), logits(model.eval(), ids), rtol=1e-4, atol=2e-5 if tied else 1e-2
    )
    assert ("holds no rows of lm_head for the 3 added tokens" in caplog.text) == (not tied)


@pytest.mark.parametrize("field", ["modules_to_save", "target_modules"])
def test_rows_that_train_in_two_ways_are_refused(field: str, tmp_path) -> None:
    save_tiny(tmp_path / "base")
    model, _ = loaded(tmp_path / "base", load_in_4bit=False)
    settings = {"target_modules": ["q_proj"], field: ["q_proj", "embed_tokens"]}
    with pytest.raises(BadInput, match=f"rows of embed_tokens, which {field} names too"):
        get_peft_model(model, trainable_token_indices=[3], **settings)


def test_a_head_that_trains_whole_needs_no_logits(tmp_path) -> None:
    save_tiny(tmp_path / "base", tie_word_embeddings=False)
    results = []
    for fused in (False, True):
        model, _ = loaded(tmp_path / "base")
        model = FastLanguageModel.get_peft_model(
            model, r=4, modules_to_save=["lm_head"], use_gradient_checkpointing=False
        )
        if fused:
            fuse(model)
        found = model.train()(input_ids=IDS, labels=IDS)
        assert isinstance(found.logits, LazyLogits) == fused
        found.loss.backward()
        results.append(
            {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {"": found.loss}
        )
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-4, atol=1e-6)
