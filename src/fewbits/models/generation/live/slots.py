"""Slots of a cache, each with a text of its own length: the definition, through the model's own forward.

A slot holds one text's keys and values for up to ``room`` tokens. A step takes the next token of the first
``count`` slots, each at its own position, and gives the logits behind them. Which text stands in which slot
and when it leaves is batch.py's business; it keeps the slots that are in use side by side at the beginning.

What has to hold for a model: all that it keeps between two tokens is keys and values by position, it takes
positions from outside and a mask of four dimensions. `ModelSlots` looks at what the model itself keeps of a
prompt and compares one step with the model's own, and refuses what differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.kv_cache import KVCache
from fewbits.models.generation.live.prompts import Read
from fewbits.models.generation.live.row_adapters import RowAdapters
from fewbits.models.generation.live.slot_layers import Now, PackedSlotLayer, SlotLayer
from fewbits.models.generation.step_rotary import rope_kind
from fewbits.models.packing.cache_choice import FULL, layer_kinds

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


class ModelSlots:
    """Slots over the model's own forward: any device, any model whose attention takes a mask."""

    def __init__(
        self,
        model: Any,
        *,
        count: int,
        room: int,
        like: Read,
        kind: KVCache | None = None,
        adapters: RowAdapters | None = None,
    ) -> None:
        """Make room for ``count`` texts of ``room`` tokens.

        Args:
            model: a causal language model.
            count: slots.
            room: tokens of each.
            like: any prompt that was read, from which sizes and dtypes are taken.
            kind: in which formats keys and values are kept; None: as the model computes them.
            adapters: told whose texts a forward continues; None: every text has the active one.

        Raises:
            Unsupported: the model keeps something else than keys and values by position.
        """
        from transformers.cache_utils import Cache

        self.model, self.kind, self.adapters = model, kind, adapters
        self.count, self.room = count, -(-room // _ALIGNED) * _ALIGNED
        self.config = model.config.get_text_config()
        self.kinds, self.window = kinds_of(self.config)
        _check_positions(model)
        packs = packed_layers(model, kind, len(like.keys))
        self._layers = [
            SlotLayer(count, self.room, keys, values)
            if not is_packed or kind is None
            else PackedSlotLayer(count, self.room, keys, values, kind)
            for keys, values, is_packed in zip(like.keys, like.values, packs, strict=True)
        ]
        self._cache = Cache(layers=self._layers)  # type: ignore[arg-type]  # by its methods, not its ancestors
        device = like.logits.device
        self._lengths = [0] * count
        self._names: list[str | None] = [None] * count
        self._dtype = self._layers[0].dtype
        self._places = torch.arange(self.room, device=device)
        self._rows = torch.arange(count, device=device)[:, None]

    def put(self, slot: int, read: Read) -> None:
        """A prompt into a slot."""
        for layer, keys, values in zip(self._layers, read.keys, read.values, strict=True):
            layer.put(slot, keys, values)
        self._lengths[slot], self._names[slot] = read.length, read.adapter

    def move(self, source: int, target: int) -> None:
        """One slot's text into another one."""
        end = self._lengths[source]
        for layer in self._layers:
            layer.move(source, target, end)
        self._lengths[target], self._names[target] = end, self._names[source]

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """One token more in each of the first slots.

        ``tokens`` are (slots,) int64.
        """
        used = len(tokens)
        places = torch.tensor(self._lengths[:used], device=tokens.device)[:, None]
        end = min(self.room, -(-(max(self._lengths[:used]) + 1) // _ALIGNED) * _ALIGNED)
        now = Now(self._rows[:used], places, end, self._lengths[:used])
        for layer in self._layers:
            layer.now = now
        if self.adapters is not None:
            self.adapters.next_rows(self._names[:used])
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
        apart = difference(ours, own_step(self.model, read, token, self.kind))
        if not apart <= _ROUNDING.get(self._dtype, 0.04 * len(self._layers) ** 0.5):
            raise Unsupported(
                f"a step with masks by row gives logits {apart:.2g} apart from the model's own."
            )


def packed_layers(model: Any, kind: KVCache | None, count: int) -> list[bool]:
    """Of each of ``count`` layers whether its keys and values are packed: those of full attention."""
    if kind is None:
        return [False] * count
    return [name == FULL for name in layer_kinds(model.config)]


@torch.no_grad()
def own_step(model: nn.Module, read: Read, token: Tensor, kind: KVCache | None = None) -> Tensor:
    """(vocabulary,) float32: the model's own logits behind a prompt and one token (1,), over such a cache."""
    out = model(
        input_ids=token[None],
        position_ids=torch.full((1, 1), read.length, device=token.device),
        past_key_values=read.cache(model, kind),
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
