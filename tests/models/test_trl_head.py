"""TRL's output head over a fused model: the same fields and gradients, without its second pass; unpatched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fewbits.decoder.fuse import fuse, fusion_of, unfuse
from fewbits.decoder.trl_head import places_of
from fewbits.kernels.loss import linear_log_probs as ours
from tests import peers
from tests.models.test_float8_head import BOTH, loss_and_gradients, trained
from tests.models.test_fused import adapted
from tests.models.tiny import tokens

utils = pytest.importorskip("trl.trainer.utils")
ALL = ("log_probs", "entropy", "mean_logits", "is_top1")


def with_head(family: str = "llama", outputs: tuple[str, ...] = ALL, **options: Any) -> Any:
    model = adapted(family)
    fuse(model)
    utils.add_fused_lm_head(model.get_base_model(), outputs=outputs, **options)
    return model


def ask(model: Any, **kwargs: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All fields, and gradients of a loss that weights each token otherwise."""
    ids = tokens(3, 20)
    labels = ids.clone()
    labels[0, 12:] = labels[1, :5] = -100
    model.zero_grad()
    batch = {"labels": labels, **kwargs}
    if "shift_labels" in kwargs:
        batch["labels"] = None
    found = model(input_ids=ids, fused_lm_head=True, **batch)
    weights = torch.linspace(-1, 2, found.log_probs.numel()).view(found.log_probs.shape)
    if torch.is_grad_enabled():
        (found.loss + (found.log_probs * weights).sum()).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {name: value for name, value in found.items() if torch.is_tensor(value)}, gradients


def taken(model: Any) -> dict[str, int]:
    return dict(fusion_of(model).trl_head.taken)


def judge(model: Any, need: dict[str, torch.Tensor], shift_labels: Any, temperature: float) -> None:
    """Skip where TRL's own head gives other log-probabilities than softmax of the model's logits."""
    ids = tokens(3, 20)
    labels = ids.clone()
    labels[0, 12:] = labels[1, :5] = -100
    with torch.no_grad():
        logits = model(input_ids=ids).logits / temperature
    if shift_labels is None:
        logits, labels = logits[:, :-1], labels[:, 1:]
    else:
        labels = shift_labels
    counts = labels != -100
    log_probs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    found = need["log_probs"].detach()
    assert found.shape == labels.shape
    peers.same_or_skip("trl", found[counts], log_probs[counts], "log-probabilities", rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 7}, {"shift_labels": tokens(3, 20)}], ids=str)
def test_the_same_as_trl_computes(family: str, more: dict[str, Any]) -> None:
    outputs = ALL if family != "gemma2" else ("log_probs", "entropy", "is_top1")  # whose logits are capped
    temperature = 1.0 if family == "gemma2" else 0.7  # capped logits go undivided
    model = with_head(family, outputs, temperature=temperature)
    found = ask(model, **more)
    assert taken(model) == {"fused": 1}
    unfuse(model)
    need = ask(model, **more)
    judge(model, need[0], more.get("shift_labels"), temperature)
    assert found[0].keys() == need[0].keys()
    for name, value in need[0].items():
        assert found[0][name].dtype == value.dtype and found[0][name].shape == value.shape, name
        torch.testing.assert_close(found[0][name], value, rtol=1e-4, atol=1e-5)
    assert found[1].keys() == need[1].keys() and found[1]
    for name, value in need[1].items():
        assert (found[1][name] - value).norm() <= 1e-4 * value.norm(), name


def test_no_logits_are_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product for the logits and one for the gradient; TRL's own function is not called."""
    model = with_head()
    monkeypatch.setattr(utils._ChunkedLogProbFunction, "apply", None)
    products = []
    true = ours.chunked

    def counted(*args: Any) -> Any:
        products.append(args[1].hidden.shape[0])
        return true(*args)

    monkeypatch.setattr(ours, "chunked", counted)
    ask(model)
    labels = tokens(3, 20)[:, 1:]
    assert products == [labels.numel() - 8 - 4], "only rows that count, once"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cast_lm_head_to_fp32": True}, "float32"),
        ({"outputs": (*ALL, "log_sum_sq_probs")}, "log_sum_sq_probs"),
    ],
)
def test_what_trl_computes_itself(options: dict[str, Any], reason: str) -> None:
    model = with_head(**options)
    found = ask(model)
    (why,) = taken(model)
    assert reason in why
    unfuse(model)
    need = ask(model)
    torch.testing.assert_close(found[0]["log_probs"], need[0]["log_probs"], rtol=1e-4, atol=1e-5)


def test_a_copy_answers_for_itself() -> None:
    """TRL's forward of a copy goes on to the model that was copied; the answer must not come from there."""
    model = with_head()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in other.named_parameters():
            if "lora_B" in name:
                p.mul_(3)
    before, (found, gradients) = ask(model), ask(other)
    (why,) = taken(other)
    assert "copied" in why and gradients.keys() == before[1].keys()
    unfuse(other)
    need, other_gradients = ask(other)
    for name, value in need.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    for name, value in other_gradients.items():
        assert (gradients[name] - value).norm() <= 1e-4 * value.norm(), name
    utils.add_fused_lm_head(other.get_base_model(), outputs=ALL)  # a trainer of its own, over TRL's of before
    fuse(other)
    torch.testing.assert_close(ask(other)[0]["log_probs"], need["log_probs"], rtol=1e-4, atol=1e-5)


def test_a_head_that_trains_takes_trls_way() -> None:
    model = with_head()
    model.get_output_embeddings().weight.requires_grad_(True)
    ask(model)
    assert "fused" not in taken(model)
    assert model.get_output_embeddings().weight.grad is not None


@pytest.mark.parametrize("training", [True, False])
def test_passes_without_gradients(training: bool) -> None:
    """A reference's, and an evaluation's; the pass after them is an ordinary one again."""
    model, ids = with_head().train(training), tokens(2, 12)
    with torch.no_grad():
        found, _ = ask(model)
        plain = model(input_ids=ids).logits
    assert type(plain) is torch.Tensor and taken(model) == {"fused": 1}
    unfuse(model)
    with torch.no_grad():
        need, _ = ask(model)
    assert found.keys() == need.keys()
    for name, value in need.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_a_head_that_takes_the_former_ones_place() -> None:
    """resize_token_embeddings makes a new one: logits stay lazy, TRL is answered, the numbers are its own."""
    model = with_head()
    inner = model.get_base_model()
    former = inner.lm_head
    inner.resize_token_embeddings(120, mean_resizing=False)
    found = ask(model)
    assert taken(model) == {"fused": 1} and inner.lm_head is not former
    assert "forward" in vars(inner.lm_head) and "forward" not in vars(former)
    assert "Lazy" in type(model(input_ids=tokens(2, 12), labels=tokens(2, 12)).logits).__name__
    unfuse(model)
    assert "forward" not in vars(inner.lm_head)
    need = ask(model)
    for name, value in need[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-4, atol=1e-5)


def test_a_head_of_8_bits_is_one_in_each_pass_that_trains() -> None:
    """The loss of TRL's call is that of the model's own, and a reference's pass gives the very same."""
    model, ids = trained("llama", BOTH), tokens(3, 20)
    own, gradients = loss_and_gradients(model)
    utils.add_fused_lm_head(model.get_base_model(), outputs=ALL)
    model.zero_grad()
    found = model(input_ids=ids, labels=ids, fused_lm_head=True)
    found.loss.backward()
    torch.testing.assert_close(found.loss, own, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-6)
    with torch.no_grad():
        reference = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
        exact = model.eval()(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    assert torch.equal(reference, found.log_probs) and taken(model) == {"fused": 3}
    assert not torch.equal(exact, reference)  # an evaluation takes the head as it is
    torch.testing.assert_close(exact, reference, rtol=0.04, atol=0.04)


def test_ordinary_calls_stay_as_they_are() -> None:
    model, ids = with_head(), tokens(2, 12)
    outputs = model(input_ids=ids, labels=ids)
    outputs.loss.backward()
    assert outputs.logits.shape == (2, 12, 96) and not taken(model)


def test_a_batch_without_a_label_that_counts() -> None:
    model, ids = with_head(), tokens(2, 12)
    found = model(input_ids=ids, labels=torch.full_like(ids, -100), fused_lm_head=True)
    found.loss.backward()
    assert found.loss == 0 and taken(model) == {"fused": 1}
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_another_trl_is_left_alone() -> None:
    """Where its settings cannot be read nothing is guessed."""
    model = adapted("llama")
    fuse(model)
    inner = model.get_base_model()
    true = type(inner).forward
    inner.forward = lambda *args, fused_lm_head=False, **kwargs: true(inner, *args, **kwargs)
    ids = tokens(2, 12)
    model(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
    (why,) = taken(model)
    assert "not where they were" in why


def test_places_are_found_without_asking_how_many():
    """As nonzero finds them, which on a GPU waits for the device."""
    generator = torch.Generator().manual_seed(0)
    for length, share in ((1, 0.0), (1, 1.0), (7, 0.0), (64, 0.5), (513, 0.03), (513, 1.0)):
        chosen = torch.rand(length, generator=generator) < share
        assert torch.equal(places_of(chosen, int(chosen.sum())), chosen.nonzero().squeeze(1))
