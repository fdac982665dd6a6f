"""Perplexity of a causal language model on a text, by windows of tokens.

Every token of the text is scored exactly once (without a BOS token the very first one has no context and is
left out). A window starts with BOS where the tokenizer has one. With ``stride`` smaller than the window,
windows overlap: a token then has at least ``window - stride`` tokens before it, which costs time and lowers
the figure.

    nll = sum(-log p(token)) / tokens
    perplexity = exp(nll)
    bits per character = nll * tokens / ln 2 / characters
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput, NotFinite
from fewbits.formats.kv_cache import KVCache
from fewbits.models.packing.cache_choice import chosen_cache
from fewbits.nn.finite import why_not_finite

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

DEFAULT_WINDOW = 2048
_AT_ONCE = 16  # tokens of one forward over a packed cache


class Window(NamedTuple):
    """Tokens ``begin:end`` go through the model; those from ``first`` on are scored."""

    begin: int
    first: int
    end: int


@dataclass(frozen=True, kw_only=True)
class PerplexityResult:
    """What `perplexity` measured.

    Attributes:
        nll: mean negative log-likelihood, nats per token.
        perplexity: exp(nll).
        tokens: tokens that were scored.
        characters: characters of the text they cover.
        bits_per_character: comparable between models with different vocabularies; None for an empty stretch.
        window: tokens of one window, BOS included.
        stride: tokens scored by every window but the first.
        seconds: time taken.
        kv_cache: the formats in which keys and values were kept; None: as the model computes them.
    """

    nll: float
    perplexity: float
    tokens: int
    characters: int
    bits_per_character: float | None
    window: int
    stride: int
    seconds: float
    kv_cache: str | None = None

    def as_dict(self) -> dict[str, float | int | str | None]:
        """Plain data for JSON; a figure that is not finite becomes None."""
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()
        }


def perplexity(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> PerplexityResult:
    """Perplexity of ``model`` on ``text``.

    Where the model or its recipe chose formats of keys and values (`fewbits.models.packing.cache_choice`), a
    window goes through the model 16 tokens at a time, each seeing those before its 16 as the cache has them.

    Args:
        model: a causal language model of transformers; its mode (training or not) is restored afterwards.
        tokenizer: the tokenizer that belongs to it.
        text: the text.
        window: tokens in a window, BOS included. Default: the model's context, at most 2048.
        stride: new tokens per window. Default: as many as fit, so that windows do not overlap.
        max_tokens: score only the first so many tokens of the text.
        batch_size: windows per forward pass; the result does not depend on it but for rounding.
        progress: called as ``progress(tokens scored, tokens in all)`` after each batch.

    Raises:
        BadInput: an empty text, or a window or stride that cannot be.
        NotFinite: the model's loss is NaN or infinite; the message names the first weight that is.
    """
    cut = text_windows(model, tokenizer, text, window=window, stride=stride, max_tokens=max_tokens)
    kind = chosen_cache(model, None)
    started = time.perf_counter()
    total, scored = 0.0, 0
    with evaluating(model):
        for at in range(0, len(cut.windows), batch_size):
            batch = cut.windows[at : at + batch_size]
            total += batch_nll(model, cut, batch)
            scored += sum(w.end - w.first for w in batch)
            if progress is not None:
                progress(scored, cut.num_tokens)
    nll = total / scored
    return PerplexityResult(
        nll=nll,
        perplexity=math.exp(nll) if nll < 700 else math.inf,
        tokens=scored,
        characters=cut.characters,
        bits_per_character=total / math.log(2) / cut.characters if cut.characters else None,
        window=cut.window,
        stride=cut.stride,
        seconds=time.perf_counter() - started,
        kv_cache=None if kind is None else kind.name,
    )


class TextWindows(NamedTuple):
    """A text's tokens and the windows in which they are scored."""

    ids: Tensor
    windows: list[Window]
    bos: int | None
    characters: int
    window: int
    stride: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are scored."""
        return sum(w.end - w.first for w in self.windows)


def text_windows(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    blocks: bool = False,
) -> TextWindows:
    """Cut a text as `perplexity` does; arguments and errors are its own.

    With ``blocks`` it is cut as much of the literature does: the tokenizer's own special tokens at its
    beginning and nowhere else, blocks of ``window`` tokens side by side, the first token of each not scored,
    and what is left after the last whole block is left out.
    """
    bos = tokenizer.bos_token_id
    window = _checked_window(model, window)
    if blocks:
        return _blocks(tokenizer, text, window, stride, max_tokens)
    content = window - (bos is not None)
    most = content if bos is not None else content - 1
    stride = most if stride is None else stride
    if not 1 <= stride <= most:
        raise BadInput(f"stride {stride} does not fit a window of {window} tokens; choose from 1 to {most}.")
    ids, characters = _encode(tokenizer, text, max_tokens)
    windows = list(plan_windows(len(ids), content, stride, first=0 if bos is not None else 1))
    if not windows:
        raise BadInput(f"the text has {len(ids)} tokens, which leaves none to predict; give a longer text.")
    return TextWindows(ids, windows, bos, characters, window, stride)


def _blocks(
    tokenizer: PreTrainedTokenizerBase, text: str, window: int, stride: int | None, max_tokens: int | None
) -> TextWindows:
    if stride is not None:
        raise BadInput(f"blocks stand side by side, so a stride of {stride} has no place; leave it out.")
    _check_most(max_tokens)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"][:max_tokens], dtype=torch.long)
    windows = [Window(b, b + 1, b + window) for b in range(0, len(ids) - window + 1, window)]
    if not windows:
        raise BadInput(f"the text has {len(ids)} tokens, no whole block of {window}; give a longer text.")
    return TextWindows(ids, windows, None, len(text), window, window)


def plan_windows(num_tokens: int, content: int, stride: int, *, first: int = 0) -> Iterator[Window]:
    """Cut ``num_tokens`` tokens into windows of ``content``, each scoring what those before it have not.

    Args:
        num_tokens: tokens of the text.
        content: tokens of the text in one window (BOS not counted).
        stride: distance between two windows' beginnings.
        first: index of the first token to score: 1 if nothing stands before token 0.
    """
    begin = 0
    while first < num_tokens:
        end = min(begin + content, num_tokens)
        yield Window(begin, first, end)
        begin, first = begin + stride, end


def _checked_window(model: Any, window: int | None) -> int:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if window is None:
        return min(limit or DEFAULT_WINDOW, DEFAULT_WINDOW)
    if window < 2:
        raise BadInput(f"a window of {window} tokens predicts nothing; use at least 2.")
    if limit is not None and window > limit:
        raise BadInput(
            f"a window of {window} tokens does not fit the model's context of {limit}; use at most {limit}."
        )
    return window


def _check_most(max_tokens: int | None) -> None:
    if max_tokens is not None and max_tokens < 1:
        raise BadInput(f"max_tokens is {max_tokens}; it must be at least 1.")


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int | None) -> tuple[Tensor, int]:
    """Token ids (1-D) and how many characters of ``text`` they cover."""
    _check_most(max_tokens)
    offsets = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=offsets, verbose=False)
    ids = encoded["input_ids"][:max_tokens]
    if len(ids) == len(encoded["input_ids"]):
        characters = len(text)
    elif offsets:
        characters = encoded["offset_mapping"][len(ids) - 1][1] if ids else 0
    else:
        characters = len(tokenizer.decode(ids))
    return torch.tensor(ids, dtype=torch.long), characters


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the block the model is in evaluation mode and keeps no gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)


def batch_nll(model: nn.Module, text: TextWindows, batch: list[Window]) -> float:
    """Summed negative log-likelihood of the scored tokens of a batch of windows, in nats.

    See `window_nlls`, whose figures these are, added up.
    """
    total = 0.0
    for nll in window_nlls(model, text, batch):
        total += nll
    return total


def batch_tokens(text: TextWindows, batch: list[Window]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both (windows, longest window), of what goes through the model at once.

    Rows are padded on the right, which a causal model's earlier positions cannot see.
    """
    ids, bos = text.ids, text.bos
    lead = 0 if bos is None else 1
    width = max(w.end - w.begin for w in batch) + lead
    input_ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, w in enumerate(batch):
        length = w.end - w.begin + lead
        input_ids[row, lead:length] = ids[w.begin : w.end]
        mask[row, :length] = 1
    if bos is not None:
        input_ids[:, 0] = bos
    return input_ids, mask


def window_nlls(model: Any, text: TextWindows, batch: list[Window]) -> list[float]:
    """Summed negative log-likelihood of the scored tokens of each window of a batch, in nats.

    Raises:
        NotFinite: one is NaN or infinite; the message names the first weight that is.
    """
    ids, lead, device = text.ids, 0 if text.bos is None else 1, model.device
    input_ids, mask = batch_tokens(text, batch)
    input_ids, mask, kind = input_ids.to(device), mask.to(device), chosen_cache(model, None)
    if kind is None:
        logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
    else:
        logits = cached_logits(model, input_ids, mask, kind)
    nlls = []
    for row, w in enumerate(batch):  # one by one: float32 logits of a batch can exceed the model itself
        at = slice(w.first - w.begin + lead - 1, w.end - w.begin + lead - 1)
        targets = ids[w.first : w.end].to(device)
        loss = torch.nn.functional.cross_entropy(logits[row, at].float(), targets, reduction="sum")
        nlls.append(float(loss))
    total = sum(nlls)
    if not math.isfinite(total):
        tokens = f"tokens {batch[0].first:,} to {batch[-1].end - 1:,}"
        raise NotFinite(f"the loss on {tokens} is {total}{why_not_finite(model)}")
    return nlls


def cached_logits(
    model: nn.Module, input_ids: Tensor, mask: Tensor, kind: KVCache, *, at_once: int = _AT_ONCE
) -> Tensor:
    """Logits (batch, tokens, vocabulary) of a model that reads its keys and values from a packed cache.

    Args:
        model: the model.
        input_ids: (batch, tokens).
        mask: (batch, tokens), 1 where a token is one, padded on the right.
        kind: the cache's formats.
        at_once: tokens of one forward; these see each other as they are.
    """
    from fewbits.models.generation.packed_cache import PackedCache

    cache, length = PackedCache(model.config, kind), input_ids.shape[1]
    pieces = []
    for begin in range(0, length, at_once):
        end = min(begin + at_once, length)
        out = model(
            input_ids=input_ids[:, begin:end],
            attention_mask=mask[:, :end],
            past_key_values=cache,
            use_cache=True,
        )
        pieces.append(out.logits)
    return torch.cat(pieces, dim=1)
