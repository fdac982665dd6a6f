"""Slots over decoding's kernels: the graph of a step, each row at its own position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.kv_cache import KVCache
from fewbits.models.generation.adapters_by_row import BASE
from fewbits.models.generation.live.prompts import Read
from fewbits.models.generation.live.row_adapters import RowAdapters
from fewbits.models.generation.live.slots import difference, own_step
from fewbits.models.generation.packed_keys import pack_prompt, rows_of
from fewbits.models.generation.products import products_in_16_bits
from fewbits.models.generation.speculation import ROUNDING
from fewbits.models.generation.step import DecodeStep

if TYPE_CHECKING:
    from torch import nn

_SHRINK = 4  # once so many times fewer slots are in use, a step of fewer rows is recorded
_FEWEST = 4


class StepSlots:
    """Slots whose keys and values are those of a `DecodeStep`.

    Steps of fewer rows, for when most texts have ended, work on the same keys and values.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        count: int,
        room: int,
        kind: KVCache | None = None,
        adapters: RowAdapters | None = None,
    ) -> None:
        """Make room for ``count`` texts of ``room`` tokens, keys and values in these formats.

        Raises:
            Unsupported: the model has no such step, or there is no memory.
        """
        self.model, self.count, self.room, self.kind = model, count, room, kind
        self.adapters = adapters
        self._adapter_names = () if adapters is None else adapters.names
        self._names: list[str | None] = [None] * count
        try:
            whole = DecodeStep(model, batch=count, room=room, kv_cache=kind, adapters=self._adapter_names)
            self._steps = [whole]
        except torch.OutOfMemoryError as error:
            raise Unsupported(f"there is no memory for {count} texts of {room:,} tokens.") from error
        self._lengths = [0] * count
        self._now: tuple[DecodeStep, int] | None = None  # the step whose positions are those of so many texts
        # A prompt of several texts is packed once; its own tensors are not kept for that.
        self._packed: tuple[ReferenceType[Read], dict[int, Any]] | None = None

    @property
    def _whole(self) -> DecodeStep:
        return self._steps[0]

    def put(self, slot: int, read: Read) -> None:
        """A prompt into a slot."""
        self._whole.cache.put(slot, read.keys, read.values)
        for i, of_layer in self._packed_prompt(read).items():
            own = rows_of(self._whole.packed[i], slice(slot, slot + 1))
            for which, tensors in of_layer.items():
                own.fill(which, *tensors)
        self._lengths[slot], self._names[slot], self._now = read.length, read.adapter, None

    def _packed_prompt(self, read: Read) -> dict[int, Any]:
        """Keys and values of a prompt as the step keeps them, by layer; none of those in 16 bits."""
        if self._packed is None or self._packed[0]() is not read:
            packed = {
                i: pack_prompt(cache, read.keys[i], read.values[i]) for i, cache in self._whole.packed.items()
            }
            self._packed = ref(read), packed
        return self._packed[1]

    def move(self, source: int, target: int) -> None:
        """One slot's text into another one."""
        end = self._lengths[source]
        self._whole.cache.move(source, target, end)
        for packed in self._whole.packed.values():
            for which in ("keys", "values"):
                for i, whole in enumerate(packed.stored(which)):
                    most = end if i < 2 else whole.shape[2]  # codes and scales; newest and first
                    whole[target, :, :most] = whole[source, :, :most]
        self._lengths[target], self._names[target], self._now = end, self._names[source], None

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """One token more in each of the first slots.

        ``tokens`` are (slots,) int64.
        """
        used = len(tokens)
        if self._now is None or self._now[1] != used:
            step = self._step_of(used)
            # Rows behind those in use take part: at place 0 of slots in which nothing stands.
            places = self._lengths[:used] + [0] * (step.batch - used)
            step.position.copy_(torch.tensor(places))
            step.tokens.zero_()
            self._choose(step, self._names[:used])
            self._now = step, used
        step = self._now[0]
        step.tokens[:used] = tokens
        for slot in range(used):
            self._lengths[slot] += 1
        return step.advance()[:used]

    def _choose(self, step: DecodeStep, names: Sequence[str | None]) -> None:
        """Each row's adapter, none in the rows behind."""
        if self.adapters is not None and self._adapter_names:
            rows = [self.adapters.of(name) for name in names]
            step.choose(rows + [BASE] * (step.batch - len(rows)))

    def _step_of(self, used: int) -> DecodeStep:
        """The smallest step with at least so many rows; one of fewer rows is made where most would idle."""
        step = min((s for s in self._steps if s.batch >= used), key=lambda s: s.batch)
        fewer = max(_FEWEST, used)
        if step.batch >= _SHRINK * fewer:
            with torch.inference_mode(False), torch.no_grad():
                step = DecodeStep(
                    self.model,
                    batch=fewer,
                    room=self.room,
                    beside=self._whole,
                    kv_cache=self.kind,
                    adapters=self._adapter_names,
                )
            self._steps.append(step)
        return step

    def prove(self, read: Read) -> None:
        """Put ``read`` into the first slot and compare a step with the model's own.

        Raises:
            Unsupported: the logits differ by more than rounding to 16 bits explains.
        """
        self.put(0, read)
        token = read.logits.argmax().reshape(1)
        if self.adapters is not None:
            self.adapters.next_rows([read.adapter])
        with products_in_16_bits(self.model):
            theirs = own_step(self.model, read, token, self.kind)
        step = self._whole
        step.position.copy_(torch.tensor([read.length] + [0] * (self.count - 1)))
        step.tokens.zero_()
        step.tokens[:1] = token
        self._choose(step, [read.adapter])
        apart = difference(step.run()[0], theirs)
        if not apart <= ROUNDING * len(step.keys) ** 0.5:
            raise Unsupported(
                f"a step through its kernels gives logits {apart:.2g} apart from the model's own."
            )
