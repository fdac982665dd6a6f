"""Slots of a cache, each with a text of its own length: the definition, through the model's own forward.

A slot holds one text's keys and values for up to ``room`` tokens. A step takes the next token of the first
``count`` slots, each at its own position, and gives the logits behind them. Which text stands in which slot
and when it leaves is batch.py's business; it keeps the slots that are in use side by side at the beginning.

What has to hold for a model: all that it keeps between two tokens is keys and values by position, it takes
positions from outside and a mask of four dimensions. `ModelSlots` looks at what the model itself keeps of a
prompt and compares one step with the model's own, and refuses what differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.models.generation.live.prompts import Read
from fewbits.models.generation.step import rope_kind

if TYPE_CHECKING:
    from torch import nn

_KINDS = {"full_attention", "sliding_attention"}
_NO_MASK = ("flash_attention", "flex_attention", "paged")
_ALIGNED = 16  # positions: attention on a GPU wants masks of a round size
# Both ways compute the same in another order, or read a prompt in another company.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-6}


class Slots(Protocol):
    """Where texts live while they are made."""

    count: int  # slots that there are
    room: int  # tokens of each

    def put(self, slot: int, read: Read) -> None:
        """A prompt into a slot."""

    def move(self, source: int, target: int) -> None:
        """One slot's text into another one."""

    def step(self, tokens: Tensor) -> Tensor:
        """Take the next token (used,) int64 of the first slots in; the logits behind them.

        ``tokens`` are (slots,) int64.

        They are (used, vocabulary) float32 and may lie in a buffer that the next step overwrites.
        """


def kinds_of(config: Any) -> tuple[set[str], int]:
    """Which kinds of attention a model has, and the window of those that slide.

    Raises:
        Unsupported: attention for which no mask by row is known.
    """
    types = set(getattr(config, "layer_types", None) or ())
    window = int(getattr(config, "sliding_window", None) or 0)
    if not types:
        types = {"sliding_attention" if window else "full_attention"}
    if types - _KINDS:
        raise Unsupported(f"the model has layers of {', '.join(sorted(types - _KINDS))}.")
    used = str(getattr(config, "_attn_implementation", ""))
    if used.startswith(_NO_MASK):
        raise Unsupported(f"attention by {used} takes no mask by row.")
    if not window:
        types = {"full_attention"}
    return types, window


def _check_positions(model: nn.Module) -> None:
    kind = rope_kind(model)
    if kind in ("dynamic", "longrope"):
        raise Unsupported(f"its rotary embedding {kind!r} depends on the longest text beside.")


class _SlotLayer:
    """A layer of the cache, as transformers' models call it."""

    is_sliding = False
    is_compileable = False
    is_initialized = True

    def __init__(self, count: int, room: int, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = (x.new_zeros(count, len(x), room, x.shape[2]) for x in (keys, values))
        self.now = _Now(torch.zeros(0, dtype=torch.float32), torch.zeros(0, dtype=torch.float32), 0)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values to their places; those of the slots in use, up to the last place."""
        now, used = self.now, len(key_states)
        self.keys[now.rows, :, now.places] = key_states.transpose(1, 2).to(self.keys.dtype)
        self.values[now.rows, :, now.places] = value_states.transpose(1, 2).to(self.values.dtype)
        return self.keys[:used, :, : now.end], self.values[:used, :, : now.end]

    def get_seq_length(self) -> int:
        """The longest text; transformers derives nothing from it where positions and masks are given."""
        return self.now.end

    def get_max_length(self) -> int:
        """What a slot holds."""
        return int(self.keys.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask."""
        return self.now.end, 0


@dataclass(frozen=True)
class _Now:
    """Where a step writes: rows (used, 1) and places (used, 1), and the end of what it reads."""

    rows: Tensor
    places: Tensor
    end: int


class ModelSlots:
    """Slots over the model's own forward: any device, any model whose attention takes a mask."""

    def __init__(self, model: Any, *, count: int, room: int, like: Read) -> None:
        """Make room for ``count`` texts of ``room`` tokens.

        Args:
            model: a causal language model.
            count: slots.
            room: tokens of each.
            like: any prompt that was read, from which sizes and dtypes are taken.

        Raises:
            Unsupported: the model keeps something else than keys and values by position.
        """
        from transformers.cache_utils import Cache

        self.model, self.count, self.room = model, count, -(-room // _ALIGNED) * _ALIGNED
        self.config = model.config.get_text_config()
        self.kinds, self.window = kinds_of(self.config)
        _check_positions(model)
        pairs = zip(like.keys, like.values, strict=True)
        self._layers = [_SlotLayer(count, self.room, keys, values) for keys, values in pairs]
        self._cache = Cache(layers=self._layers)  # type: ignore[arg-type]  # by its methods, not its ancestors
        device = like.logits.device
        self._lengths = [0] * count
        self._dtype = next(layer.keys.dtype for layer in self._layers)
        self._places = torch.arange(self.room, device=device)
        self._rows = torch.arange(count, device=device)[:, None]

    def put(self, slot: int, read: Read) -> None:
        """A prompt into a slot."""
        for layer, keys, values in zip(self._layers, read.keys, read.values, strict=True):
            layer.keys[slot, :, : read.length] = keys
            layer.values[slot, :, : read.length] = values
        self._lengths[slot] = read.length

    def move(self, source: int, target: int) -> None:
        """One slot's text into another one."""
        end = self._lengths[source]
        for layer in self._layers:
            layer.keys[target, :, :end] = layer.keys[source, :, :end]
            layer.values[target, :, :end] = layer.values[source, :, :end]
        self._lengths[target] = end

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """One token more in each of the first slots.

        ``tokens`` are (slots,) int64.
        """
        used = len(tokens)
        places = torch.tensor(self._lengths[:used], device=tokens.device)[:, None]
        end = min(self.room, -(-(max(self._lengths[:used]) + 1) // _ALIGNED) * _ALIGNED)
        now = _Now(self._rows[:used], places, end)
        for layer in self._layers:
            layer.now = now
        out = self.model(
            input_ids=tokens[:, None],
            position_ids=places,
            attention_mask=self._mask(places, end),
            past_key_values=self._cache,
            use_cache=True,
        )
        for slot in range(used):
            self._lengths[slot] += 1
        return out.logits[:, -1].float()  # type: ignore[no-any-return]

    def _mask(self, places: Tensor, end: int) -> Any:
        """What a model takes for its attention: one mask, or one for each kind of layer it has."""
        masks = {kind: self._mask_of(kind, places, end) for kind in self.kinds}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask_of(self, kind: str, places: Tensor, end: int) -> Tensor:
        """(used, 1, 1, end): 0 where a slot's own tokens stand, the lowest number elsewhere."""
        at = self._places[None, :end]
        visible = at <= places
        if kind == "sliding_attention":
            visible &= at > places - self.window
        mask = torch.full(visible.shape, torch.finfo(self._dtype).min, dtype=self._dtype, device=at.device)
        return mask.masked_fill_(visible, 0)[:, None, None]

    def prove(self, read: Read) -> None:
        """Put ``read`` into the first slot and compare a step with the model's own.

        Raises:
            Unsupported: the logits differ by more than rounding.
        """
        self.put(0, read)
        token = read.logits.argmax().reshape(1)
        try:
            ours = self.step(token)[0]
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise Unsupported(f"the model's forward refuses masks by row ({first}).") from error
        apart = difference(ours, own_step(self.model, read, token))
        if not apart <= _ROUNDING.get(self._dtype, 0.04 * len(self._layers) ** 0.5):
            raise Unsupported(
                f"a step with masks by row gives logits {apart:.2g} apart from the model's own."
            )


@torch.no_grad()
def own_step(model: nn.Module, read: Read, token: Tensor) -> Tensor:
    """(vocabulary,) float32: the model's own logits behind a prompt and one token (1,)."""
    out = model(
        input_ids=token[None],
        position_ids=torch.full((1, 1), read.length, device=token.device),
        past_key_values=read.cache(),
        use_cache=True,
    )
    return out.logits[0, -1].float()  # type: ignore[no-any-return]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The relative difference of logits; 0 if the model's own are NaN, as the texts will show.

    Both are (V,), or of the same shape at least.
    """
    if not bool(theirs.isfinite().all()):
        return 0.0
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
