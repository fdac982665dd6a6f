"""Greedy decoding of one text with guesses: several are verified in one step, and the text stays the same.

Whoever guesses says what may come next; a step of several rows (`DecodeStep` with ``together``) takes the
last token and the guesses in at once, and gives the logits behind each of them. Guesses are kept as long as
they are what greedy decoding chooses; the first logits behind them choose the next token. A wrong guess costs
a few rows of a step, whose keys and values the next step overwrites.

* `Lookup` guesses what followed the text's last tokens before: quotations, code, lists.
* `Draft` lets a smaller model of the same vocabulary write on, through a step of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.models.generation.adapters_by_row import adapter_rows
from fewbits.models.generation.step import DecodeStep
from fewbits.models.generation.tokens import refuse

if TYPE_CHECKING:
    from torch import nn

MOST_GUESSES = 15
USUAL_DRAFT = 5  # tokens that a draft writes ahead, where the call does not say
_LONGEST_MATCH = 3  # tokens
# A step of nine rows takes about one and a half times one of one row (8B in NF4, H200: 3.1 and 2.05 ms).
_WORTH_IT, _TRY_EVERY = 0.5, 16
# The relative difference of logits that rounding to 16 bits explains for a model of one layer; it grows with
# the square root of the number of layers. Measured with random weights and divided by that root: 0.004 to
# 0.012, up to 0.03 with tiny layers and adapters. What computes something else is off by 0.3 and more.
ROUNDING = 0.04


class Lookup:
    """Guesses what followed where the text's last tokens stood before, by the longest match.

    Where that is the text's own end, it goes on from its beginning, as a list or a loop does. How many of its
    guesses were right is kept for each length of a match: matches that seldom were right are not guessed
    from, but for a try now and then, so that a text which does not repeat itself costs little more than
    without guesses.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._followed: dict[tuple[int, ...], int] = {}
        self._done = 0
        self._right = [1.0] * (_LONGEST_MATCH + 1)  # guesses that were right, lately, by the match's length
        self._left_out = [0] * (_LONGEST_MATCH + 1)
        self._last: tuple[int, int, list[int]] | None = None  # the match, where the guesses go, and they

    def __call__(self, ids: list[int]) -> list[int]:
        """At most ``most`` tokens that may follow ``ids``, which begins with the text of the call before."""
        self._learn(ids)
        for at in range(max(self._done, 1), len(ids)):
            for n in range(1, min(_LONGEST_MATCH, at) + 1):
                self._followed[tuple(ids[at - n : at])] = at
        self._done = len(ids)
        for n in range(min(_LONGEST_MATCH, len(ids)), 0, -1):
            place = self._followed.get(tuple(ids[-n:]))
            if place is not None:
                return self._guessed(ids, n, place) if self._is_worth_it(n) else []
        return []

    def _guessed(self, ids: list[int], match: int, place: int) -> list[int]:
        behind = ids[place : place + self.most]
        guesses = (behind * -(-self.most // len(behind)))[: self.most]
        self._last = match, len(ids), guesses
        return guesses

    def _learn(self, ids: list[int]) -> None:
        """How many of the last guesses the text has taken."""
        if self._last is None:
            return
        match, at, guesses = self._last
        self._last = None
        pairs = enumerate(zip(guesses, ids[at:], strict=False))
        right = next((i for i, (guess, token) in pairs if guess != token), min(len(guesses), len(ids) - at))
        self._right[match] += (right - self._right[match]) / 4

    def _is_worth_it(self, match: int) -> bool:
        if self._right[match] >= _WORTH_IT:
            return True
        self._left_out[match] += 1
        return self._left_out[match] % _TRY_EVERY == 0


class Draft:
    """Guesses what another model would write."""

    def __init__(self, step: DecodeStep, ids: list[int], most: int) -> None:
        """Go on from a step in whose cache the tokens ``ids`` stand."""
        self.step, self.most = step, most
        self._fed = list(ids)
        self._equal = len(ids)

    def __call__(self, ids: list[int]) -> list[int]:
        """``most`` tokens that may follow ``ids``, which begins with the text of the call before."""
        most = min(self.most, self.step.room - len(ids))
        if most < 1:
            return []
        while self._equal < min(len(self._fed), len(ids) - 1) and self._fed[self._equal] == ids[self._equal]:
            self._equal += 1
        self.step.position.fill_(self._equal)
        for token in ids[self._equal :]:
            self.step.tokens.fill_(token)
            logits = self.step.advance()
        guesses = [logits.argmax(-1)]
        for _ in range(most - 1):
            self.step.tokens.copy_(guesses[-1])
            guesses.append(self.step.advance().argmax(-1))
        tokens: list[int] = torch.cat(guesses).tolist()
        self._fed, self._equal = ids + tokens[:-1], len(ids)
        return tokens


@dataclass(frozen=True)
class Speculation:
    """Who guesses, and the step that verifies.

    Attributes:
        guess: tokens that may follow a text.
        together: the step of several rows over the cache of the step of one row.
    """

    guess: Callable[[list[int]], list[int]]
    together: DecodeStep


def most_guesses(generation_config: Any, draft: Any) -> int:
    """How many tokens are guessed at most; 0 if nobody guesses."""
    if generation_config.return_dict_in_generate:
        return 0  # every token's scores are wanted
    if draft is None:
        return min(generation_config.prompt_lookup_num_tokens or 0, MOST_GUESSES)
    said = draft.generation_config.num_assistant_tokens
    return min(said or USUAL_DRAFT, MOST_GUESSES)


def together_with(
    model: nn.Module, step: DecodeStep, rows: int, cache: Any, mask: Tensor | None
) -> DecodeStep:
    """The step of ``rows`` following tokens over the cache of ``step``, compared with the model itself.

    Args:
        model: the model of both.
        step: the step of one row, behind its prompt.
        rows: tokens of a step.
        cache: the model's own cache of the prompt; it is changed.
        mask: (1, tokens of the prompt), or None.

    Raises:
        Unsupported: there is no memory for it, or its logits are not the model's.
    """
    try:
        with torch.inference_mode(False), torch.no_grad():
            together = DecodeStep(
                model, batch=rows, room=step.room, beside=step, together=True, adapters=step.adapters
            )
            together.choose(adapter_rows(model) * rows)
    except torch.OutOfMemoryError as error:
        raise Unsupported("there is no memory to verify guesses.") from error
    begin = int(step.position)
    rows = min(rows, step.room - begin)
    together.first.copy_(step.first.expand(together.batch))
    together.tokens.copy_(torch.arange(1, together.batch + 1) % together.logits.shape[1])
    together.position.copy_(torch.arange(begin, begin + together.batch).clamp(max=step.room - 1))
    theirs = (
        model(
            input_ids=together.tokens[None, :rows],
            position_ids=(together.position - together.first)[None, :rows],
            attention_mask=None if mask is None else torch.cat([mask, mask.new_ones(1, rows)], dim=1),
            past_key_values=cache,
            use_cache=True,
        )
        .logits[0]
        .float()
    )
    apart = float((together.run()[:rows] - theirs).norm() / theirs.norm())
    if not apart <= ROUNDING * len(step.keys) ** 0.5:
        raise Unsupported(f"a step of {rows} tokens gives logits {apart:.2g} apart from the model's own.")
    return together


class SpeculativeTokens:
    """Tokens of one text, chosen greedily.

    Attributes:
        ids: the text so far.
        steps: how many there were; the new tokens over them say what guessing brought.
    """

    def __init__(
        self,
        model: nn.Module,
        step: DecodeStep,
        speculation: Speculation,
        processors: Any,
        criteria: Any,
        streamer: Any,
    ) -> None:
        self.model, self.step, self.speculation = model, step, speculation
        self.processors, self.criteria, self.streamer = processors, criteria, streamer
        self.steps = 0
        self.ids: list[int] = []
        self._ends = _length_and_ends(criteria)
        together = speculation.together
        self._rows = torch.arange(together.batch, device=together.device)

    def run(self, logits: Tensor, input_ids: Tensor) -> Tensor:
        """Prompt and new tokens (1, tokens).

        Args:
            logits: (1, vocabulary) float32: behind the prompt.
            input_ids: (1, tokens): the prompt.
        """
        self.ids, self._text = input_ids[0].tolist(), input_ids
        token = self._likeliest(logits)
        rows = self.speculation.together
        while not self._takes(token):
            position = len(self.ids) - 1  # where the token just chosen goes
            guesses = self.speculation.guess(self.ids)[: rows.batch - 1]
            if position + rows.batch > self.step.room:
                guesses = []
            self.steps += 1
            if not guesses:
                self.step.position.fill_(position)
                self.step.tokens.fill_(token)
                token = self._likeliest(self.step.advance())
                continue
            right = self._verified(token, guesses, position)
            if right is None:
                break
            token = right
        if self.streamer is not None:
            self.streamer.end()
        return self._as_tensor()

    def _verified(self, token: int, guesses: list[int], position: int) -> int | None:
        """Takes the guesses that are right; the token behind them, or None: the text has ended."""
        rows = self.speculation.together
        tokens = [token, *guesses] + [0] * (rows.batch - 1 - len(guesses))
        rows.tokens.copy_(torch.tensor(tokens))
        torch.add(self._rows, position, out=rows.position)
        logits = rows.advance()
        at_once = None if len(self.processors) else self._all_likeliest(logits[: len(guesses) + 1])
        for i, guess in enumerate(guesses):
            token = self._likeliest(logits[i : i + 1]) if at_once is None else at_once[i]
            if token != guess:
                return token
            if self._takes(guess):
                return None
        last = len(guesses)
        return self._likeliest(logits[last : last + 1]) if at_once is None else at_once[last]

    def _likeliest(self, logits: Tensor) -> int:
        scores = self.processors(self._as_tensor(), logits) if len(self.processors) else logits
        return self._all_likeliest(scores)[0]

    def _all_likeliest(self, scores: Tensor) -> list[int]:
        """The likeliest token of each row of scores (rows, V), in one look at the device."""
        largest, tokens = scores.max(-1)
        finite, likeliest = torch.stack([largest.isfinite().long(), tokens]).tolist()
        if not all(finite):
            row = finite.index(0)
            refuse(self.model, "row 1", banned=bool((scores[row] == -torch.inf).all()))
        return likeliest  # type: ignore[no-any-return]

    def _takes(self, token: int) -> bool:
        """The text with one token more: whether it has ended."""
        self.ids.append(token)
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))
        if self._ends is not None:
            length, ends = self._ends
            return len(self.ids) >= length or token in ends
        ended = self.criteria(self._as_tensor(), None).all()
        if self.step.ranks is not None:  # a clock tells each rank another time
            ended = self.step.ranks.agree(ended.long())
        return bool(ended)

    def _as_tensor(self) -> Tensor:
        """The text (1, tokens), on the prompt's device."""
        new = self.ids[self._text.shape[1] :]
        if new:
            more = torch.tensor([new], dtype=self._text.dtype, device=self._text.device)
            self._text = torch.cat([self._text, more], dim=-1)
        return self._text


def _length_and_ends(criteria: Any) -> tuple[int, set[int]] | None:
    """Tokens of the longest text and those that end one, where criteria ask for nothing else."""
    length, ends = sys.maxsize, set()
    for criterion in criteria:
        kind = type(criterion).__name__
        if kind == "MaxLengthCriteria":
            length = min(length, criterion.max_length)
        elif kind == "EosTokenCriteria":
            ends |= {int(token) for token in criterion.eos_token_id.flatten()}
        else:
            return None
    return length, ends
