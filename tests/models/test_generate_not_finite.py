"""Logits that are NaN or infinite: one sentence from every way of generating, whenever they come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput, NotFinite
from fewbits.models.generation.loop import decoding_of
from tests.models.emulated import count_steps, on_a_cpu
from tests.models.test_decode_generate import model_of
from tests.models.tiny import tokens

GREEDY = {"do_sample": False, "max_new_tokens": 24}


def spoilt(model: Any) -> Any:
    model.model.norm.weight.data[3] = torch.nan
    return model


def generate(model: Any, **words: Any) -> Tensor:
    ids = tokens(2, 9)
    given = {"attention_mask": torch.ones_like(ids), **GREEDY, **words}
    return model.generate(ids, **given)  # type: ignore[no-any-return]


@pytest.mark.parametrize("words", [{}, {"do_sample": True}, {"num_beams": 2}])
@pytest.mark.parametrize("emulated", [True, False])
def test_of_the_prompt(words: dict[str, Any], emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if emulated:
        on_a_cpu(monkeypatch)
    model = spoilt(model_of("llama"))
    with pytest.raises(NotFinite, match=r"logits for row 1 are NaN or infinite: model.norm.weight \(64,\)"):
        generate(model, **words)
    assert not decoding_of(model).refused  # a repaired model has its step again


@pytest.mark.parametrize("words", [{}, {"do_sample": True}])
def test_of_a_later_token(words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights spoil between two tokens; the text before is not handed out as if it were whole."""
    on_a_cpu(monkeypatch)
    model, steps = model_of("llama"), count_steps(monkeypatch)
    generate(model)
    real = decoding_of(model).step.run  # type: ignore[union-attr]
    steps[0] = 0

    def run() -> Tensor:
        logits = real()
        return logits[1].fill_(torch.nan) if steps[0] == 5 else logits

    monkeypatch.setattr(decoding_of(model).step, "run", run)
    with pytest.raises(NotFinite, match="logits for row 2"):
        generate(model, **words)


def test_of_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(monkeypatch)
    model = model_of("llama")
    ids = tokens(1, 6).repeat(1, 3)
    words = {"prompt_lookup_num_tokens": 3, "attention_mask": torch.ones_like(ids), **GREEDY}
    model.generate(ids, **words)
    spoilt(model)
    with pytest.raises(NotFinite, match="logits for row 1"):
        model.generate(ids, **words)


@pytest.mark.parametrize("emulated", [True, False])
@pytest.mark.parametrize("do_sample", [True, False])
def test_every_token_banned(emulated: bool, do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if emulated:
        on_a_cpu(monkeypatch)
    model = model_of("llama")
    with pytest.raises(BadInput, match="leave no token to choose for row 1; ban fewer"):
        generate(model, suppress_tokens=list(range(model.config.vocab_size)), do_sample=do_sample)


def test_who_asks_to_remove_them_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    for emulated in (False, True):
        if emulated:
            on_a_cpu(monkeypatch)
        assert generate(spoilt(model_of("llama")), remove_invalid_values=True).shape == (2, 33)
