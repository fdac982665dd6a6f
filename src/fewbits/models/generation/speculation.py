"""Greedy decoding of one text with guesses: several are verified in one step, and the text stays the same.

Whoever guesses says what may come next; a step of several rows (`DecodeStep` with ``together``) takes the
last token and the guesses in at once, and gives the logits behind each of them. Guesses are kept as long as
they are what greedy decoding chooses; the first logits behind them choose the next token. A wrong guess costs
a few rows of a step, whose keys and values the next step overwrites.

* `Lookup` guesses what followed the text's last tokens before: quotations, code, lists.
* `Draft` lets a smaller model of the same vocabulary write on, through a step of its own.
"""

from __future__ import annotations

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
# The relative difference of logits that rounding to 16 bits explains for a model of one layer; it grows with
# the square root of the number of layers. Measured with random weights and divided by that root: 0.004 to
# 0.012, up to 0.03 with tiny layers and adapters. What computes something else is off by 0.3 and more.
ROUNDING = 0.04


class Lookup:
    """Guesses what followed where the text's last tokens stood before, by the longest match."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._followed: dict[tuple[int, ...], int] = {}
        self._done = 0

    def __call__(self, ids: list[int]) -> list[int]:
        """At most ``most`` tokens that may follow ``ids``, which begins with the text of the call before."""
        for at in range(max(self._done, 1), len(ids)):
            for n in range(1, min(_LONGEST_MATCH, at) + 1):
                self._followed[tuple(ids[at - n : at])] = at
        self._done = len(ids)
        for n in range(min(_LONGEST_MATCH, len(ids)), 0, -1):
            place = self._followed.get(tuple(ids[-n:]))
            if place is not None:
                return ids[place : place + self.most]
        return []


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

    def run(self, logits: Tensor, input_ids: Tensor) -> Tensor:
        """Prompt and new tokens (1, tokens).

        Args:
            logits: (1, vocabulary) float32: behind the prompt.
            input_ids: (1, tokens): the prompt.
        """
        token = self._likeliest(input_ids, logits)
        while True:
            input_ids, ended = self._taken(input_ids, token)
            if ended:
                break
            position = input_ids.shape[1] - 1  # where the token just chosen goes
            rows = self.speculation.together
            guesses = self.speculation.guess(input_ids[0].tolist())[: rows.batch - 1]
            if position + rows.batch > self.step.room:
                guesses = []
            self.steps += 1
            if not guesses:
                self.step.position.fill_(position)
                self.step.tokens.fill_(token)
                token = self._likeliest(input_ids, self.step.advance())
                continue
            input_ids, ended, token = self._verified(input_ids, token, guesses, position)
            if ended:
                break
        if self.streamer is not None:
            self.streamer.end()
        return input_ids

    def _verified(
        self, input_ids: Tensor, token: int, guesses: list[int], position: int
    ) -> tuple[Tensor, bool, int]:
        """The text with the guesses that are right; whether it has ended; the token behind them."""
        rows = self.speculation.together
        tokens = [token, *guesses] + [0] * (rows.batch - 1 - len(guesses))
        rows.tokens.copy_(torch.tensor(tokens))
        rows.position.copy_(torch.arange(position, position + rows.batch))
        logits = rows.advance()
        at_once = None if len(self.processors) else self._all_likeliest(logits)
        for i, guess in enumerate(guesses):
            token = self._likeliest(input_ids, logits[i : i + 1]) if at_once is None else at_once[i]
            if token != guess:
                return input_ids, False, token
            input_ids, ended = self._taken(input_ids, guess)
            if ended:
                return input_ids, True, token
        last = len(guesses)
        token = self._likeliest(input_ids, logits[last : last + 1]) if at_once is None else at_once[last]
        return input_ids, False, token

    def _likeliest(self, input_ids: Tensor, logits: Tensor) -> int:
        return self._all_likeliest(self.processors(input_ids, logits))[0]

    def _all_likeliest(self, scores: Tensor) -> list[int]:
        """The likeliest token of each row of scores (rows, V), in one look at the device."""
        largest, tokens = scores.max(-1)
        finite, likeliest = torch.stack([largest.isfinite().long(), tokens]).tolist()
        if not all(finite):
            row = finite.index(0)
            refuse(self.model, "row 1", banned=bool((scores[row] == -torch.inf).all()))
        return likeliest  # type: ignore[no-any-return]

    def _taken(self, input_ids: Tensor, token: int) -> tuple[Tensor, bool]:
        """The text with one token more, and whether it has ended."""
        new = torch.tensor([[token]], device=input_ids.device)
        input_ids = torch.cat([input_ids, new], dim=-1)
        if self.streamer is not None:
            self.streamer.put(new[0].cpu())
        ended = self.criteria(input_ids, None).all()
        if self.step.ranks is not None:
            ended = self.step.ranks.agree(ended.long())
        return input_ids, bool(ended)
