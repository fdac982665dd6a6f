"""Answers to many prompts at once: sequences of different lengths that join and leave between two tokens.

    answers = generate_many(model, tokenizer, ["Once upon a time", "One day"], Sampling(temperature=0))

Each answer is what `generate` gives for its prompt alone, up to ties within rounding; drawn tokens come of
each row's own seed, so that they do not depend on the company either. fewbits.models.generation.live has the
batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fewbits.errors import BadInput
from fewbits.inference.generate import (
    Generation,
    Pieces,
    Prompt,
    Sampling,
    checked,
    encode_prompt,
    options,
    with_words,
)
from fewbits.models.generation.live.answers import Report, answers
from fewbits.models.generation.live.rows import Row

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

_SEEDS = 2**62


def generate_many(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: Sampling | None = None,
    *,
    at_a_time: int | None = None,
    on_answer: Callable[[int, Generation], None] | None = None,
    report: Report | None = None,
    **words: Any,
) -> list[Generation]:
    """Continue many prompts, or answer many conversations.

    Args:
        model: a causal language model of transformers, plain or quantised, with or without adapters.
        tokenizer: the tokenizer that belongs to it.
        prompts: texts to continue, or chat messages ``[{"role": ..., "content": ...}, ...]``. Equal ones that
            follow each other are read once.
        sampling: how tokens are chosen; default `Sampling()`. Row n draws with the seed ``seed + n``.
        at_a_time: texts in the batch, 1 to 256; None: as many as the memory holds. Memory is planned before
            the first token, for the longest text.
        on_answer: receives the number of each prompt and its answer as soon as it has ended.
        report: is told how it was done: slots, steps, texts in a step.
        words: ``cache``, in which formats keys and values are kept, such as "int4" or "int8/int4" (else the
            model's or its recipe's choice); ``adapter_names``, PEFT's name of each prompt's adapter, or
            "__base__" for none; more words of transformers' ``generate``, such as ``min_p`` or
            ``stop_strings``.

    Returns:
        The answers in the prompts' order; ``seconds`` counts from the beginning of the call.

    Raises:
        BadInput: a prompt that is empty, fills the model's context or lacks a chat template (its number is
            named), memory that does not hold what was asked for, or what `generate` refuses.
        NotFinite: the model's logits are NaN or infinite.
    """
    names = words.pop("adapter_names", None)
    sampling = checked(sampling)
    rows = encoded(tokenizer, prompts, seed_of(sampling), names)
    by_row: dict[int, Generation] = {}
    how: dict[str, Any] = {"at_a_time": at_a_time, "report": report, "words": words}
    for number, answer in answered(model, tokenizer, rows, sampling, **how):
        by_row[number] = answer
        if on_answer is not None:
            on_answer(number, answer)
    return [by_row[number] for number in range(len(rows))]


def seed_of(sampling: Sampling) -> int:
    """The seed of the first row: the given one, or one from torch's global generator."""
    return sampling.seed if sampling.seed is not None else int(torch.randint(_SEEDS, (1,)))


def encoded(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    seed: int,
    adapter_names: Sequence[str | None] | None = None,
) -> list[Row]:
    """Rows of tokens, numbered from 0, each with a seed of its own, and with its adapter if they are given.

    Raises:
        BadInput: a prompt that cannot be encoded; its number, from 1, is named. Not one adapter a prompt.
    """
    if isinstance(prompts, str):
        raise BadInput("generate_many takes a list of prompts; put the one text into a list.")
    prompts = list(prompts)
    names = [None] * len(prompts) if adapter_names is None else adapter_names
    if isinstance(names, str) or len(names) != len(prompts):
        raise BadInput(
            f"adapter_names is {names!r} for {len(prompts)} prompts; give a list with one name for each."
        )
    rows = []
    for number, prompt in enumerate(prompts):
        try:
            ids = encode_prompt(tokenizer, prompt)[0].tolist()
        except BadInput as error:
            raise BadInput(f"row {number + 1}: {error}") from error
        rows.append(Row(number, tuple(ids), (seed + number) % _SEEDS, names[number]))
    return rows


def answered(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    sampling: Sampling,
    *,
    at_a_time: int | None = None,
    report: Report | None = None,
    words: Mapping[str, Any] | None = None,
) -> Iterator[tuple[int, Generation]]:
    """The number and the answer of each row, as it ends; arguments and errors as those of `generate_many`."""
    started = time.perf_counter()
    keywords = options(model, tokenizer, sampling, sampling.max_new_tokens)
    keywords["logits_processor"] = type(
        keywords["logits_processor"]
    )()  # each row's logits are looked at anyway
    words = dict(words or {})
    cache = words.pop("cache", None)
    keywords = with_words(keywords, tokenizer, words) | {"kv_cache": cache}
    asked_for = keywords["max_new_tokens"]
    texts = answers(model, rows, keywords, slots=at_a_time, within_context=True, report=report)
    for text in texts:
        pieces = Pieces(tokenizer, None)
        pieces.put(torch.tensor(text.row.ids))
        pieces.put(torch.tensor(text.tokens, dtype=torch.long))
        pieces.end()
        full = "context" if asked_for is not None and text.request.limit < asked_for else "length"
        yield (
            text.row.index,
            Generation(
                text=pieces.text,
                tokens=len(text.tokens),
                seconds=time.perf_counter() - started,
                stopped_by=full if text.stopped_by == "length" else text.stopped_by,
            ),
        )
