"""A computation on several devices, recorded once as graphs of one device each and the copies between them.

A CUDA graph is recorded on one device's stream. `Recorder` watches every operation that torch dispatches
while a function runs: operations on the tensors of one device go into a graph of that device; where the next
one belongs to another device, the graph ends and one of that device begins; a tensor that moves is copied
between two graphs, into memory that stays. What had moved already is not moved again until it is written.
`Pieces.replay` then runs graphs and copies in order, each on its device's current stream; torch makes copies
wait for both devices.

Which hooks move what does not matter, so a model that accelerate has spread (``device_map="auto"``) needs
nothing of its own. As in any graph, nothing may be read back to the host.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Place = Hashable


class Capture(Protocol):
    """Operations of one place, to be run again."""

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One of them."""

    def end(self) -> Callable[[], object]:
        """All of them, as they run again."""


class Places(Protocol):
    """Where tensors are."""

    def of(self, tensor: Tensor) -> Place | None:
        """A tensor's place; None if operations on it belong anywhere.

        The tensor may have any shape.
        """

    def target(self, kwargs: dict[str, Any]) -> Place | None:
        """The place that a copy or a new tensor is asked for; None if none is named."""

    def begin(self, place: Place) -> Capture:
        """Record there."""


class Pieces:
    """What was recorded: graphs and copies, in order.

    Attributes:
        items: them, each to be called.
        graphs: how many of them are graphs.
    """

    def __init__(self) -> None:
        self.items: list[Callable[[], object]] = []
        self.graphs = 0

    def replay(self) -> None:
        """Run it all again, on the devices' current streams."""
        for item in self.items:
            item()


class Recorder(TorchDispatchMode):
    """Records what runs within it; see the module's text."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.pieces = Pieces()
        self._places = places
        self._place: Place | None = None
        self._capture: Capture | None = None
        self._moved: dict[tuple[int, Place], tuple[Tensor, Tensor]] = {}

    def finish(self) -> Pieces:
        """What was recorded, once all has run."""
        self._end()
        return self.pieces

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation in the piece to which it belongs."""
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten.to:  # not yet a copy, under inference_mode
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        places = list(dict.fromkeys(place for x in tensors if (place := self._places.of(x)) is not None))
        target = self._places.target(kwargs)
        if func is torch.ops.aten._to_copy.default and places and target not in (None, *places):
            return self._move(func, args, kwargs, target)
        if target is not None and target not in places:
            places.append(target)
        if len(places) > 1 and func is torch.ops.aten.copy_.default:
            return self._copy_over(func, args, kwargs)
        if places and not func.is_view:
            self._switch(places[0])  # of several, torch refuses the operation itself
        self._forget_written(func, args)
        return self._capture.run(func, args, kwargs) if self._capture else func(*args, **kwargs)

    def _move(self, func: Any, args: Any, kwargs: Any, target: Place) -> Tensor:
        source: Tensor = args[0]
        earlier = self._moved.get((id(source), target))
        if earlier is None or earlier[1].dtype != (kwargs.get("dtype") or source.dtype):
            self._end()
            moved: Tensor = func(*args, **kwargs)
            self.pieces.items.append(partial(moved.copy_, source, non_blocking=True))
            earlier = self._moved[id(source), target] = (source, moved)
        return earlier[1]

    def _copy_over(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._end()
        self._forget_written(func, args)
        self.pieces.items.append(partial(func, *args, **kwargs))
        return func(*args, **kwargs)

    def _forget_written(self, func: Any, args: Any) -> None:
        """What moved of a tensor that is written now is no longer what it holds."""
        written = {
            x.untyped_storage().data_ptr()
            for slot, arg in zip(func._schema.arguments, args, strict=False)
            if slot.alias_info is not None and slot.alias_info.is_write
            for x in tree_leaves(arg)
            if isinstance(x, Tensor)
        }
        if written:
            stays = {k: v for k, v in self._moved.items() if _memory(v[0]) not in written}
            self._moved = {k: v for k, v in stays.items() if _memory(v[1]) not in written}

    def _switch(self, place: Place) -> None:
        if self._capture is None or place != self._place:
            self._end()
            self._place, self._capture = place, self._places.begin(place)

    def _end(self) -> None:
        if self._capture is not None:
            self.pieces.items.append(self._capture.end())
            self.pieces.graphs += 1
        self._capture = None


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Gpus:
    """CUDA devices, each with a stream for recording and memory that its graphs share."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._streams = {device: torch.cuda.Stream(device) for device in devices}
        self._pools = {device: torch.cuda.graph_pool_handle() for device in devices}

    def of(self, tensor: Tensor) -> Place | None:
        """Its device; None for a CPU.

        The tensor may have any shape.
        """
        return tensor.device if tensor.device.type == "cuda" else None

    def target(self, kwargs: dict[str, Any]) -> Place | None:
        """The device that is asked for; None for a CPU."""
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return None
        device = torch.device(device)
        return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())

    def begin(self, place: Place) -> Capture:
        """A CUDA graph."""
        assert isinstance(place, torch.device)
        return _Graph(place, self._pools[place])

    def record(self, function: Callable[[], object], restore: Callable[[], object]) -> Pieces:
        """``function`` as pieces; before, it runs twice, and ``restore`` after it, to compile kernels."""
        with ExitStack() as stack:
            before = {device: torch.cuda.current_stream(device) for device in self._streams}
            stack.enter_context(torch.cuda.device(torch.cuda.current_device()))
            for device, stream in self._streams.items():
                stream.wait_stream(before[device])
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.cuda.device(next(iter(self._streams))))
            for _ in range(2):
                function()
                restore()
            for stream in self._streams.values():
                stream.synchronize()
            gc.collect()  # what else would be freed while a graph is recorded
            recorder = Recorder(self)
            try:
                with recorder:
                    function()
            finally:
                pieces = recorder.finish()
            for device, stream in self._streams.items():
                before[device].wait_stream(stream)
        return pieces


class _Graph:
    """A CUDA graph in the making, on a device's current stream."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device, self._graph = device, torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def end(self) -> Callable[[], object]:
        with torch.cuda.device(self._device):
            self._graph.capture_end()
        return self._graph.replay
