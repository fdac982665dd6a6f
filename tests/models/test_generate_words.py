"""Every word of ``generate``: through decoding's kernels, by definition, or through transformers' loop.

A row of `TABLE` is what a call passes, and whether decoding's own step makes the tokens. They are those of
transformers' own loop over the same model in either case.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

import fewbits
from fewbits.models.fast import FastLanguageModel, with_methods
from tests.models.emulated import count_steps, on_a_cpu
from tests.models.tiny import tiny, tokens

HERE, THERE = True, False


class Odd(LogitsProcessor):
    """Only even tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, 1::2] = -float("inf")
        return scores


class AtLength(StoppingCriteria):
    """A text ends with 27 tokens."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 27)


DRAWN = {"do_sample": True, "temperature": 0.8}
TABLE: list[tuple[dict[str, Any], bool]] = [
    ({}, HERE),
    ({"max_new_tokens": None, "max_length": 29}, HERE),
    ({"min_new_tokens": 5, "eos_token_id": list(range(0, 96, 3))}, HERE),
    ({"eos_token_id": list(range(0, 96, 3))}, HERE),
    (DRAWN, HERE),
    ({**DRAWN, "top_k": 4}, HERE),
    ({**DRAWN, "top_p": 0.6, "top_k": 0}, HERE),
    ({**DRAWN, "min_p": 0.1}, HERE),
    ({**DRAWN, "typical_p": 0.5}, HERE),
    ({**DRAWN, "num_return_sequences": 3}, HERE),
    ({"repetition_penalty": 1.4}, HERE),
    ({"no_repeat_ngram_size": 2}, HERE),
    ({"bad_words_ids": [[5], [7, 8]]}, HERE),
    ({"sequence_bias": [[[30], 9.0], [[31, 32], 4.0]]}, HERE),
    ({"suppress_tokens": list(range(3, 60))}, HERE),
    ({"begin_suppress_tokens": list(range(3, 60))}, HERE),
    ({"forced_eos_token_id": 2}, HERE),
    ({"exponential_decay_length_penalty": (2, 2.5), "eos_token_id": 33}, HERE),
    ({"remove_invalid_values": True, "renormalize_logits": True}, HERE),
    ({"logits_processor": [Odd()]}, HERE),
    ({"stopping_criteria": [AtLength()]}, HERE),
    ({"prefix_allowed_tokens_fn": lambda row, ids: [3 + row, 40, 50]}, HERE),
    (
        {"generation_config": GenerationConfig(max_new_tokens=7, do_sample=False, repetition_penalty=1.2)},
        HERE,
    ),
    ({"disable_compile": True, "logits_to_keep": 1}, HERE),
    ({"max_time": 600.0}, HERE),
    ({"return_dict_in_generate": True}, HERE),
    ({"return_dict_in_generate": True, "output_scores": True, "output_logits": True}, HERE),
    ({**DRAWN, "top_k": 0, "return_dict_in_generate": True, "output_scores": True}, HERE),
    ({"output_scores": True}, HERE),
    ({"return_dict_in_generate": True, "output_attentions": True}, THERE),
    ({"return_dict_in_generate": True, "output_hidden_states": True}, THERE),
    ({"num_beams": 3}, THERE),
    ({"num_beams": 2, "num_return_sequences": 2, "return_dict_in_generate": True}, THERE),
    ({"use_cache": False}, THERE),
    ({"cache_implementation": "static"}, HERE),
    ({"cache_implementation": "dynamic"}, HERE),
    ({"cache_implementation": "hybrid", "return_dict_in_generate": True}, HERE),
    ({"cache_implementation": "static", "return_dict_in_generate": True}, HERE),
    ({"guidance_scale": 1.5}, HERE),
]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(monkeypatch)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps there were."""
    return count_steps(monkeypatch)


@pytest.fixture(scope="module")
def model() -> Any:
    made = tiny("qwen3", dtype=torch.float16)  # whose rounding leaves few ties
    fewbits.convert(made, "qlora_nf4")
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = 0
    adapted = FastLanguageModel.get_peft_model(with_methods(made), r=4)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.manual_seed(1)
            torch.nn.init.normal_(parameter, std=0.05)
    return adapted


def padded() -> dict[str, Tensor]:
    ids = tokens(3, 20)
    mask = torch.ones_like(ids)
    mask[0, :7], mask[2, :15] = 0, 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def call(model: Any, given: dict[str, Any], own: bool) -> Any:
    if "cache_implementation" in given:
        given = {**given, "disable_compile": True}  # transformers compiles steps over static caches
    base = model.get_base_model()
    torch.manual_seed(5)
    return type(base).generate(base, **given) if own else model.generate(**given)


def cases() -> list[Any]:
    """Each second word; in the slow tests the others, and some in training; every night all of these."""
    found = []
    for number, (words, here) in enumerate(TABLE):
        ready = () if number % 2 == 0 else pytest.mark.slow
        found.append(pytest.param(words, here, False, id=",".join(words), marks=ready))
        trained = pytest.mark.slow if number % 6 == 0 else pytest.mark.nightly
        found.append(pytest.param(words, here, True, id=f"{','.join(words)}, training", marks=trained))
    return found


@pytest.mark.parametrize(("words", "here", "training"), cases())
def test_a_word_means_what_it_means_in_transformers(
    words: dict[str, Any], here: bool, training: bool, model: Any, made: list[int]
) -> None:
    """Ready to answer, and in training between two steps."""
    FastLanguageModel.for_inference(model)
    given = {
        **padded(),
        **({} if "generation_config" in words else {"max_new_tokens": 9, "do_sample": False}),
    }
    given |= words
    want = call(model, given, own=True)
    if training:
        FastLanguageModel.for_training(model, "unsloth")
    found = call(model, given, own=False)
    assert (made[0] > 0) == here
    assert type(found) is type(want) and model.training == training
    if isinstance(found, Tensor):
        assert torch.equal(found, want)
        return
    assert torch.equal(found.sequences, want.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(found, name, None), getattr(want, name, None)
        assert (ours is None) == (theirs is None)
        for a, b in zip(ours or (), theirs or (), strict=True):
            kept = b.isfinite()
            assert torch.equal(a.isfinite(), kept)
            assert float((a - b)[kept].norm() / b[kept].norm()) < 0.03
    if here:
        ours, theirs = found.past_key_values, want.past_key_values
        assert type(ours) is type(theirs) and int(ours.get_seq_length()) == int(theirs.get_seq_length())


def test_a_cache_that_was_returned_goes_on(model: Any, made: list[int]) -> None:
    """A conversation whose cache the caller keeps; transformers' loop takes it, to the same tokens."""
    FastLanguageModel.for_inference(model)
    ids = tokens(1, 12)
    asked = {"max_new_tokens": 5, "do_sample": False}
    out = model.generate(ids, **asked, return_dict_in_generate=True)
    assert made[0] == 4
    longer = torch.cat([out.sequences, tokens(1, 3, seed=9)], dim=1)
    went_on = model.generate(longer, **asked, past_key_values=out.past_key_values)
    assert torch.equal(went_on, model.generate(longer, **asked))


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("words", [{}, {"repetition_penalty": 1.4}, {"return_dict_in_generate": True}])
def test_embeddings_in_place_of_tokens(
    words: dict[str, Any], with_ids: bool, model: Any, made: list[int]
) -> None:
    FastLanguageModel.for_inference(model)
    prompt = padded()
    ids = prompt.pop("input_ids")
    prompt["inputs_embeds"] = model.get_input_embeddings()(ids).detach()
    if with_ids:
        prompt["input_ids"] = ids
    given = {**prompt, "max_new_tokens": 9, "do_sample": False, **words}
    want, found = (call(model, given, own) for own in (True, False))
    assert made[0] == 8
    if words.get("return_dict_in_generate"):
        want, found = want.sequences, found.sequences
    assert torch.equal(found, want) and found.shape[1] == 9 + 20 * with_ids


def test_stop_strings_across_tokens(model: Any, made: list[int]) -> None:
    """A string of three tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    FastLanguageModel.for_inference(model)
    words = {chr(33 + i): i for i in range(96)}
    inner = Tokenizer(models.BPE(vocab=words, merges=[]))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    ids = tokens(1, 10)
    free = model.generate(ids, max_new_tokens=12, do_sample=False)
    stop = tokenizer.decode(free[0, 13:16])
    given = {
        "max_new_tokens": 12,
        "do_sample": False,
        "stop_strings": [stop],
        "tokenizer": tokenizer,
    }
    want = call(model, {"input_ids": ids, **given}, own=True)
    found = call(model, {"input_ids": ids, **given}, own=False)
    assert torch.equal(found, want) and found.shape[1] < 22 and stop in tokenizer.decode(found[0, 10:])
    assert made[0] > 11


def test_what_is_not_done_here_is_said_once(
    model: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    FastLanguageModel.for_inference(model)
    for _ in range(3):
        model.generate(tokens(1, 4), max_new_tokens=2, do_sample=False, num_beams=2)
    assert caplog.text.count("transformers' own loop: the call asks for num_beams") == 1


def test_caches_that_others_keep_are_named(model: Any) -> None:
    """One sentence each; a published configuration that says "hybrid" says nothing, as in transformers."""
    from fewbits.models.generation.calls import other_way

    said = {
        "quantized": "by other packages; kv_cache",
        "paged": "transformers' continuous batching; fewbits.generate_many is ours",
        "offloaded_static": "which keeps them on the host",
    }
    base = model.get_base_model()
    for name, why in said.items():
        assert why in other_way(base, {"cache_implementation": name})
    for name in ("static", "dynamic", "hybrid", "sliding_window"):
        assert not other_way(base, {"cache_implementation": name})
    base.generation_config.cache_implementation = "hybrid"
    try:
        asked = {"max_new_tokens": 5, "do_sample": False}
        packed = model.generate(tokens(1, 12), **asked, kv_cache="int8")
    finally:
        base.generation_config.cache_implementation = None
    assert torch.equal(packed, model.generate(tokens(1, 12), **asked, kv_cache="int8"))
