"""A prompt through the model itself: whole or in pieces, into a new cache or the caller's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.kv_cache import KVCache
from fewbits.models.generation.live.plan import fitting_piece
from fewbits.models.generation.packed_keys import packed_keywords


@dataclass
class ReadPrompt:
    """What the model made of the prompt.

    Attributes:
        logits: (batch, vocabulary) float32: behind its last token.
        cache: its keys and values; None once a step has them.
        of_model: the model's state when it was read, where somebody has looked.
    """

    logits: Tensor
    cache: Any
    of_model: tuple[Any, ...] | None = None


def left_padding(input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """How many tokens of padding stand before each sequence (batch,).

    Args:
        input_ids: (batch, tokens).
        mask: (batch, tokens), or None.

    Raises:
        Unsupported: the padding is not on the left.
    """
    if mask is None:
        return torch.zeros(len(input_ids), dtype=torch.long, device=input_ids.device)
    if mask.dim() != 2 or mask.shape != input_ids.shape:
        raise Unsupported("the attention mask is not one value a token.")
    count = mask.long().sum(-1)
    padding = mask.shape[1] - count
    places = torch.arange(mask.shape[1], device=mask.device)
    if not bool(((places >= padding[:, None]) == mask.bool()).all()) or int(count.min()) < 1:
        raise Unsupported("the prompts are not padded on the left.")
    return padding


@dataclass(frozen=True)
class HowToRead:
    """How a prompt is read.

    Attributes:
        kind: in which formats its keys and values are kept; None: as the model computes them.
        embedded: its vectors (batch, length, hidden), in place of tokens.
        piece: so many tokens at a time; None: all, if the memory allows it.
        cache: where its keys and values go; None: a new one.
        before: tokens that stand in ``cache`` already.
        restore: makes ``cache`` again what it was before it was read into.
    """

    kind: KVCache | None = None
    embedded: Tensor | None = None
    piece: int | None = None
    cache: Any = None
    before: int = 0
    restore: Callable[[], None] | None = None


WHOLE = HowToRead()


def read_prompt(
    model: Any, input_ids: Tensor, mask: Tensor | None, padding: Tensor, how: HowToRead = WHOLE
) -> ReadPrompt:
    """The prompt (batch, length) through the model itself.

    Args:
        model: the model.
        input_ids: (batch, length); only the shape and the device count where there are vectors.
        mask: (batch, length), or None.
        padding: (batch,) tokens in front of each.
        how: where its keys and values go, and how many tokens are read at a time.

    In few bits it is always read whole, because its tokens attend to each other in 16 bits.
    """
    from transformers import DynamicCache

    length, embedded = input_ids.shape[1], how.embedded
    places = (torch.arange(length, device=input_ids.device)[None] - padding[:, None]).clamp(min=0)
    # Without a config every layer keeps all tokens, also those of a sliding window.
    cache = DynamicCache() if how.cache is None else how.cache
    piece = how.piece or fitting_piece(model, len(input_ids), length)
    if how.kind is not None:
        cache = packed_keywords(model, how.kind, mask, whole_windows=True)["past_key_values"]
        piece = length
    for begin in range(how.before, length, piece):
        cut = slice(begin, begin + piece)
        read = {"input_ids": input_ids[:, cut]} if embedded is None else {"inputs_embeds": embedded[:, cut]}
        out = model(
            **read,
            attention_mask=None if mask is None else mask[:, : begin + piece],
            position_ids=places[:, cut],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    return ReadPrompt(out.logits[:, -1].float(), cache)
