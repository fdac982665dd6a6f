"""Unmerged adapters in a decode step, whose inner values kernels in front begin; by definitions on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fewbits
from fewbits.models.fast import with_methods
from fewbits.models.generation import step as decode_step
from fewbits.models.generation.loop import decoding_of
from fewbits.models.generation.step import DecodeStep
from tests.models.emulated import on_a_cpu
from tests.models.tiny import tiny, tokens

BF16 = torch.bfloat16
SITES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(
    family: str = "llama", targets: Any = "all-linear", *, r: int = 4, **more: Any
) -> tuple[Any, Any]:
    """A model of two layers in NF4, heads of 64 values, with an adapter whose B is not zero."""
    model = tiny(family, dtype=BF16, hidden_size=128, intermediate_size=128, head_dim=64)
    fewbits.convert(model, "qlora_nf4")
    with_methods(model)
    torch.manual_seed(5)
    peft_model = fewbits.get_peft_model(model, r=r, target_modules=targets, **more)
    change(peft_model)
    return model, peft_model


def change(peft_model: Any, std: float = 0.05) -> None:
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data.add_(torch.randn_like(parameter) * std)


def logits(model: Any, batch: int, *, begins: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, int]:
    """Of one step over a random cache, and its launches."""
    with monkeypatch.context() as patch:
        if not begins:
            patch.setattr(decode_step, "takes_parts", lambda *_: False)
            patch.setattr(decode_step, "begins_inner", lambda *_: False)
        step = DecodeStep(model, batch=batch, room=8)
    torch.manual_seed(9)
    for cache in (*step.keys, *step.values):
        cache.normal_()
    step.tokens.copy_(tokens(batch, 1)[:, 0])
    step.position.fill_(5)
    return step.run().clone(), step.launches


CASES: list[tuple[Any, dict[str, Any], int]] = [
    ("all-linear", {}, 1),
    ("all-linear", {"r": 3, "rank_pattern": {"q_proj": 6, "up_proj": 1}}, 1),
    (["q_proj", "v_proj"], {}, 1),
    (["o_proj", "up_proj"], {"r": 9}, 0),
    (["down_proj"], {}, 0),
    ("all-linear", {"r": 100}, 2),  # q, k, v have more inner values than a kernel begins
]


@pytest.mark.parametrize(("targets", "what", "in_front"), CASES)
def test_the_kernel_in_front_begins_what_a_launch_had(
    monkeypatch: pytest.MonkeyPatch, targets: Any, what: dict[str, Any], in_front: int
) -> None:
    """The first layer's q, k, v have no kernel of ours in front, and so a launch."""
    model, _ = adapted(targets=targets, **what)
    ours, launches = logits(model, 1, begins=True, monkeypatch=monkeypatch)
    need, _ = logits(model, 1, begins=False, monkeypatch=monkeypatch)
    assert float((ours - need).norm() / need.norm()) < 2e-3
    assert launches == 5 * 2 + 1 + in_front


@pytest.mark.parametrize(("batch", "in_front"), [(2, 1), (3, 0)])
def test_two_rows_too_and_more_as_before(monkeypatch: pytest.MonkeyPatch, batch: int, in_front: int) -> None:
    model, _ = adapted("gemma")  # its norms multiply by one more than their weight
    ours, launches = logits(model, batch, begins=True, monkeypatch=monkeypatch)
    need, _ = logits(model, batch, begins=False, monkeypatch=monkeypatch)
    assert float((ours - need).norm() / need.norm()) < 2e-3
    assert launches == 5 * 2 + 1 + in_front


def test_generating_with_an_adapter_equals_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newest values after a change, none while it is switched off, and merged; each through ``generate``."""
    on_a_cpu(monkeypatch)
    model, peft_model = adapted()
    model.generation_config.eos_token_id = None
    prompt = {"input_ids": tokens(1, 9), "attention_mask": torch.ones(1, 9, dtype=torch.long)}

    def difference() -> float:
        """Of the step's last logits to the model's own, over the same tokens."""
        out = peft_model.generate(**prompt, max_new_tokens=4, do_sample=False)
        step = decoding_of(peft_model).step
        assert step is not None
        with torch.no_grad():
            own = peft_model(input_ids=out[:, :-1]).logits[:, -1].float()
        return float((step.logits - own).norm() / own.norm())

    for std in (0.05, 0.1, 0.0):
        change(peft_model, std)
        assert difference() < 0.04
    with peft_model.disable_adapter():
        assert difference() < 0.04
    peft_model.merge_adapter()
    assert difference() < 0.04
