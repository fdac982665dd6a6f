"""Batches that live with several adapters: each text is what it is alone with its own."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

import fewbits
from fewbits.errors import BadInput
from fewbits.models.fast import with_methods
from fewbits.models.generation.adapters_by_row import names_adapters
from fewbits.models.generation.live import answers as live
from fewbits.models.generation.live import step_slots
from fewbits.models.generation.live.answers import Report, answers
from fewbits.models.generation.live.rows import Row
from fewbits.models.generation.packed_cache import PackedCache
from tests.models.emulated import count_steps, on_a_cpu
from tests.models.test_live_batch import model_of, rows

GREEDY = {"max_new_tokens": 15, "do_sample": False}
NAMES = ["wide", "__base__", "late", "wide", "late", None, "default", "late", "wide"]


def adapted(**changes: Any) -> Any:
    """A model with three adapters of several ranks, scalings and targets."""
    base = model_of("llama", **changes)
    model = fewbits.get_peft_model(base, r=4, lora_alpha=8, target_modules="all-linear")
    model.add_adapter("wide", peft.LoraConfig(r=12, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    model.add_adapter("late", peft.LoraConfig(r=8, lora_alpha=8, target_modules=["gate_proj", "o_proj"]))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    with_methods(model, base)
    return model.eval()


def named() -> list[Row]:
    """The fourth and fifth have one prompt and two adapters."""
    return [Row(row.index, row.ids, row.seed, name) for row, name in zip(rows(), NAMES, strict=True)]


def made(model: Any, asked: dict[str, Any], **how: Any) -> list[list[int]]:
    texts = {text.row.index: text.tokens for text in answers(model, named(), asked, **how)}
    return [texts[i] for i in range(len(NAMES))]


@torch.no_grad()
def alone(model: Any, row: Row, **asked: Any) -> list[int]:
    """The row by itself, with its adapter active."""
    base, ids = model.get_base_model(), torch.tensor([row.ids])
    with model.disable_adapter() if row.adapter == "__base__" else torch.no_grad():
        if row.adapter not in (None, "__base__"):
            model.set_adapter(row.adapter)
        text = type(base).generate(base, ids, **(GREEDY | asked))
    model.set_adapter("default")
    return text[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", [None, {"keys": "int8", "newest": 3, "group": 32}])
def test_each_text_has_its_own(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in pieces between steps of other texts, several in one forward, and packed caches."""
    model, report, words = adapted(head_dim=32), Report(), {} if kind is None else {"kv_cache": kind}
    monkeypatch.setitem(live._PIECE_TOKENS, "cpu", 8)
    found = made(model, GREEDY | words, slots=4, report=report)
    assert report.way == "forward"
    caches = [{} if kind is None else {"past_key_values": PackedCache(model.config, kind)} for _ in NAMES]
    assert found == [alone(model, row, **own) for row, own in zip(named(), caches, strict=True)]
    assert found[3] != found[4]  # one prompt, two adapters
    real = live.Prompts
    monkeypatch.setattr(live, "Prompts", lambda m, **how: real(m, **{**how, "together": True}))
    assert made(model, GREEDY | words, slots=9) == found
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    assert not any(names_adapters(hook) for hook in hooks)


@pytest.mark.parametrize("few", [False, True])
def test_the_same_over_decodings_kernels(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their definitions; rows that leave and steps of fewer rows take their adapters along."""
    on_a_cpu(monkeypatch)
    steps = count_steps(monkeypatch)
    monkeypatch.setattr(step_slots, "_FEWEST", 1)
    monkeypatch.setattr(live, "_LOOK_EVERY", 2)
    monkeypatch.setattr(live, "_looks_seldom", lambda device: True)
    model, report = adapted(dtype=torch.bfloat16, head_dim=64, hidden_size=128), Report()
    words = {"kv_cache": "int8"} if few else {}
    found = made(model, GREEDY | words, slots=6, report=report)
    assert report.way == "kernels" and steps[0], report.reason
    for row, new in zip(named(), found, strict=True):
        ids = torch.tensor([[*row.ids, *new]])
        if row.adapter not in (None, "__base__"):
            model.set_adapter(row.adapter)
        with torch.no_grad(), model.disable_adapter() if row.adapter == "__base__" else torch.no_grad():
            logits = model(ids).logits[0, len(row.ids) - 1 : -1].float()
        model.set_adapter("default")
        chosen = logits.gather(-1, torch.tensor(new)[:, None]).squeeze(-1)
        assert float(((logits.amax(-1) - chosen) / logits.std(-1)).max()) < 0.15


def test_beams_answer_one_by_one_with_their_adapter() -> None:
    model, report = adapted(), Report()
    found = made(model, GREEDY | {"num_beams": 2}, report=report)
    assert report.way == "one by one"
    assert found == [alone(model, row, num_beams=2) for row in named()]


def test_adapters_that_are_not_there() -> None:
    model = adapted()
    ids = rows(1)[0].ids

    def why(*found: Row) -> str:
        with pytest.raises(BadInput) as caught:
            list(answers(model, list(found), GREEDY))
        return str(caught.value)

    assert "row 2 asks for the adapter 'other'; the model's are: default, late, wide" in why(
        Row(0, ids, 0, "wide"), Row(1, ids, 0, "other")
    )
    model.merge_adapter(["wide"])
    assert "cannot be chosen by row while they are merged" in why(Row(0, ids, 0, "wide"))
    model.unmerge_adapter()
    model.base_model.set_adapter(["wide", "late"])
    assert "several adapters are active (late, wide); name one a row" in why(
        Row(0, ids), Row(1, ids, 0, "late")
    )
    assert len(list(answers(model, [Row(0, ids)], GREEDY))) == 1  # both, as always
    with pytest.raises(BadInput, match="the model's are: none"):
        list(answers(model_of("llama"), [Row(0, ids, 0, "wide")], GREEDY))


def test_what_is_asked_between_two_answers_has_the_active_adapter() -> None:
    """And a call that is refused there takes nothing away from the texts that follow."""
    model, ids = adapted(), torch.tensor([rows()[0].ids])
    need, prompt = made(model, GREEDY, slots=2), model.generate(ids, **GREEDY)
    found = {}
    for text in answers(model, named(), GREEDY, slots=2):
        found[text.row.index] = text.tokens
        assert torch.equal(model.generate(ids, **GREEDY), prompt)
        with pytest.raises(BadInput):
            model.generate(ids[:, :0], **GREEDY)
    assert [found[i] for i in range(len(NAMES))] == need
