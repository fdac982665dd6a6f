"""What a call of ``generate`` asks, for one text each: transformers prepares it, this keeps what it prepared.

transformers' ``generate`` takes a loop from outside. The loop here decodes nothing: it takes the logits
processors, stopping criteria and special tokens that transformers made for a prompt of this length, so that
every word of ``generate`` means for a text in a batch what it means for the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fewbits.models.generation.calls import with_stop_strings
from fewbits.models.generation.live.prompts import Ids, Prompt

BANNED = 2  # no processor leaves a token
# Processors of transformers that look at the scores alone: one call serves rows of any length.
_BY_SCORES = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "TopHLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
}


@dataclass(frozen=True)
class Row:
    """One text to make.

    Attributes:
        index: the caller's number of it.
        ids: the prompt's tokens.
        seed: of what is drawn for it; of no consequence where nothing is drawn.
        adapter: PEFT's name of its adapter, or "__base__" for none; None: the active one.
    """

    index: int
    ids: Ids
    seed: int = 0
    adapter: str | None = None

    @property
    def prompt(self) -> Prompt:
        """What is read for it."""
        return Prompt(self.ids, self.adapter)


@dataclass(frozen=True)
class Request:
    """What transformers prepared for prompts of one length.

    Attributes:
        processors: transformers' LogitsProcessorList.
        criteria: stopping criteria other than length and end tokens.
        limit: new tokens at most.
        ends: tokens that end a text.
        draws: whether tokens are drawn, and not the likeliest ones.
    """

    processors: Any
    criteria: tuple[Any, ...]
    limit: int
    ends: frozenset[int]
    draws: bool

    @property
    def by_scores(self) -> bool:
        """Whether processors look at the scores alone."""
        return all(type(p).__name__ in _BY_SCORES and is_from_transformers(p) for p in self.processors)

    @property
    def has_to_see_every_token(self) -> bool:
        """Whether something on the host is asked at every token."""
        return bool(self.criteria) or not self.by_scores


def is_from_transformers(thing: Any) -> bool:
    """Whether a processor or criterion is one of transformers' own."""
    return type(thing).__module__.startswith("transformers.")


def request_of(model: Any, ids: Ids, keywords: dict[str, Any]) -> Request:
    """What a call of ``generate`` with these keywords asks for this prompt.

    Args:
        model: a causal language model of transformers, without PEFT's wrapper.
        ids: the prompt's tokens.
        keywords: those of ``generate``.
    """
    captured: list[tuple[Any, Any, Any]] = []

    def take(
        _: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **__: Any,
    ) -> Tensor:
        captured.append((logits_processor, stopping_criteria, generation_config))
        return input_ids

    prompt = torch.tensor([ids], device=model.device)
    arguments = {"attention_mask": torch.ones_like(prompt), **keywords, "num_return_sequences": 1}
    if arguments.get("max_new_tokens") is not None:
        # The model's config may have one, and with both transformers warns each time.
        arguments.setdefault("max_length", None)
    type(model).generate(model, prompt, custom_generate=take, **with_stop_strings(arguments))
    processors, criteria, config = captured[0]
    ends = getattr(config, "_eos_token_tensor", None)
    return Request(
        processors=processors,
        criteria=tuple(
            c for c in criteria if type(c).__name__ not in ("MaxLengthCriteria", "EosTokenCriteria")
        ),
        limit=int(config.max_length) - len(ids),
        ends=frozenset() if ends is None else frozenset(ends.flatten().tolist()),
        draws=bool(config.do_sample),
    )


@dataclass
class Text:
    """One text while it is made.

    Attributes:
        row: the prompt that it continues.
        request: how.
        tokens: the new ones so far.
        draws: a float32 number of [0, 1) for each new token, of the row's own seed; none if nothing is drawn.
        stopped_by: "" while it goes on, then "end", "length" or "stop" (a criterion); "not finite" and
            "banned" where no token could be chosen.
    """

    row: Row
    request: Request
    tokens: list[int] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)
    stopped_by: str = ""

    def __post_init__(self) -> None:
        if self.request.draws:
            generator = torch.Generator().manual_seed(self.row.seed)
            self.draws = torch.rand(self.request.limit, generator=generator, dtype=torch.float32).tolist()

    def take(self, token: int, trouble: int) -> None:
        """One more token, unless the text has ended; with the trouble that `chosen` had."""
        if self.stopped_by:
            return
        if trouble:
            self.stopped_by = "banned" if trouble == BANNED else "not finite"
            return
        self.tokens.append(token)
        if token in self.request.ends:
            self.stopped_by = "end"
        elif self.request.criteria and self._is_stopped():
            self.stopped_by = "stop"
        elif len(self.tokens) >= self.request.limit:
            self.stopped_by = "length"

    def ids(self) -> Tensor:
        """(1, tokens): prompt and new tokens."""
        return torch.tensor([[*self.row.ids, *self.tokens]])

    def _is_stopped(self) -> bool:
        ids = self.ids()
        return any(bool(torch.as_tensor(criterion(ids, None)).any()) for criterion in self.request.criteria)


def chosen(texts: Sequence[Text], logits: Tensor, ahead: int = 0) -> tuple[Tensor, Tensor]:
    """The next token of each text.

    Args:
        texts: those whose logits these are.
        logits: (texts, vocabulary) float32; processors may write into it.
        ahead: how many tokens behind those that `Text.tokens` knows stand already.

    Returns:
        (texts,) int64 tokens; (texts,) int64: 0, or why there is no token: `BANNED`, or scores not finite.
    """
    request = texts[0].request
    if request.by_scores:
        scores = request.processors(None, logits)
    else:
        rows = zip(texts, logits.split(1), strict=True)
        scores = torch.cat([text.request.processors(text.ids().to(logits.device), own) for text, own in rows])
    highest = scores.amax(-1)
    trouble = (~highest.isfinite()).long() + (highest == -torch.inf)
    if not request.draws:
        return scores.argmax(-1), trouble
    numbers = [_number(text, ahead) for text in texts]
    return _drawn(scores, torch.tensor(numbers, device=scores.device, dtype=torch.float32)), trouble


def _number(text: Text, ahead: int) -> float:
    return text.draws[min(len(text.tokens) + ahead, len(text.draws) - 1)]


def _drawn(scores: Tensor, numbers: Tensor) -> Tensor:
    """Where the sums of probabilities first exceed a number (texts,) of [0, 1) of the whole."""
    sums = scores.softmax(-1).cumsum(-1)
    whole = sums[:, -1]
    points = torch.minimum(numbers * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    return torch.searchsorted(sums, points[:, None], right=True).squeeze(1).clamp(max=scores.shape[1] - 1)
