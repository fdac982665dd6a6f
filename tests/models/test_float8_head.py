"""A head whose products take 8 bits in training: what it learns from, what it keeps, what it leaves alone."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits.decoder.fuse import fuse, fusion_of, unfuse
from fewbits.decoder.loss import float8_head_of
from fewbits.formats import E4M3, E4M3_ROW, E5M2_ROW, NF4
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.adapting.predicted_memory import predict_memory
from fewbits.models.packing.convert import convert, explain
from fewbits.models.plan.memory_plan import head_bytes, static_of
from fewbits.recipes import LoRA, Recipe, Rule, qlora_nf4, qlora_nf4_fp8_head
from tests.models.tiny import VOCAB, tiny, tokens

BOTH = Rule(weight_operand=E4M3, activation=E4M3_ROW, gradient=E4M3_ROW)
LOGITS = Rule(weight_operand=E4M3, activation=E4M3_ROW)
IDS = tokens(3, 20)


def trained(family: str, head: Rule, *, lora: bool = True, **changes: Any) -> Any:
    """A fused model in training mode, its decoder in float32 so that only the head rounds."""
    model = tiny(family, **changes)
    convert(model, Recipe(name="head", linear=Rule(weight=NF4) if lora else Rule(), head=head))
    if family != "gemma2":  # whose soft cap transformers computes in "eager" only
        model.set_attn_implementation("sdpa")
    if lora:
        model = get_peft_model(model, LoRA(r=8))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(3))
    fuse(model)
    return model.train()


def loss_and_gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    return out.loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("head", [BOTH, LOGITS], ids=["both", "logits"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_learns_what_the_plain_head_does(family: str, head: Rule, lora: bool) -> None:
    """h and W in E4M3 move a logit by at most 0.0375 of the logits' norm, and dh as much again."""
    exact = loss_and_gradients(trained(family, Rule(), lora=lora))
    model = trained(family, head, lora=lora)
    assert "in float8" in str(fusion_of(model).receipt)
    found = loss_and_gradients(model)
    assert found[1].keys() == exact[1].keys() and not torch.equal(found[0], exact[0])
    torch.testing.assert_close(found[0], exact[0], rtol=0.0375, atol=0)
    for name, gradient in exact[1].items():
        assert (found[1][name] - gradient).norm() <= 2 * 0.0375 * gradient.norm(), name


def test_a_frozen_heads_operands_are_made_once() -> None:
    model = trained("llama", BOTH)
    head = float8_head_of(model)
    loss_and_gradients(model)
    first = head.operands()
    loss_and_gradients(model)
    assert head.is_kept and head.operands() is first
    assert head.nbytes == first.w8.nbytes + first.transposed.nbytes == 2 * VOCAB * 64
    with torch.no_grad():
        head.head.weight.mul_(3)
    assert head.operands() is not first and torch.equal(head.operands().scale, first.scale * 3)


def test_a_head_that_is_resized_multiplies_in_its_own_dtype() -> None:
    """After fuse: 8-bit products take multiples of 16, and a vocabulary may become any size."""
    model = trained("llama", BOTH, lora=False)
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    with pytest.warns(UserWarning, match="pad_to_multiple_of=16"):
        found = loss_and_gradients(model)
    unfuse(model)
    expected = loss_and_gradients(model)
    torch.testing.assert_close(found[0], expected[0])
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_a_heads_operands_do_not_travel() -> None:
    """They are made again, and torch cannot read a pickled float8 tensor."""
    model = trained("llama", BOTH)
    expected = loss_and_gradients(model)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        torch.testing.assert_close(loss_and_gradients(other)[0], expected[0], rtol=0, atol=0)


def test_those_of_a_head_that_trains_are_made_each_time() -> None:
    """Torch's fused AdamW counts no version when it writes: only making them anew is right."""
    model = trained("qwen2", BOTH, lora=False)
    head, before = float8_head_of(model), loss_and_gradients(model)[0]
    assert not head.is_kept and head._known is None
    head.head.weight.data.mul_(0.5)
    assert loss_and_gradients(model)[0] != before and head._known is None


def test_logits_that_one_reads_are_the_plain_heads() -> None:
    model, plain = trained("llama", BOTH), trained("llama", Rule())
    logits = [m(input_ids=IDS, labels=IDS).logits + 0 for m in (model, plain)]
    assert torch.equal(*logits)
    with torch.no_grad():
        losses = [m(input_ids=IDS, labels=IDS).loss for m in (model, plain)]
    assert torch.equal(*losses)


def test_unfuse_takes_it_out() -> None:
    model = trained("llama", BOTH)
    assert "until the decoder is fused" in str(explain(model))
    unfuse(model)
    assert float8_head_of(model) is None


@pytest.mark.parametrize(
    ("rule", "changes", "word"),
    [
        (BOTH, {"vocab_size": VOCAB + 1}, "multiples of 16"),
        (replace(BOTH, gradient=E5M2_ROW), {}, "no product of a head"),
        (Rule(activation=E4M3_ROW), {}, "no product of a head"),
    ],
)
def test_what_cannot_be_is_noted(rule: Rule, changes: dict[str, Any], word: str) -> None:
    model = trained("llama", rule, **changes)
    assert float8_head_of(model) is None and word in str(fusion_of(model).receipt)


def test_copies_are_counted() -> None:
    config = tiny("llama").config.to_dict()
    lora, size = LoRA(r=8), VOCAB * 64
    for rule, copies in ((BOTH, 2), (LOGITS, 1)):
        head = replace(qlora_nf4(), head=rule)
        more = predict_memory(config, head).weights - predict_memory(config, qlora_nf4()).weights
        assert more == copies * size
        model = trained("llama", rule)
        assert static_of(model).weights - static_of(trained("llama", Rule())).weights == copies * size
    plain, frozen = head_bytes(config, 100), head_bytes(config, 100, recipe=qlora_nf4_fp8_head())
    assert frozen - plain == 100 * (64 + VOCAB)  # the rows, and the gradient of the logits
    trains = replace(qlora_nf4_fp8_head(), lora=None)
    assert head_bytes(config, 100, recipe=trains) - frozen == 2 * size + 4 * size  # copies, dW's sum
    assert predict_memory(config, replace(qlora_nf4_fp8_head(), lora=lora), training=False).weights == (
        predict_memory(config, qlora_nf4(), training=False).weights
    )
