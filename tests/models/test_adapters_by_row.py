"""Several adapters in one batch, chosen by row: PEFT's ``adapter_names`` through decoding's kernels."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor

import fewbits
from fewbits.errors import BadInput
from fewbits.models.fast import with_methods
from fewbits.models.generation.loop import decoding_of
from tests.models.emulated import count_steps, on_a_cpu
from tests.models.test_decode_generate import model_of, padded

GREEDY = {"do_sample": False, "max_new_tokens": 9}


def adapted(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """A model with three adapters: of several ranks, scalings and targets."""
    on_a_cpu(monkeypatch)
    base = model_of("llama")
    model = fewbits.get_peft_model(base, r=4, lora_alpha=8, target_modules="all-linear")
    model.add_adapter("wide", peft.LoraConfig(r=12, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    model.add_adapter("late", peft.LoraConfig(r=8, lora_alpha=8, target_modules=["gate_proj", "o_proj"]))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    with_methods(model, base)
    return model.eval(), count_steps(monkeypatch)


def alone(model: Any, prompt: dict[str, Tensor], row: int, name: str) -> Tensor:
    """One row by itself, with its adapter active, through PEFT's layers and transformers' loop."""
    one = {word: value[row : row + 1] for word, value in prompt.items()}
    if name == "__base__":
        with model.disable_adapter():
            return type(model.get_base_model()).generate(model.get_base_model(), **one, **GREEDY)[0]
    model.set_adapter(name)
    out: Tensor = type(model.get_base_model()).generate(model.get_base_model(), **one, **GREEDY)[0]
    model.set_adapter("default")
    return out


def test_each_row_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = adapted(monkeypatch)
    prompt = padded()
    first = model.generate(**prompt, **GREEDY, adapter_names=["wide", "__base__", "late"])
    step = decoding_of(model).step
    assert steps[0] == 8 and step is not None and step.adapters == ("__base__", "late", "wide")
    for row, name in enumerate(["wide", "__base__", "late"]):
        assert torch.equal(first[row], alone(model, prompt, row, name))
    other = model.generate(**prompt, **GREEDY, adapter_names=["late", "late", "wide"])
    assert decoding_of(model).step is step  # the same graph for another choice
    for row, name in enumerate(["late", "late", "wide"]):
        assert torch.equal(other[row], alone(model, prompt, row, name))
    assert not torch.equal(first, other)


def test_newest_values_and_the_active_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = adapted(monkeypatch)
    prompt = padded()
    names = ["default", "wide", "default"]
    plain = model.generate(**prompt, **GREEDY)
    before = model.generate(**prompt, **GREEDY, adapter_names=names)
    assert torch.equal(before[0], plain[0]) and torch.equal(before[2], plain[2])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.wide" in name:
                parameter.neg_()
    after = model.generate(**prompt, **GREEDY, adapter_names=names)
    assert torch.equal(after[::2], before[::2]) and torch.equal(after[1], alone(model, prompt, 1, "wide"))
    assert not torch.equal(after[1], before[1])
    steps[0] = 0
    assert torch.equal(model.generate(**prompt, **GREEDY), plain) and steps[0] == 8
    assert not decoding_of(model).said


def test_guesses_have_the_rows_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = adapted(monkeypatch)
    prompt = {word: value[1:2].repeat(1, 2) for word, value in padded().items()}
    out = model.generate(**prompt, **GREEDY, adapter_names=["wide"], prompt_lookup_num_tokens=3)
    assert torch.equal(out[0], alone(model, prompt, 0, "wide")) and steps[0] and not decoding_of(model).said


def test_a_merged_adapter_goes_to_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which refuses it; the step has not taken it for the base."""
    model, steps = adapted(monkeypatch)
    model.merge_adapter(["wide"])
    with pytest.raises(ValueError, match="merged"):
        model.generate(**padded(), **GREEDY, adapter_names=["wide", "late", "wide"])
    assert not steps[0]


@pytest.mark.parametrize("error", [BadInput, KeyboardInterrupt])
def test_a_call_that_failed_leaves_no_adapters_by_row(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT's hooks stayed, and every later call of one row failed or had those adapters."""
    model, _ = adapted(monkeypatch)
    base, prompt = model.get_base_model(), padded()
    expected = model(**prompt).logits
    words = dict(prompt)
    if error is BadInput:
        words["input_ids"] = prompt["input_ids"][:, :0]
    else:

        def stop(self: Any, inputs: Any = None, **_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(type(base), "generate", stop)
    with pytest.raises(error):
        model.generate(**words, **GREEDY, adapter_names=["wide", "__base__", "late"])
    assert not any(module._forward_pre_hooks_with_kwargs for module in base.model.layers.modules())
    assert torch.equal(model(**prompt).logits, expected)


def test_a_scaling_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of an adapter that is not the active one."""
    model, _ = adapted(monkeypatch)
    prompt, names = padded(), ["wide", "__base__", "late"]
    before = model.generate(**prompt, **GREEDY, adapter_names=names)
    for module in model.modules():
        if hasattr(module, "lora_A") and "wide" in module.scaling:
            module.scaling["wide"] *= 6
    after = model.generate(**prompt, **GREEDY, adapter_names=names)
    assert torch.equal(after[0], alone(model, prompt, 0, "wide")) and not torch.equal(after[0], before[0])
    assert torch.equal(after[1:], before[1:])
