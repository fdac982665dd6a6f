"""`StreamedWeights`: tensors of safetensors files on a device, read by several threads ahead of their use.

A file that is mapped into memory is copied to a GPU by one thread, page by page. Here threads read pieces of
16 MiB with ``preadv`` into page-locked memory, from which the GPU fetches them on a stream of its own, while
the caller packs what came before. At most about `AHEAD` bytes wait on the device; of host memory only the
threads' pieces are taken. The bytes are those of the file: nothing is converted.

The tensors are best asked for in the ``order`` that was given. Another order gives the same tensors: what is
asked for is read next, and what should have come before it makes room, to be read again if it comes.

Where all tensors are to stay on the device, nothing is gained by waiting: they are then read as they lie in
the files, whole pieces across the tensors' borders, and without a limit from the first one asked for on.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.cuda import check_error, cudart

from fewbits.errors import BadCheckpoint
from fewbits.models.folders.checkpoint import TensorEntry

PIECE = 16 << 20  # bytes of one reading
AHEAD = 384 << 20  # bytes on the device that nobody has asked for yet
_SMALL = 1 << 20  # neighbouring tensors below this are read together
_MOST_THREADS = 8
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(eq=False)
class _Stream:
    """One tensor on its way."""

    entry: TensorEntry
    rank: int  # its place in the order of asking
    value: Tensor | None = None  # allocated when its first reading begins
    wanted: int = 0  # threads that wait for it
    left: list[_Reading] = field(default_factory=list)  # readings that are not done yet
    events: list[Any] = field(default_factory=list)  # of the copies to the device

    @property
    def nbytes(self) -> int:
        return self.entry.end - self.entry.begin


@dataclass(eq=False)
class _Reading:
    """Bytes ``begin`` to ``end`` of a file, in which these tensors or parts of them lie."""

    file: Path
    begin: int
    end: int
    streams: list[_Stream]
    is_urgent: bool = False
    is_begun: bool = False

    def parts(self) -> list[tuple[Tensor, int, int]]:
        """Where the bytes go: the bytes of a tensor on the device, and which of the reading's they are."""
        places = []
        for stream in self.streams:
            entry = stream.entry
            begin, end = max(self.begin, entry.begin), min(self.end, entry.end)
            assert stream.value is not None
            whole = stream.value.reshape(-1).view(torch.uint8)
            part = whole[begin - entry.begin : end - entry.begin]
            places.append((part, begin - self.begin, end - self.begin))
        return places


class StreamedTensor:
    """What stands for a tensor until it is asked for, with the methods of safetensors' slices."""

    def __init__(self, source: StreamedWeights, name: str, entry: TensorEntry) -> None:
        self._source, self._name, self._entry = source, name, entry

    def __getitem__(self, index: Any) -> Tensor:
        """The tensor on the device; of an index other than ``...``, that part of it."""
        value = self._source.take(self._name)
        return value if index is ... else value[index]

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Its dtype in safetensors' words, such as "BF16"."""
        return self._entry.dtype


class StreamedWeights:
    """A context manager that reads the tensors of safetensors files onto one device.

    Args:
        entries: what the files hold, as `fewbits.models.folders.checkpoint.read_headers` gives it, in
            `DTYPES`.
        device: where the tensors are to be.
        order: the names in the order in which they will be asked for; others come last. None: all of them
            stay on the device, and come as they lie in the files.
    """

    def __init__(
        self, entries: Mapping[str, TensorEntry], device: torch.device, *, order: Sequence[str] | None = ()
    ) -> None:
        self.entries = dict(entries)
        self._all_stay = order is None
        lying = sorted(entries, key=lambda name: (entries[name].file, entries[name].begin))
        ranks = {name: rank for rank, name in enumerate(lying if order is None else order)}
        self._streams = {
            name: _Stream(entry, ranks.get(name, len(ranks) + place))
            for place, (name, entry) in enumerate(entries.items())
        }
        streams = list(self._streams.values())
        readings = _whole_pieces(streams) if self._all_stay else _readings(streams)
        self._waiting = deque(sorted(readings, key=lambda r: min(s.rank for s in r.streams)))
        self._limit: float = AHEAD
        self._copies: _OnHost | _OnGpu = _OnGpu(device) if device.type == "cuda" else _OnHost(device)
        self._ahead = 0  # bytes on the device that were not taken
        self._files: dict[Path, int] = {}
        self._failure: BaseException | None = None
        self._ends = False
        lock = threading.RLock()
        self._room = threading.Condition(lock)  # what readers wait for
        self._done = threading.Condition(lock)  # what those wait for who take a tensor
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="weights")

    def __enter__(self) -> StreamedWeights:
        try:
            for stream in self._streams.values():
                if stream.entry.file not in self._files:
                    self._files[stream.entry.file] = os.open(stream.entry.file, os.O_RDONLY)
        except OSError:
            self._close_files()
            raise
        for _ in range(min(_MOST_THREADS, os.cpu_count() or 1, len(self._waiting))):
            self._threads.submit(self._read_on).add_done_callback(self._reader_ended)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the readings that have begun, and begin no others; twice does no harm."""
        with self._room:
            self._ends = True
            self._room.notify_all()
        self._threads.shutdown()
        self._close_files()

    def _close_files(self) -> None:
        for number in self._files.values():
            os.close(number)
        self._files.clear()

    def slices(self) -> dict[str, Any]:
        """Every tensor by name, each to be read when it is indexed."""
        return {name: StreamedTensor(self, name, stream.entry) for name, stream in self._streams.items()}

    def place(self, name: str) -> int:
        """Where a tensor stands in the order of reading."""
        return self._streams[name].rank

    def take(self, name: str) -> Tensor:
        """One tensor, of any shape and its own dtype, on the device; any thread may ask, and ask again.

        Raises:
            BadCheckpoint: the file is shorter than its header says.
            OSError: it cannot be read.
        """
        stream = self._streams[name]
        with self._done:
            if self._all_stay and self._limit < math.inf:
                self._limit = math.inf
                self._room.notify_all()
            stream.wanted += 1
            self._hurry(stream)
            while (stream.value is None or stream.left) and self._failure is None:
                self._done.wait()
                self._hurry(stream)  # another thread may have taken it
            if self._failure is not None:
                raise self._failure
            assert stream.value is not None
            value, events = stream.value, stream.events
            stream.wanted -= 1
            self._forget(stream)
            self._room.notify()
        self._copies.hand_over(events)
        return value

    def _forget(self, stream: _Stream) -> None:
        stream.value, stream.events = None, []
        self._ahead -= stream.nbytes

    def _hurry(self, stream: _Stream) -> None:
        """What is left to read of a tensor comes next."""
        if stream.value is None and not stream.left:  # it was taken before, or has no values
            if stream.nbytes:
                self._waiting.extend(_readings([stream]))
            else:
                self._begin([stream])
        late = [reading for reading in stream.left if not (reading.is_urgent or reading.is_begun)]
        for reading in reversed(late):
            reading.is_urgent = True
            self._waiting.remove(reading)
            self._waiting.appendleft(reading)
        if late and self._ahead >= self._limit:
            self._make_room(stream.rank)
        if late:
            self._room.notify()

    def _make_room(self, rank: int) -> None:
        """Give up what should have been asked for before ``rank`` and was not, such as unused weights."""
        for stream in self._streams.values():
            given_up = stream.rank < rank and not stream.wanted
            if given_up and stream.value is not None and not stream.left:
                self._copies.hand_over(stream.events)  # its memory may be used once the copies are done
                self._forget(stream)

    def _begin(self, streams: list[_Stream]) -> None:
        for stream, value in zip(streams, self._copies.empty([s.entry for s in streams]), strict=True):
            stream.value = value
            self._ahead += stream.nbytes

    def _next(self) -> _Reading | None:
        """The reading that is due, once there is room for its tensors; None at the end."""
        with self._room:
            while not self._ends:
                if self._waiting:
                    reading = self._waiting[0]
                    new = [stream for stream in reading.streams if stream.value is None]
                    if not new or reading.is_urgent or self._ahead < self._limit:
                        self._waiting.popleft()
                        reading.is_begun = True
                        if new:
                            self._begin(new)
                        self._room.notify()  # the next one looks whether there is room for one more
                        return reading
                self._room.wait()
            return None

    def _read_on(self) -> None:
        """One thread's work."""
        with self._copies.reader() as reader:
            while (reading := self._next()) is not None:
                event = reader.read(self._files[reading.file], reading)
                with self._done:
                    for stream in reading.streams:
                        stream.left.remove(reading)
                        stream.events.append(event)
                    if any(stream.wanted for stream in reading.streams):
                        self._done.notify_all()

    def _reader_ended(self, reader: Future[None]) -> None:
        with self._done:
            self._failure = self._failure or reader.exception()
            self._done.notify_all()


def asking_order(names: Iterable[str], *, merged: bool) -> list[str]:
    """The names in the order in which transformers asks for their tensors.

    Args:
        names: of a checkpoint's tensors.
        merged: each weight is asked for when its place is filled, so that all experts' parts of one merged
            weight come together; else tensors come one by one.
    """
    from transformers.core_model_loading import dot_natural_key

    natural = sorted(names, key=dot_natural_key)
    if not merged:
        return natural
    together: dict[str, list[str]] = {}
    for name in natural:
        together.setdefault(_EXPERT.sub("*", name), []).append(name)
    return [name for group in together.values() for name in group]


def can_stream(entries: Mapping[str, TensorEntry]) -> bool:
    """Whether there is anything to read, and all of it of dtypes that torch has."""
    return bool(entries) and hasattr(os, "preadv") and all(e.dtype in DTYPES for e in entries.values())


def _whole_pieces(streams: list[_Stream]) -> list[_Reading]:
    """All that must be read, as it lies: every reading but a file's last is a whole piece."""
    readings: list[_Reading] = []
    for stream in sorted(streams, key=lambda s: (s.entry.file, s.entry.begin)):
        entry, begin = stream.entry, stream.entry.begin
        while begin < entry.end:
            last = readings[-1] if readings else None
            goes_on = last is not None and (last.file, last.end) == (entry.file, begin)
            if last is None or not goes_on or last.end - last.begin == PIECE:
                last = _Reading(entry.file, begin, begin, [])
                readings.append(last)
            begin = last.end = min(entry.end, last.begin + PIECE)
            last.streams.append(stream)
            stream.left.append(last)
    return readings


def _readings(streams: list[_Stream]) -> list[_Reading]:
    """All that must be read, in pieces; small tensors that lie side by side are read together."""
    readings: list[_Reading] = []
    together: _Reading | None = None
    for stream in sorted(streams, key=lambda s: (s.entry.file, s.entry.begin)):
        entry = stream.entry
        if not stream.nbytes:
            continue
        if stream.nbytes >= _SMALL:
            together = None
            for begin in range(entry.begin, entry.end, PIECE):
                readings.append(_Reading(entry.file, begin, min(begin + PIECE, entry.end), [stream]))
                stream.left.append(readings[-1])
            continue
        fits = together is not None and together.file == entry.file and entry.end - together.begin <= PIECE
        if together is None or not fits:
            together = _Reading(entry.file, entry.begin, entry.end, [])
            readings.append(together)
        together.end = max(together.end, entry.end)
        together.streams.append(stream)
        stream.left.append(together)
    return readings


def _read_into(file: int, memory: Any, reading: _Reading, begin: int) -> None:
    """Fill writable memory with the file's bytes from ``begin`` on.

    Raises:
        BadCheckpoint: the file ends before.
    """
    view = memoryview(memory)
    while view.nbytes:
        count = os.preadv(file, [view], begin)
        if not count:
            raise BadCheckpoint(
                f"{reading.file} ends at byte {begin:,}, before the tensors that its header lists; copy or "
                "download it again."
            )
        view, begin = view[count:], begin + count


class _OnHost:
    """Tensors in host memory: read to where they stay."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, entries: list[TensorEntry]) -> list[Tensor]:
        return [torch.empty(e.shape, dtype=DTYPES[e.dtype], device=self.device) for e in entries]

    @contextmanager
    def reader(self) -> Iterator[_OnHost]:
        yield self

    def read(self, file: int, reading: _Reading) -> None:
        for part, begin, _ in reading.parts():
            _read_into(file, part.numpy(), reading, reading.begin + begin)

    def hand_over(self, events: list[Any]) -> None:
        pass


class _OnGpu:
    """Tensors of a GPU, copied from page-locked memory on a stream of its own.

    They are allocated for the stream that was current when the reading began, and used on it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.used_on, self.copied_on = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def empty(self, entries: list[TensorEntry]) -> list[Tensor]:
        with torch.cuda.stream(self.used_on):
            values = [torch.empty(e.shape, dtype=DTYPES[e.dtype], device=self.device) for e in entries]
            self.copied_on.wait_stream(self.used_on)  # which may still work on what lay in this memory
        return values

    @contextmanager
    def reader(self) -> Iterator[_PinnedReader]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.copied_on):
            reader = _PinnedReader()
            try:
                yield reader
            finally:
                reader.close()

    def hand_over(self, events: list[Any]) -> None:
        for event in events:
            self.used_on.wait_event(event)


class _PinnedReader:
    """Two pieces of page-locked memory of one thread: one is read into while the other is copied from."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self.copied: list[Any] = []  # an event for each piece
        self.count = 0

    def read(self, file: int, reading: _Reading) -> Any:
        """Read, begin to copy to the device; an event after which the copies are done."""
        turn, self.count = self.count % 2, self.count + 1
        if turn == len(self.pieces):
            piece = torch.frombuffer(mmap.mmap(-1, PIECE), dtype=torch.uint8)
            check_error(cudart().cudaHostRegister(piece.data_ptr(), PIECE, 0))
            self.pieces.append(piece)
            self.copied.append(torch.cuda.Event())
        piece, event = self.pieces[turn], self.copied[turn]
        event.synchronize()
        _read_into(file, piece[: reading.end - reading.begin].numpy(), reading, reading.begin)
        for part, begin, end in reading.parts():
            part.copy_(piece[begin:end], non_blocking=True)
        event = self.copied[turn] = torch.cuda.current_stream().record_event()
        return event

    def close(self) -> None:
        """Wait for the copies; give the memory back."""
        for piece, event in zip(self.pieces, self.copied, strict=True):
            event.synchronize()
            check_error(cudart().cudaHostUnregister(piece.data_ptr()))
        self.pieces, self.copied = [], []


__all__ = ["AHEAD", "DTYPES", "PIECE", "StreamedTensor", "StreamedWeights", "asking_order", "can_stream"]
