"""Guesses change no token: look-up in the text and a draft model, over decoding's kernels by definition."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import pytest
import torch
from torch import Tensor

import fewbits
from fewbits.models.fast import with_methods
from fewbits.models.generation import speculation
from fewbits.models.generation import step as decode_step
from fewbits.models.generation.loop import decoding_of
from fewbits.models.generation.speculation import Lookup
from tests.models.emulated import on_a_cpu
from tests.models.tiny import tiny, tokens


def model_of(family: str = "llama", **changes: Any) -> Any:
    model = tiny(family, dtype=torch.bfloat16, **changes)
    fewbits.convert(model, "qlora_nf4")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return with_methods(model)


@pytest.fixture
def advanced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step so far, of the model and of its draft."""
    on_a_cpu(monkeypatch)
    rows: list[int] = []
    real = decode_step.DecodeStep.advance

    def advance(self: Any) -> Tensor:
        rows.append(self.batch)
        return real(self)

    monkeypatch.setattr(decode_step.DecodeStep, "advance", advance)
    return rows


def greedy(model: Any, ids: Tensor, length: int = 40, **asked: Any) -> Tensor:
    return model.generate(ids, max_new_tokens=length, do_sample=False, **asked)


def repeating(length: int = 24) -> Tensor:
    """A text whose end stood in it before."""
    part = tokens(1, 6, seed=4)
    return part.repeat(1, length // 6)


def test_lookup_guesses_what_followed_last() -> None:
    guess = Lookup(3)
    assert guess([1, 2, 3]) == []
    assert guess([1, 2, 3, 4, 2, 3]) == [4, 2, 3]
    assert guess([1, 2, 3, 4, 2, 3, 7, 2, 3]) == [7, 2, 3]
    assert guess([1, 2, 3, 4, 2, 3, 7, 2, 3, 4, 2, 3]) == [7, 2, 3]  # 4 2 3 is the longer match
    assert Lookup(2)([5, 5, 5]) == [5, 5]
    assert Lookup(5)([1, 7, 8, 9, 7]) == [8, 9, 7, 8, 9]  # and on, as a loop


def test_matches_that_are_seldom_right_are_left_out() -> None:
    """A text of random tokens costs few guesses; one that begins to repeat itself is guessed again."""
    guess, text = Lookup(8), tokens(1, 600, seed=9)[0].tolist()
    asked = [bool(guess(text[:length])) for length in range(40, 600)]
    assert sum(asked[100:]) < 0.12 * len(asked[100:]) and sum(asked[100:]) > 0
    part, at = text[:30], 600
    text, asked = text + part * 8, []
    while at < len(text):
        guesses = guess(text[:at])
        asked.append(bool(guesses))
        at += 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(guesses, text[at:])))  # noqa: B905
    assert len(asked) < 90 and all(asked[-20:])  # 240 tokens


def test_a_streamer_sees_each_token_once(advanced: list[int]) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.seen: list[int] = []
            self.ended = 0

        def put(self, value: Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.ended += 1

    model, ids, streamer = model_of(), repeating(), Streamer()
    text = greedy(model, ids, prompt_lookup_num_tokens=4, streamer=streamer)
    assert streamer.seen == text[0].tolist() and streamer.ended == 1 and 5 in advanced


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("mistral", "qwen3"))]
)
def test_looking_up_changes_no_token(family: str, advanced: list[int]) -> None:
    """Right and wrong guesses; beyond mistral's window too."""
    model = model_of(family)
    for ids in (repeating(), tokens(1, 10, seed=2)):
        want = greedy(model, ids)
        advanced.clear()
        assert torch.equal(greedy(model, ids, prompt_lookup_num_tokens=4), want)
        assert set(advanced) == {1, 5} or set(advanced) == {5}
    tiny_texts = greedy(model, repeating(), 90, prompt_lookup_num_tokens=6)
    assert tiny_texts.shape[1] == 114  # the model's context is 128


def test_right_guesses_save_steps(advanced: list[int]) -> None:
    """A model that says one token for ever: each step gives all guesses and one more."""
    model = model_of()
    model.lm_head.weight.data.zero_()
    ids = tokens(1, 8)
    want = greedy(model, ids, 30)
    assert len(want[0, 8:].unique()) == 1
    advanced.clear()
    assert torch.equal(greedy(model, ids, 30, prompt_lookup_num_tokens=5), want)
    assert len(advanced) < 12


@pytest.mark.parametrize("same", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_draft_changes_no_token(same: bool, advanced: list[int]) -> None:
    """A draft that is the model's twin, and one that knows nothing."""
    model = model_of("llama")
    draft = model_of("llama") if same else model_of("qwen3", seed=7, num_hidden_layers=1)
    draft.generation_config.num_assistant_tokens = 3
    for ids in (tokens(1, 10, seed=2), repeating()):
        want = greedy(model, ids)
        advanced.clear()
        assert torch.equal(greedy(model, ids, assistant_model=draft), want)
        verified = advanced.count(4)
        assert verified <= 13 if same else verified >= 20  # of 40 tokens, four a step or about one


@pytest.mark.slow
def test_words_that_change_the_choice(advanced: list[int]) -> None:
    """Penalties, bans, ends and stopping criteria see every token in its place."""
    from transformers import StoppingCriteria

    class Long(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.tensor([input_ids.shape[1] == 37])

    model, ids = model_of(), repeating()
    free = greedy(model, ids)[0, 24:].tolist()
    for asked in (
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 3},
        {"suppress_tokens": free[:3]},
        {"eos_token_id": free[6]},
        {"stopping_criteria": [Long()]},
    ):
        want = greedy(model, ids, **asked)
        assert torch.equal(greedy(model, ids, prompt_lookup_num_tokens=5, **asked), want), asked
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = (padded > 0).long()
    found = greedy(model, padded, attention_mask=mask, prompt_lookup_num_tokens=5)
    assert torch.equal(found, greedy(model, padded, attention_mask=mask))


def test_a_streamer_sees_every_token_once(advanced: list[int]) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.seen: list[int] = []
            self.ended = 0

        def put(self, value: Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.ended += 1

    model, streamer = model_of(), Streamer()
    out = greedy(model, repeating(), prompt_lookup_num_tokens=5, streamer=streamer)
    assert streamer.seen == out[0].tolist() and streamer.ended == 1


def test_adapters_newest_values_verify(advanced: list[int]) -> None:
    model = fewbits.get_peft_model(model_of(), r=4, target_modules="all-linear")
    for scale in (0.1, 0.4):
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.manual_seed(1)
                parameter.data.normal_().mul_(scale)
        want = greedy(model, repeating())
        assert torch.equal(greedy(model, repeating(), prompt_lookup_num_tokens=4), want)


@pytest.mark.parametrize("emulated", [True, False])
def test_transformers_verifies_what_is_not_ours(
    emulated: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over packed weights, with and without a step of our own; drawn tokens and drafts of other families."""
    if emulated:
        on_a_cpu(monkeypatch)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, ids = model_of(), repeating()
    torch.manual_seed(0)
    drawn = model.generate(ids, max_new_tokens=9, do_sample=True, prompt_lookup_num_tokens=4)
    assert drawn.shape[1] == 33
    own = type(model).generate(model, ids, max_new_tokens=9, do_sample=False)
    other = model_of("gemma2", num_hidden_layers=1)
    for _ in range(2):
        assert torch.equal(greedy(model, ids, 9, assistant_model=other), own)
    assert torch.equal(greedy(model, ids, 9, prompt_lookup_num_tokens=4), own)
    assert caplog.text.count("the draft model has no step") == int(emulated)
    assert caplog.text.count("tokens that are drawn are verified there") == int(emulated)


def test_a_step_that_does_not_agree_is_not_used(
    advanced: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(speculation, "ROUNDING", 0.0)
    model = model_of()
    want = greedy(model, repeating())
    assert torch.equal(greedy(model, repeating(), prompt_lookup_num_tokens=4), want)
    assert "decodes without guesses: a step of 5 tokens gives logits" in caplog.text
    assert decoding_of(model).step is not None
