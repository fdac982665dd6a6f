"""Prompts on their way into slots: read by the model itself, long ones in pieces, short ones together.

A turn is one forward of at most `Prompts.most_tokens` tokens, so that texts which are being made wait no
longer than that for one that joins. A prompt that several texts share is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.kv_cache import KVCache
from fewbits.models.generation.packed_keys import packed_keywords

if TYPE_CHECKING:
    from fewbits.models.generation.live.row_adapters import RowAdapters

Ids = tuple[int, ...]


class Prompt(NamedTuple):
    """Tokens, and the adapter with which they are read; None is the active one."""

    ids: Ids
    adapter: str | None = None


@dataclass(frozen=True)
class Read:
    """What a model made of one prompt.

    Attributes:
        keys, values: of each layer (heads, length, head size), all in one tensor where layers are alike.
        logits: (vocabulary,) float32: behind the last token.
        adapter: of the prompt.
    """

    keys: Sequence[Tensor] | Tensor
    values: Sequence[Tensor] | Tensor
    logits: Tensor
    adapter: str | None = None

    @property
    def length(self) -> int:
        """Tokens."""
        return int(self.keys[0].shape[1])

    @property
    def bytes_per_token(self) -> int:
        """What keys and values of one token take."""
        return sum(len(x) * x.shape[2] * x.element_size() for x in (*self.keys, *self.values))

    def cache(self, model: Any = None, kind: KVCache | None = None) -> Any:
        """A cache of transformers that holds it, with one row; of ``model``, in few bits, with a ``kind``."""
        from transformers import DynamicCache

        packed = packed_keywords(model, kind, None, whole_windows=True)
        cache = packed["past_key_values"] if packed else DynamicCache()
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            cache.update(keys[None], values[None], i)
        return cache


class Prompts:
    """Reads prompts of one model.

    Attributes:
        most_tokens: of one forward, padding included.
        together: whether several short prompts share a forward. Their sums come about in another order then.
        adapters: told whose prompts a forward reads; None: every prompt has the active one.
        ready: what was read, of those that were asked for last.
        tokens_of_turn: how many the last forward read, padding included.
    """

    def __init__(
        self, model: Any, *, most_tokens: int, together: bool, adapters: RowAdapters | None = None
    ) -> None:
        self.model, self.most_tokens, self.together = model, most_tokens, together
        self.adapters = adapters
        self.ready: dict[Prompt, Read] = {}
        self.tokens_of_turn = 0
        self._turns: Iterator[None] | None = None

    def turn(self, prompts: Sequence[Prompt]) -> None:
        """One forward more towards the first of these ``prompts`` that is not ready, and those beside it.

        What comes of it is in `ready`, until others are read for which it is not asked any more.
        """
        if self._turns is None:
            self.ready = {prompt: self.ready[prompt] for prompt in prompts if prompt in self.ready}
            missing = [prompt for prompt in prompts if prompt not in self.ready]
            if not missing:
                return
            self._turns = self._reading(self._group(missing))
        try:
            next(self._turns)
        except StopIteration:
            self._turns = None

    def _group(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The first prompt, and others as long as all fit into one forward."""
        group: list[Prompt] = []
        longest = 0
        for prompt in dict.fromkeys(prompts):
            longest = max(longest, len(prompt.ids))
            if group and (not self.together or longest * (len(group) + 1) > self.most_tokens):
                break
            group.append(prompt)
        return group

    @torch.no_grad()
    def _reading(self, group: list[Prompt]) -> Iterator[None]:
        """Yields after each forward but the last."""
        from transformers import DynamicCache

        device = self.model.device
        lengths = [len(prompt.ids) for prompt in group]
        length = max(lengths)
        padding = torch.tensor([length - own for own in lengths], device=device)
        ids = torch.tensor([[0] * (length - len(own)) + list(own) for own, _ in group], device=device)
        places = torch.arange(length, device=device)
        mask = (places >= padding[:, None]).long() if len(set(lengths)) > 1 else None
        cache = DynamicCache()  # without a config: layers of a sliding window keep all tokens too
        for begin in range(0, length, self.most_tokens):
            end = min(begin + self.most_tokens, length)
            self.tokens_of_turn = (end - begin) * len(group)
            if self.adapters is not None:  # steps between two pieces have told theirs
                self.adapters.next_rows([prompt.adapter for prompt in group])
            out = self.model(
                input_ids=ids[:, begin:end],
                attention_mask=None if mask is None else mask[:, :end],
                position_ids=(places[begin:end] - padding[:, None]).clamp(min=0),
                past_key_values=cache,
                use_cache=True,
                **({"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}),
            )
            if end < length:
                yield
        layers = _layers_of(cache, length)
        sides = ([getattr(layer, side) for layer in layers] for side in ("keys", "values"))
        # Long ones, which took several forwards, would need as much memory once more.
        keys, values = (_together(side) if length <= self.most_tokens else side for side in sides)
        logits = out.logits[:, -1].float()
        for i, prompt in enumerate(group):
            begin = length - lengths[i]
            self.ready[prompt] = Read(
                _of_text(keys, i, begin),
                _of_text(values, i, begin),
                logits[i],
                prompt.adapter,
            )


def _together(layers: list[Tensor]) -> Sequence[Tensor] | Tensor:
    """Of each layer (texts, heads, length, head size), as one tensor with the layers in front if alike."""
    return torch.stack(layers) if len({layer.shape for layer in layers}) == 1 else layers


def _of_text(layers: Sequence[Tensor] | Tensor, text: int, begin: int) -> Sequence[Tensor] | Tensor:
    """The keys or values of one text without the padding before ``begin``."""
    if isinstance(layers, Tensor):
        return layers[:, text, :, begin:]
    return tuple(layer[text, :, begin:] for layer in layers)


def _layers_of(cache: Any, length: int) -> list[Any]:
    """The layers of what a model kept of ``length`` tokens.

    Raises:
        Unsupported: it is not keys and values of every token.
    """
    from transformers.cache_utils import DynamicLayer

    layers = list(getattr(cache, "layers", ()))
    other = next((type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer), None)
    if other is not None:
        raise Unsupported(f"the model keeps more than keys and values ({other}).")
    if not layers or any(layer.keys is None or layer.keys.shape[-2] != length for layer in layers):
        raise Unsupported("the model does not keep the keys and values of every token.")
    return layers
