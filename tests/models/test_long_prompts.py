"""Prompts in pieces: where the memory does not hold a forward of the whole one, or where the call says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fewbits.models.generation import step as decode_step
from fewbits.models.generation.live import plan
from fewbits.models.generation.loop import decoding_of
from tests.models.emulated import count_steps, on_a_cpu
from tests.models.test_decode_generate import model_of, padded
from tests.models.tiny import tokens

GREEDY = {"do_sample": False, "max_new_tokens": 8}


def lengths_read(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward from now on."""
    lengths: list[int] = []
    real = type(model).forward

    def forward(self: Any, *args: Any, **words: Any) -> Any:
        ids = words.get("input_ids")
        lengths.append((words["inputs_embeds"] if ids is None else ids).shape[1])
        return real(self, *args, **words)

    monkeypatch.setattr(type(model), "forward", forward)
    return lengths


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_call_says_how_many_at_a_time(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding in front, beyond a window; in pieces of 6 of 20 tokens, as tokens and as embeddings."""
    on_a_cpu(monkeypatch)
    model, steps, prompt = model_of(family), count_steps(monkeypatch), padded()
    whole = model.generate(**prompt, **GREEDY)
    lengths = lengths_read(model, monkeypatch)
    steps[0] = 0
    assert torch.equal(model.generate(**prompt, **GREEDY, prefill_chunk_size=6), whole)
    assert lengths == [6, 6, 6, 2] and steps[0] == 7
    vectors = model.get_input_embeddings()(prompt["input_ids"])
    mask = prompt["attention_mask"]
    new = model.generate(inputs_embeds=vectors, attention_mask=mask, **GREEDY, prefill_chunk_size=9)
    assert torch.equal(new, whole[:, 20:]) and lengths[4:] == [9, 9, 2]


def test_without_memory_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(monkeypatch)
    model, prompt = model_of("llama", max_position_embeddings=1024), padded(700)
    whole = model.generate(**prompt, **GREEDY)
    lengths = lengths_read(model, monkeypatch)
    monkeypatch.setattr(plan, "_ALWAYS_WHOLE", 1024)
    monkeypatch.setattr(plan, "free_share", lambda _: 0)
    assert torch.equal(model.generate(**prompt, **GREEDY), whole) and lengths == [256, 256, 188]


def test_a_conversation_that_grows_gets_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as much room again each time; just what is needed where the memory does not hold more."""
    on_a_cpu(monkeypatch)
    model = model_of("llama", max_position_embeddings=8192)
    rooms: list[int] = []
    real = decode_step.DecodeStep.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        if options["room"] == 3072:  # half as much again as 2048
            raise torch.OutOfMemoryError
        rooms.append(options["room"])
        real(self, *args, **options)

    monkeypatch.setattr(decode_step.DecodeStep, "__init__", init)
    for length in (100, 300, 600, 900, 1400, 1700):
        ids = tokens(1, length)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
    assert rooms == [256, 512, 768, 1280, 2048]  # and not 1792 as well
    ids = tokens(1, 2100)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
    assert rooms[-1] == 2304 and not decoding_of(model).said
