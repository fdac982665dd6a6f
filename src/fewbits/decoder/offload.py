"""Tensors that wait in pinned host memory between the forward and the backward pass.

A tensor is copied out on a stream of its own while the device computes on, and comes back before it is
needed: the backward pass takes tensors in the reverse order of the forward pass, so taking one sends for the
ones that were put before it. Neither direction makes the host wait.

Memory is safe without `Tensor.record_stream`, whose freed blocks return at a moment nobody can predict: the
stash holds a tensor until the computing stream has been told to wait for its copy, and only then lets go.
Pinned buffers are had once and used again in every step.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported

_RESIDENT = 2  # the newest tensors stay on the device: they are the first that are needed again
_AHEAD = 2  # tensors on their way back at one time: the two inputs of one layer
_GRAIN = 1 << 21  # buffers are whole multiples of it, so that lengths that vary a little share them


@dataclass
class _Slot:
    """Where the bytes of one handle are."""

    shape: torch.Size
    dtype: torch.dtype
    tensor: Tensor | None  # on the device
    event: Any = None  # the copy under way that ``tensor`` takes part in
    buffer: Tensor | None = None  # (bytes,) uint8, on the host


class Handle:
    """What `HostStash.put` returns; good for one `HostStash.get`."""

    def __init__(self, slot: _Slot, lane: Lane | None) -> None:
        self.slot, self.lane = slot, lane
        self.taken = False
        self.release: Callable[[], Any] = lambda: None


class Lane:
    """The copies of one CUDA device, in order, on a stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def pinned(self, num_bytes: int) -> Tensor:
        """A new host buffer: (num_bytes,) uint8."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise Unsupported(
                f"this machine cannot pin another {num_bytes >> 20} MiB of host memory for activations; keep"
                " them on the device (use_gradient_checkpointing=True), or take a smaller batch."
            ) from error

    def to_host(self, source: Tensor, target: Tensor) -> Any:
        """Begin the copy of a device tensor to a host tensor; the event of its end.

        Both are of the same shape and dtype; ``target`` is pinned.
        """
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def to_device(self, source: Tensor) -> tuple[Tensor, Any]:
        """Begin the copy of a host tensor to the device; the device tensor and the event of its end.

        The tensors are of the same shape and dtype.
        """
        # Memory of the computing stream: what used it before must be done, which the wait makes sure of.
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return target, self.stream.record_event()

    def wait(self, event: Any) -> None:
        """Have the computing stream wait for a copy."""
        torch.cuda.current_stream(self.device).wait_event(event)


@dataclass
class _Place:
    """One device's lane, its free buffers and the sources of its newest copies."""

    lane: Any
    free: list[Tensor] = field(default_factory=list)
    held: deque[_Slot] = field(default_factory=deque)
    host_bytes: int = 0

    def buffer(self, num_bytes: int) -> Tensor:
        """The smallest free buffer that is large enough, or a new one in place of a free one too small."""
        sizes = [(b.numel(), i) for i, b in enumerate(self.free) if b.numel() >= num_bytes]
        if sizes:
            return self.free.pop(min(sizes)[1])
        if self.free:
            self.host_bytes -= self.free.pop().numel()
        new: Tensor = self.lane.pinned(-(-num_bytes // _GRAIN) * _GRAIN)
        self.host_bytes += new.numel()
        return new

    def let_go(self, slot: _Slot) -> None:
        """Drop the device tensor of a slot, once the computing stream waits for its copy."""
        if slot.tensor is not None and slot.event is not None:
            self.lane.wait(slot.event)
        slot.tensor = slot.event = None

    def release(self, slot: _Slot) -> None:
        """The slot is needed no more, neither here nor there."""
        self.let_go(slot)
        if slot.buffer is not None:
            self.free.append(slot.buffer)  # the next copy into it comes later on the same stream
            slot.buffer = None


class HostStash:
    """Puts device tensors aside in host memory and brings them back, last in first out.

    One stash serves all layers of a model, on any number of devices. On a CPU it holds the tensors as they
    are. Not for use inside a CUDA graph.
    """

    def __init__(
        self, *, lane: Callable[[torch.device], Any] = Lane, resident: int = _RESIDENT, ahead: int = _AHEAD
    ) -> None:
        """Args: what makes the copies of a device; how many tensors stay there; how many come back early."""
        self._make_lane, self._resident, self._ahead = lane, resident, ahead
        self._places: dict[torch.device, _Place] = {}
        self._waiting: list[weakref.ref[Handle]] = []
        self._lock = threading.RLock()  # the backward pass runs in threads of its own, one a device

    def __reduce__(self) -> Any:
        """A copy of a model has a stash of its own, empty."""
        return type(self), ()

    @property
    def host_bytes(self) -> int:
        """Pinned bytes, in use or free."""
        return sum(place.host_bytes for place in self._places.values())

    def __len__(self) -> int:
        """How many handles are out."""
        with self._lock:
            self._waiting = [ref for ref in self._waiting if ref() is not None]
            return len(self._waiting)

    def put(self, tensor: Tensor) -> Handle:
        """Begin the copy of a tensor of any shape to the host; the caller may drop it at once."""
        tensor = tensor.detach()
        if tensor.device.type == "cpu" and self._make_lane is Lane:
            handle = Handle(_Slot(tensor.shape, tensor.dtype, tensor), None)
            with self._lock:
                self._waiting.append(weakref.ref(handle))
            return handle
        with self._lock:
            place = self._place(tensor.device)
            source = tensor.contiguous()
            slot = _Slot(source.shape, source.dtype, source, buffer=place.buffer(source.nbytes))
            slot.event = place.lane.to_host(source, _view(slot))
            place.held.append(slot)
            if len(place.held) > self._resident:
                place.let_go(place.held.popleft())
            handle = Handle(slot, place.lane)
            finalize = weakref.finalize(handle, place.release, slot)
            finalize.atexit = False
            handle.release = finalize
            self._waiting.append(weakref.ref(handle))
        return handle

    def prefetch(self, handle: Handle) -> None:
        """Begin the copy back to the device, if it has not begun."""
        with self._lock:
            if handle.slot.tensor is None and not handle.taken and handle.lane is not None:
                handle.slot.tensor, handle.slot.event = handle.lane.to_device(_view(handle.slot))

    def get(self, handle: Handle) -> Tensor:
        """The tensor, of any shape, on its device again, its host buffer free; those before it are sent for.

        Raises:
            BadInput: the handle was taken before, or the stash has been cleared since.
        """
        with self._lock:
            if handle.taken:
                raise BadInput(
                    "an offloaded activation was used already, or its memory was freed; activations"
                    " offloaded to the"
                    " host serve one backward pass only: keep them on the device"
                    " (use_gradient_checkpointing=True)."
                )
            self.prefetch(handle)
            tensor, slot = handle.slot.tensor, handle.slot
            assert tensor is not None
            if handle.lane is not None and slot.event is not None:
                handle.lane.wait(slot.event)
            handle.taken = True
            slot.tensor = slot.event = None
            handle.release()
            self._waiting = [ref for ref in self._waiting if ref() not in (None, handle)]
            for ref in self._waiting[-self._ahead :] if self._ahead else ():
                before = ref()
                if before is not None:
                    self.prefetch(before)
        return tensor

    def clear(self) -> None:
        """Forget everything put, as after a step that died; the pinned buffers stay for the next one."""
        with self._lock:
            for ref in self._waiting:
                handle = ref()
                if handle is not None:
                    handle.taken = True
                    handle.release()
                    handle.slot.tensor = None
            self._waiting = []
            for place in self._places.values():
                while place.held:
                    place.let_go(place.held.popleft())

    def _place(self, device: torch.device) -> _Place:
        if device not in self._places:
            self._places[device] = _Place(self._make_lane(device))
        return self._places[device]


def _view(slot: _Slot) -> Tensor:
    """The host buffer as the tensor that it holds."""
    assert slot.buffer is not None
    return slot.buffer[: slot.shape.numel() * slot.dtype.itemsize].view(slot.dtype).view(slot.shape)
