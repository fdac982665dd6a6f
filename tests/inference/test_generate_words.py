"""`fewbits.generate` and `stream` with more words of transformers' ``generate``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fewbits.errors import BadInput, NotFinite
from fewbits.inference.generate import Guessing, Sampling, generate, stream

GREEDY = Sampling(max_new_tokens=24, temperature=0)


def test_a_stop_string_across_tokens(stories260k: Any) -> None:
    model, tokenizer = stories260k
    whole = generate(model, tokenizer, "Once upon a time", GREEDY)
    part = whole.text[6:15]  # begins and ends inside of tokens
    stopped = generate(model, tokenizer, "Once upon a time", GREEDY, stop_strings=[part])
    assert part in stopped.text and whole.text.startswith(stopped.text)
    assert len(stopped.text) < len(whole.text) and stopped.stopped_by == "stop"
    assert whole.stopped_by == "length"


def test_bias_and_bans(stories260k: Any) -> None:
    model, tokenizer = stories260k
    first = generate(model, tokenizer, "Once upon a time", Sampling(max_new_tokens=1, temperature=0)).text
    ids = tokenizer("Once upon a time" + first)["input_ids"][-1:]
    banned = generate(model, tokenizer, "Once upon a time", GREEDY, bad_words_ids=[ids])
    assert not banned.text.startswith(first)
    pushed = generate(model, tokenizer, "Once upon a time", GREEDY, sequence_bias={(300,): 1e4})
    assert tokenizer(pushed.text, add_special_tokens=False)["input_ids"].count(300) > 5
    narrow = Sampling(max_new_tokens=24, temperature=1, seed=1)
    assert (
        generate(model, tokenizer, "Once upon a time", narrow, min_p=0.999).text
        == generate(model, tokenizer, "Once upon a time", GREEDY).text
    )


def test_a_stream_takes_them_and_guesses(stories260k: Any) -> None:
    model, tokenizer = stories260k
    pieces = stream(
        model, tokenizer, "Once upon a time", GREEDY, guessing=Guessing(lookup=4), stop_strings=["the"]
    )
    assert "the" in "".join(pieces)[-6:]  # the token that ends it may go on


@pytest.mark.parametrize("name", ["temperature", "kv_cache", "streamer", "seed"])
def test_a_word_with_an_argument_of_its_own(name: str, stories260k: Any) -> None:
    model, tokenizer = stories260k
    with pytest.raises(BadInput, match=f"{name} is no word of generate"):
        generate(model, tokenizer, "Once", GREEDY, **{name: 1})


def test_a_later_token_that_is_not_finite(stories260k: Any) -> None:
    model, tokenizer = stories260k
    calls = [0]

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        calls[0] += 1
        return output * torch.nan if calls[0] == 4 else None

    handle = model.lm_head.register_forward_hook(spoil)
    try:
        with pytest.raises(NotFinite, match="logits for this prompt are NaN or infinite"):
            generate(model, tokenizer, "Once upon a time", GREEDY)
    finally:
        handle.remove()


def test_one_answer_and_no_more(stories260k: Any) -> None:
    """Two answers became one text of both; beams and outputs with scores were a traceback."""
    how = (*stories260k, "Once upon a time", GREEDY)
    with pytest.raises(BadInput, match="num_return_sequences is more than 1, and an answer here is one"):
        generate(*how, num_return_sequences=2)
    with pytest.raises(BadInput, match="give texts of at least one character"):
        generate(*how, stop_strings=["the", ""])
    pieces: list[str] = []
    beams = generate(*how, num_beams=3, on_text=pieces.append)
    assert beams.text and "".join(pieces) == beams.text and len(pieces) == 1
    plain = generate(*how)
    assert generate(*how, return_dict_in_generate=True, output_scores=True).text == plain.text


def test_an_end_token_of_the_call_ends_the_text(stories260k: Any) -> None:
    model, tokenizer = stories260k
    whole = generate(model, tokenizer, "Once upon a time", GREEDY)
    end = tokenizer(whole.text.split(".")[0] + ".", add_special_tokens=False)["input_ids"][-1]
    cut = generate(model, tokenizer, "Once upon a time", GREEDY, eos_token_id=end)
    assert cut.stopped_by == "end" and whole.text.startswith(cut.text) and cut.tokens < whole.tokens


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", "hot"), ("top_p", None), ("repetition_penalty", True)]
)
def test_settings_that_are_numbers(name: str, value: Any) -> None:
    with pytest.raises(BadInput, match=f"{name} is {value!r}, and it must be a number"):
        Sampling(**{name: value})
