"""Text from a model, as it comes: a thin layer over transformers' own ``generate``.

`generate` returns the whole text and hands out its pieces through a callback; `stream` is the same as an
iterator. Both take a prompt or chat messages. A seed holds for one text and leaves torch's generators alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.kv_cache import KVCache
from fewbits.host.unwrap import unwrap
from fewbits.models.chat.template import check_template
from fewbits.models.folders.reading import Reading
from fewbits.models.generation.packed_keys import packed_keywords
from fewbits.models.generation.tokens import RefuseNotFinite
from fewbits.models.packing.cache_choice import chosen_cache

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        max_new_tokens: stop after so many.
        temperature: 0 takes the likeliest token; 1 samples from the model's own distribution.
        top_p: sample from the smallest set of tokens with at least this probability.
        top_k: sample from the k likeliest tokens; 0: from all.
        repetition_penalty: above 1 makes tokens that have occurred less likely.
        seed: equal seeds give equal text on one machine; None: torch's global generator.
    """

    max_new_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not (whole or (name == "seed" and value is None)):
                raise BadInput(f"{name} is {value!r}, and it must be a whole number.")
        for name in ("temperature", "top_p", "repetition_penalty"):
            value = getattr(self, name)
            if not isinstance(value, Real) or isinstance(value, bool):
                raise BadInput(f"{name} is {value!r}, and it must be a number.")
        checks = (
            (self.max_new_tokens >= 1, "max_new_tokens must be at least 1"),
            (self.temperature >= 0, "temperature must be 0 (greedy) or more"),
            (0 < self.top_p <= 1, "top_p must be above 0 and at most 1"),
            (self.top_k >= 0, "top_k must be 0 (off) or more"),
            (self.repetition_penalty > 0, "repetition_penalty must be above 0 (1 is off)"),
        )
        for holds, need in checks:
            if not holds:
                raise BadInput(f"{need}.")


def checked(sampling: Sampling | None) -> Sampling:
    """How tokens are chosen; without a word the usual way.

    Raises:
        BadInput: it is something else than a `Sampling`.
    """
    if sampling is not None and not isinstance(sampling, Sampling):
        raise BadInput(f"sampling is {sampling!r}; give a fewbits.Sampling, such as Sampling(temperature=0).")
    return sampling or Sampling()


@dataclass(frozen=True, kw_only=True)
class Guessing:
    """Who guesses the next tokens, so that several are verified at once; the greedy text stays the same.

    Attributes:
        lookup: so many tokens at most that followed the text's last ones before; 0: none.
        draft: a smaller model that writes ahead, or None.
        draft_tokenizer: its tokenizer; without one, the model's own.
    """

    lookup: int = 0
    draft: Any = None
    draft_tokenizer: Any = None

    def __post_init__(self) -> None:
        if self.lookup < 0 or (self.lookup and self.draft is not None):
            raise BadInput(f"lookup={self.lookup}: give a number of tokens, or a draft model, not both.")

    def words(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The words of transformers' ``generate`` for it."""
        if self.draft is None:
            return {"prompt_lookup_num_tokens": self.lookup} if self.lookup else {}
        if self.draft is model:
            raise BadInput("the draft model is the model itself; give a smaller one.")
        other = self.draft_tokenizer
        if other is None or other.get_vocab() == tokenizer.get_vocab():
            return {"assistant_model": self.draft}
        return {"assistant_model": self.draft, "tokenizer": tokenizer, "assistant_tokenizer": other}


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A finished text.

    Attributes:
        text: the new text, without the prompt and special tokens.
        tokens: new tokens, the one that ended it included.
        seconds: time taken.
        stopped_by: "end" (the model ended it), "length" (max_new_tokens), "context" (which is full) or "stop"
            (a stop string or another criterion).
    """

    text: str
    tokens: int
    seconds: float
    stopped_by: str


def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    sampling: Sampling | None = None,
    *,
    on_text: Callable[[str], None] | None = None,
    guessing: Guessing | None = None,
    cache: KVCache | str | Mapping[str, Any] | None = None,
    **words: Any,
) -> Generation:
    """Continue a prompt or answer a conversation.

    Args:
        model: a causal language model of transformers, plain or quantised, with or without adapters.
        tokenizer: the tokenizer that belongs to it.
        prompt: a text to continue, or chat messages ``[{"role": ..., "content": ...}, ...]``.
        sampling: how tokens are chosen; default `Sampling()`.
        on_text: receives each piece of text as soon as it is final.
        guessing: who guesses tokens ahead; None: nobody.
        cache: in which formats keys and values are kept, such as "int4" or "int8/int4"; None: the model's or
            its recipe's choice.
        words: more words of transformers' ``generate``, such as ``min_p``, ``stop_strings``,
            ``sequence_bias`` or ``bad_words_ids``.

    Raises:
        BadInput: messages without a chat template, a prompt that fills the model's context, an empty prompt,
            an unknown format, several answers asked for, or a word that has an argument of its own here.
        Unsupported: the model's keys and values cannot be kept so.
        NotFinite: the model's logits are NaN or infinite.
    """
    sampling = checked(sampling)
    input_ids = encode_prompt(tokenizer, prompt).to(model.device)
    room = _room(model, input_ids.shape[1])
    keywords = {
        **with_words(options(model, tokenizer, sampling, room), tokenizer, words),
        **({} if guessing is None else guessing.words(model, tokenizer)),
        **_cache_words(model, cache),
    }
    pieces = Pieces(tokenizer, on_text)
    beams = (keywords.get("num_beams") or 1) > 1  # whose text is known at the end alone
    started = time.perf_counter()
    was_training = model.training
    model.eval()
    try:
        with _own_seed(sampling.seed, model.device):
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                streamer=None if beams else pieces,
                **keywords,
            )
    finally:
        model.train(was_training)
    new = getattr(output, "sequences", output)[0, input_ids.shape[1] :].tolist()
    if beams:
        for ids in (input_ids[0], torch.tensor(new, dtype=torch.long)):
            pieces.put(ids)
        pieces.end()
    ended = bool(new) and new[-1] in _listed(keywords["eos_token_id"])
    full = "context" if room < sampling.max_new_tokens else "length"
    cut = "stop" if len(new) < min(sampling.max_new_tokens, room) else full
    return Generation(
        text=pieces.text,
        tokens=len(new),
        seconds=time.perf_counter() - started,
        stopped_by="end" if ended else cut,
    )


_OF_ARGUMENTS = ("streamer", "input_ids", "inputs", "attention_mask", "past_key_values", "kv_cache")


def with_words(
    keywords: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, words: dict[str, Any]
) -> dict[str, Any]:
    """The keywords of a sampling, with the call's own words of transformers' ``generate`` over them.

    Raises:
        BadInput: a word that has an argument of its own, asks for several answers, or stops at nothing.
    """
    own = next(
        (name for name in (*_OF_ARGUMENTS, *(f.name for f in fields(Sampling))) if name in words), None
    )
    if own is not None:
        raise BadInput(
            f"{own} is no word of generate() here; it has Sampling and arguments of its own for it."
        )
    if (words.get("num_return_sequences") or 1) > 1:
        raise BadInput(
            "num_return_sequences is more than 1, and an answer here is one; generate_many takes the prompt"
            " several times."
        )
    stops = words.get("stop_strings")
    if stops:
        if not all(isinstance(stop, str) and stop for stop in ([stops] if isinstance(stops, str) else stops)):
            raise BadInput(f"stop_strings is {stops!r}; give texts of at least one character.")
        words = {"tokenizer": tokenizer, **words}
    words = dict(words)
    processors = [*keywords["logits_processor"], *(words.pop("logits_processor", None) or ())]
    return {**keywords, **words, "logits_processor": type(keywords["logits_processor"])(processors)}


def _cache_words(model: nn.Module, cache: KVCache | str | Mapping[str, Any] | None) -> dict[str, Any]:
    """The words of ``generate`` for keys and values in few bits; FastLanguageModel's know their own."""
    if isinstance(vars(unwrap(model)).get("generate"), partial):
        return {} if cache is None else {"kv_cache": cache}
    return packed_keywords(model, chosen_cache(model, cache), None)


def stream(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    sampling: Sampling | None = None,
    **options: Any,
) -> Iterator[str]:
    """The pieces of `generate`'s text, as an iterator; closing it stops the model at its next token.

    Args:
        model: as `generate` has it.
        tokenizer: the tokenizer that belongs to it.
        prompt: a text to continue, or chat messages.
        sampling: how tokens are chosen; default `Sampling()`.
        options: `generate`'s others: ``guessing``, ``cache``, words of transformers' ``generate``.
    """
    pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    closed = threading.Event()

    def put(piece: str) -> None:
        if closed.is_set():
            raise _StreamClosedError
        pieces.put(piece)

    with ThreadPoolExecutor(1, thread_name_prefix="fewbits-stream") as pool:
        future = pool.submit(generate, model, tokenizer, prompt, sampling, on_text=put, **options)
        future.add_done_callback(lambda _: pieces.put(None))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
        finally:
            closed.set()
        future.result()  # raises what was raised in the thread


class _StreamClosedError(Exception):
    """Nobody reads the stream any more; it ends the thread and goes no further."""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Tensor:
    """Token ids (1, T) of a text, or of messages through the tokenizer's chat template.

    Raises:
        BadInput: messages for a tokenizer without a chat template, something that is neither text nor
            messages, half a character, or nothing to start from.
    """
    if not callable(tokenizer):
        raise BadInput(f"the tokenizer is {tokenizer!r}; give the one that from_pretrained returns.")
    if isinstance(prompt, str):
        ids = tokenizer(_whole(prompt), verbose=False)["input_ids"]
        end = tokenizer.eos_token_id
        if len(ids) > 1 and ids[-1] == end:  # some tokenizers close every text, which would end the answer
            ids = ids[:-1]
    elif isinstance(prompt, (list, tuple)):
        ids = _encode_chat(tokenizer, prompt)
    else:
        raise BadInput(f"the prompt is {prompt!r}; give a text, or a list of chat messages.")
    if not ids and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id]
    if not ids:
        raise BadInput(
            "the prompt has no tokens and the tokenizer no BOS token to start from; give a prompt."
        )
    return torch.tensor([ids], dtype=torch.long)


def _encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    if messages and all(isinstance(message, str) for message in messages):
        raise BadInput(
            f"the prompt is a list of {len(messages)} texts; give one, or all to fewbits.generate_many."
        )
    if getattr(tokenizer, "chat_template", None) is None:
        name = getattr(tokenizer, "name_or_path", "") or "this model"
        raise BadInput(
            f"the tokenizer of {name} has no chat template, which chat messages need; "
            "give a plain prompt, or add a chat_template.jinja to the model's folder."
        )
    if not messages:
        raise BadInput("the conversation has no messages; give at least one with a role and a content.")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise BadInput(f"message {number} is not an object with a role and a content: {message!r}.")
    check_template(tokenizer, messages)
    name = getattr(tokenizer, "name_or_path", "") or "the model"
    with Reading(name, tokenizer=True):
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return list(tokenizer(_whole(text), add_special_tokens=False, verbose=False)["input_ids"])


def _whole(text: str) -> str:
    """The text, if it has no half of a surrogate pair, of which tokenizers make a TypeError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            f"the prompt has half a character ({text[error.start]!a}, at {error.start}), which no UTF-8"
            " text has; correct it."
        ) from error
    return text


def _room(model: Any, length: int) -> int:
    """How many tokens still fit into the model's context."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None:
        return 2**31
    if length >= limit:
        raise BadInput(
            f"the prompt has {length} tokens and the model's context holds {limit}; shorten the prompt."
        )
    return limit - length


def _end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    end = model.generation_config.eos_token_id
    return _listed(tokenizer.eos_token_id if end is None else end)


def _listed(end: Any) -> list[int]:
    """End tokens as ``eos_token_id`` says them: one, several or None."""
    if end is None:
        return []
    end = end.flatten().tolist() if isinstance(end, Tensor) else end
    return list(end) if isinstance(end, list | tuple) else [int(end)]


def options(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, room: int
) -> dict[str, Any]:
    """The keywords of transformers' ``generate`` for this sampling, with ``room`` new tokens at most."""
    from transformers import LogitsProcessorList

    with Reading(getattr(model.config, "name_or_path", "") or "the model"):
        end = _end_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id
    options: dict[str, Any] = {
        "max_new_tokens": min(sampling.max_new_tokens, room),
        "repetition_penalty": sampling.repetition_penalty,
        "eos_token_id": end or None,
        "pad_token_id": pad if pad is not None else (end[0] if end else 0),
        "do_sample": sampling.temperature > 0,
        "logits_processor": LogitsProcessorList([RefuseNotFinite(model, "this prompt")]),
    }
    if sampling.temperature > 0:
        options |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    else:  # a generation config may carry sampling options, which greedy search would complain about
        options |= {"temperature": None, "top_p": None, "top_k": None}
    return options


@contextmanager
def _own_seed(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seeds torch inside the block and puts its generators back afterwards."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class Pieces:
    """A streamer for ``generate`` that turns tokens into text without ever taking a character back.

    The text of a token depends on those before it (leading spaces, characters of several tokens), so each
    piece is the difference of two decodings that start at the same earlier token, given out once it ends in a
    whole character.
    """

    _CONTEXT = 8  # tokens of the prompt that stand before the first piece

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None] | None) -> None:
        self.tokenizer = tokenizer
        self.on_text = on_text
        self.text = ""
        self.ids: list[int] | None = None  # None until the prompt has been seen
        self.begin = self.done = 0

    def put(self, value: Tensor) -> None:
        """Receive the prompt (the first call) or the next token.

        ``value`` is int64: the prompt (1, S), or one token (1,).
        """
        ids = value.flatten().tolist()
        if self.ids is None:
            self.ids = ids[-self._CONTEXT :]
            self.done = len(self.ids)
            return
        self.ids += ids
        self._emit(final=False)

    def end(self) -> None:
        """Hand out what is left."""
        self._emit(final=True)

    def _emit(self, *, final: bool) -> None:
        ids = self.ids or []
        before = self._decode(ids[self.begin : self.done])
        after = self._decode(ids[self.begin :])
        piece = after[len(before) :]
        if not piece or (piece.endswith("\ufffd") and not final):
            return
        self.begin, self.done = self.done, len(ids)
        self.text += piece
        if self.on_text is not None:
            self.on_text(piece)

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
