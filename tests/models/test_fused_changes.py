"""What is changed on a model after `fuse`: its attention, norms and loss; and logits that were put off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.decoder.fuse import fuse, fusion_of, unfuse
from fewbits.errors import Unsupported
from fewbits.host.attention import used_attention
from fewbits.nn.loss import LazyHead, LazyLogits
from tests.models.test_fused import adapted, assert_same, loss_and_gradients
from tests.models.tiny import tokens


@pytest.mark.parametrize("chosen", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "own forward"])
def test_another_attention_is_chosen(family: str, chosen: str, fused: bool) -> None:
    """Its masks are the host's from then on, in layers that take their own forward too."""
    if (family, chosen) == ("gemma2", "sdpa"):
        chosen = "eager"  # the only one that caps the scores
    model, ids = adapted(family), tokens(2, 20)
    model.set_attn_implementation(chosen)
    plain = loss_and_gradients(model, ids)
    fuse(model)
    model.set_attn_implementation(chosen)
    hook = (
        None if fused else model.get_base_model().model.layers[0].mlp.register_forward_hook(lambda *_: None)
    )
    assert_same(loss_and_gradients(model, ids), plain)
    assert bool(fusion_of(model).fallbacks) == (not fused)
    (why,) = used_attention(model).taken
    assert chosen in why
    if hook is not None:
        hook.remove()
    unfuse(model)
    assert model.config._attn_implementation == chosen
    assert_same(loss_and_gradients(model, ids), plain, rtol=1e-6)


def test_a_choice_after_fuse_outlives_unfuse() -> None:
    model = adapted("llama")
    fuse(model)
    model.set_attn_implementation("eager")
    unfuse(model)
    assert model.config._attn_implementation == "eager"


def test_norms_that_peft_replaces() -> None:
    from peft import LNTuningConfig, get_peft_model

    model, ids = adapted("llama", None, lora=None), tokens(2, 20)
    fuse(model)
    tuned = get_peft_model(model, LNTuningConfig(target_modules=["input_layernorm"])).train()
    found = loss_and_gradients(tuned, ids)
    assert any("LNTuningLayer" in reason for reason in fusion_of(tuned).fallbacks)
    unfuse(tuned)
    assert_same(found, loss_and_gradients(tuned, ids))


def half_of_it(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    assert type(logits) is Tensor
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.float().view(-1, vocab_size), shifted.reshape(-1)) / 2


def test_a_loss_function_of_the_users() -> None:
    """It gets ordinary logits, whatever it does to them, and the head is as before after `unfuse`."""
    model, ids = adapted("llama"), tokens(2, 20)
    model.get_base_model().loss_function = half_of_it
    plain = loss_and_gradients(model, ids)
    del model.get_base_model()._loss_function
    fuse(model)
    model.get_base_model().loss_function = half_of_it
    assert_same(loss_and_gradients(model, ids), plain)
    unfuse(model)
    assert model.get_base_model().loss_function is half_of_it
    assert not any(isinstance(vars(m).get("forward"), LazyHead) for m in model.modules())
    assert_same(loss_and_gradients(model, ids), plain)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
def test_logits_that_are_read_too_late(options: dict[str, Any]) -> None:
    """Old hidden states under a new head are nobody's logits."""
    model, ids = adapted("llama", None, lora=None), tokens(2, 20)
    fuse(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    read = model(input_ids=ids, labels=ids)
    before = read.logits.float().detach().clone()
    late = model(input_ids=ids, labels=ids)
    late.loss.backward()
    torch.testing.assert_close(late.logits + 0, before)  # the graph is gone, the weights are the same
    latest = model(input_ids=ids, labels=ids)
    optimizer.step()
    torch.testing.assert_close(read.logits + 0, before)  # these were there already
    with pytest.raises(Unsupported, match="has changed since"):
        latest.logits.argmax(-1)
    with pytest.raises(Unsupported, match="has changed since"):
        (latest.logits / 2.0).float().sum()


def test_logits_of_a_frozen_head_may_be_read_late() -> None:
    model, ids = adapted("llama"), tokens(2, 20)
    fuse(model)
    outputs = model(input_ids=ids, labels=ids)
    with torch.no_grad():
        need = model.eval()(input_ids=ids).logits
    model.train()
    outputs.loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    torch.testing.assert_close(outputs.logits + 0, need)
    model.get_output_embeddings().weight.data = torch.zeros_like(model.get_output_embeddings().weight)
    outputs.logits.sum()  # computed once


def test_writing_into_logits_is_not_lost() -> None:
    hidden, head = torch.randn(2, 5, 8, requires_grad=True), torch.nn.Linear(8, 32)
    head.forward = LazyHead(head)  # type: ignore[method-assign,assignment]
    logits, need = head(hidden), F.linear(hidden, head.weight, head.bias)
    assert isinstance(logits, LazyLogits) and not logits.was_changed
    with torch.no_grad():
        assert torch.equal(logits.argmax(-1), need.argmax(-1))
    assert not logits.was_changed and (logits + 0).requires_grad
    logits.div_(2.0)
    torch.testing.assert_close(logits + 0, need / 2)
    torch.testing.assert_close(logits.float() * 3.0, need / 2 * 3)
    (gradient,) = torch.autograd.grad((logits * 1.0).sum(), hidden)
    torch.testing.assert_close(gradient, (head.weight.sum(0) / 2).expand_as(hidden))


def _halve(head: Any, inputs: Any, logits: Tensor) -> None:
    logits.mul_(0.5)


def test_a_hook_that_writes_into_logits_reaches_the_loss() -> None:
    model, ids = adapted("llama"), tokens(2, 20)
    hook = model.get_output_embeddings().register_forward_hook(_halve)
    plain = loss_and_gradients(model, ids)
    hook.remove()
    fuse(model)
    model.get_output_embeddings().register_forward_hook(_halve)
    assert_same(loss_and_gradients(model, ids), plain)


def test_a_soft_cap_in_the_config_of_gemma_3() -> None:
    """transformers does not apply it to this family's scores, whatever its config says."""
    model, ids = adapted("gemma3_text", attn_logit_softcapping=2.0), tokens(2, 20)
    model.set_attn_implementation("eager")
    plain = loss_and_gradients(model, ids)
    fuse(model)
    assert_same(loss_and_gradients(model, ids), plain)
    assert not fusion_of(model).fallbacks


def test_the_config_is_saved_as_it_was(tmp_path: Path) -> None:
    model, ids = adapted("llama", None, lora=None), tokens(2, 20)
    assert model.config.use_cache is True
    fuse(model)
    loss_and_gradients(model, ids)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["use_cache"] is True
    assert not fusion_of(model).fallbacks
