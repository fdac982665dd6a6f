"""Texts as token ids, with a mask of those that lie in given spans of characters.

Where tokens lie is what the tokenizer's offsets say, once they have been checked: in order, no two of more
than one character over each other (bytes of one character are several tokens), the last ends where the text
ends, and the piece that each stands for is what the text has there. Some tokenizers drop characters that they
do not know, and their offsets lag from there on. Then the two sides of each boundary are tokenised apart,
which needs no offsets, and `SpanEncoder.inexact` says so.

A text far longer than any row may be is cut before it is tokenised. The piece is at first `_GENEROUS`
characters a token long, and grows until it has more tokens than a row may have which a longer piece has too:
so the first tokens are those of the whole text, and the row is known to be too long. A text that fits is
never cut.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from fewbits.errors import BadInput, Unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # first character, one past the last
Tokens = tuple[list[int], list[bool]]  # ids, and which of them are trained

_GENEROUS, _LEAST = (
    32,
    20_000,
)  # characters a token, and at all, that are tokenised without a thought of cutting
_PIECE = 2_000_000  # characters of a document that are tokenised at once
_UNSTABLE = 16  # tokens at a cut that what follows might change


def cuts_a_token(edges: Sequence[int], offsets: Sequence[Span]) -> bool:
    """Whether one of ``edges`` lies within a token; both ends of offsets that are right never fall."""
    if not edges:
        return False
    starts = [start for start, _ in offsets]
    before = ((bisect_left(starts, edge) - 1, edge) for edge in edges)
    return any(at >= 0 and offsets[at][1] > edge for at, edge in before)


def lie_inside(tokens: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Which tokens, by their places, lie wholly in one of ``spans``, which come in any order."""
    if not spans:
        return [False] * len(tokens)
    starts, reach = _reach(spans)
    # how many spans begin no later than the token, and how far the last of them or one before it goes
    return [(n := bisect_right(starts, start)) > 0 and end <= reach[n - 1] for start, end in tokens]


def touch(tokens: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Which tokens, by their places, have a character in one of ``spans``, which come in any order."""
    if not spans:
        return [False] * len(tokens)
    starts, reach = _reach(spans)
    return [(n := bisect_left(starts, end)) > 0 and start < reach[n - 1] for start, end in tokens]


def _reach(spans: Sequence[Span]) -> tuple[list[int], list[int]]:
    """Where spans begin, in order, and how far each or one before it goes."""
    ordered = sorted(spans)
    return [start for start, _ in ordered], list(accumulate((end for _, end in ordered), max))


class SpanEncoder:
    """Writes texts as tokens.

    Attributes:
        tokenizer: a fast tokenizer of transformers.
        limit: no caller needs more tokens of a row than these and one more; None: all are needed.
        inexact: whether the offsets were found wrong since this was last set to False.
        was_cut: the same for a text that was cut.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise Unsupported(
                f"{type(tokenizer).__name__} gives no character offsets, which exact response spans need;"
                " use a model with a tokenizer.json."
            )
        self.tokenizer = tokenizer
        self.limit = limit
        self.inexact = self.was_cut = False
        self.special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._pieces: dict[int, str] = {}

    def encode_spans(self, text: str, spans: Sequence[Span]) -> Tokens:
        """The text's tokens; those inside the spans are trained."""
        edges = sorted({edge for span in spans for edge in span} - {0, len(text)})
        ids, offsets, is_exact = self._offsets(text, check=bool(edges))
        if not is_exact or cuts_a_token(edges, offsets):
            return self._encode_apart(text, spans, edges)
        if (0, len(text)) in spans:
            return ids, self._without_tail(ids, [True] * len(ids))
        return ids, self._without_tail(ids, lie_inside(offsets, spans))

    def encode_touched(self, text: str, spans: Sequence[Span]) -> Tokens:
        """The same where a token counts that has any character in a span: the host's rule for templates."""
        ids, offsets, is_exact = self._offsets(text)
        if not is_exact:
            return self._encode_apart(text, spans, sorted({e for s in spans for e in s} - {0, len(text)}))
        return ids, touch(offsets, spans)

    def _encode_apart(self, text: str, spans: Sequence[Span], edges: list[int]) -> Tokens:
        ids: list[int] = []
        trained: list[bool] = []
        for start, end in zip([0, *edges], [*edges, len(text)], strict=True):
            part = (
                self._offsets(text[start:end], check=False)[0]
                if start == 0
                else self._continue(text[start:end])
            )
            inside = any(s <= start and end <= e for s, e in spans)
            ids += part
            trained += self._without_tail(part, [inside] * len(part))
            if self.limit is not None and len(ids) > self.limit and end < len(text):
                self.was_cut = True
                break
        return ids, trained

    def _continue(self, text: str) -> list[int]:
        """Tokens of a text that follows another, without the space that some tokenizers put first."""
        for anchor in ("\n", ".", "x"):
            ids, offsets, is_exact = self._offsets(anchor + text)
            if not is_exact:  # by the anchor's own tokens, if these are not changed by what follows
                alone = self._tokenise(anchor)[0]
                if alone and ids[: len(alone)] == alone and self.tokenizer.decode(alone).strip(" ") == anchor:
                    return ids[len(alone) :]
                continue
            first = next((i for i, (start, end) in enumerate(offsets) if end > len(anchor)), len(ids))
            if all(start >= len(anchor) for start, _ in offsets[first:]):
                return ids[first:]
        return self._offsets(text, check=False)[0]

    def _without_tail(self, ids: list[int], trained: list[bool]) -> list[bool]:
        """White space that a template writes after the end-of-turn token is not something the model says."""
        if self.special.isdisjoint(ids):
            return trained
        trained = list(trained)
        last = len(ids)
        while last > 0:  # walk over the runs of trained tokens, from the end
            last -= 1
            if not trained[last]:
                continue
            first = last
            while first > 0 and trained[first - 1]:
                first -= 1
            marks = [i for i in range(first, last + 1) if ids[i] in self.special]
            if marks and not self.tokenizer.decode(ids[marks[-1] + 1 : last + 1]).strip():
                trained[marks[-1] + 1 : last + 1] = [False] * (last - marks[-1])
            last = first
        return trained

    def all_ids(self, text: str) -> list[int]:
        """All tokens of a text, however long; above `_PIECE` characters in pieces, cut before a new line.

        A tokenizer takes some hundred bytes of memory a character.
        """
        ids: list[int] = []
        start = 0
        while start < len(text) or not start:
            end = start + _PIECE
            if end < len(text) and (line := text.rfind("\n", start + 1, end)) > 0:
                end = line
            piece = text[start:end]
            ids += self._continue(piece) if start else self._tokenise(piece)[0]
            start = min(end, len(text)) or 1
        return ids

    def _offsets(self, text: str, *, check: bool = True) -> tuple[list[int], list[Span], bool]:
        """Ids, their places, and whether these are right (where that was to be checked)."""
        if self.limit is not None:
            size = max(_GENEROUS * self.limit, _LEAST)
            while size < len(text):
                ids, offsets = self._tokenise(text[:size])
                more, _ = self._tokenise(text[: size + size // 16])
                length = self.limit + 1
                if len(ids) >= length + _UNSTABLE and ids[:length] == more[:length]:
                    self.was_cut = True
                    is_exact = not check or self._is_exact(text[:size], ids, offsets)
                    return ids[:length], offsets[:length], is_exact
                size *= 4
        ids, offsets = self._tokenise(text)
        return ids, offsets, not check or self._is_exact(text, ids, offsets)

    def _tokenise(self, text: str) -> tuple[list[int], list[Span]]:
        try:
            encoded = self.tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        except (UnicodeEncodeError, TypeError) as error:  # TypeError: how tokenizers tells half a character
            raise BadInput("the row's text has half of a character (a lone surrogate)") from error
        return list(encoded["input_ids"]), [tuple(pair) for pair in encoded["offset_mapping"]]

    def _is_exact(self, text: str, ids: Sequence[int], offsets: Sequence[Span]) -> bool:
        """Whether the offsets say where the tokens lie in the text."""
        before: Span = (0, 0)
        for span in offsets:
            if span[0] < before[0] or span[1] < before[1] or span[0] < before[1] - 1:
                self.inexact = True
                return False
            before = span
        is_exact = not text[before[1] :].strip() and all(
            self._fits(number, text[start:end]) for number, (start, end) in zip(ids, offsets, strict=True)
        )
        self.inexact = self.inexact or not is_exact
        return is_exact

    def _fits(self, number: int, shown: str) -> bool:
        piece = self._pieces.get(number)
        if piece is None:
            piece = self._pieces[number] = str(self.tokenizer.decode([number])).strip()
        return piece == shown.strip() or "\ufffd" in piece or not piece


__all__ = ["Span", "SpanEncoder", "Tokens", "cuts_a_token", "lie_inside", "touch"]
