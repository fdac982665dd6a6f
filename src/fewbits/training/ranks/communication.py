"""Gradients in few bits between ranks: what is sent, in which order, and what is kept for the next step.

The mean of a gradient over W ranks, each of which holds all of it, takes two steps:

1. every rank quantises its gradient in W rows and sends row r to rank r (an all-to-all: the reduce-scatter);
   rank r adds the W messages in float32, and divides by W;
2. rank r quantises that mean, and sends it to all (the all-gather).

So each rank sends 2 (W - 1) / W of its gradient in the few bits of the format, where a ring all-reduce sends
as much in 16 or 32 bits. Each step keeps what rounding took away and adds it the next time (error feedback).
With one rank the numbers are the same and nothing travels.

Between nodes of several GPUs an all-to-all of all ranks would send from each node what its GPUs could have
added before: as many times the bytes as a node has GPUs. So with ``node_size`` the GPUs of a node first add
their gradients as they are (a reduce-scatter over NVLink), and each exchanges its part of the node's sum with
its like in the other nodes; in the end the codes are gathered within the node.

`fewbits.training.ranks.ddp` and `fewbits.training.ranks.fsdp_communication` attach this to torch's engines.
"""

from __future__ import annotations

import json
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed

from fewbits.errors import BadCheckpoint, BadInput
from fewbits.formats.base import Format
from fewbits.kernels.codec.gradient_codec import wire_format, wire_of

FILE = "gradient_exchange_{rank:05d}.safetensors"
_MASK = 2**64 - 1
_Job = tuple[Callable[[], None], Callable[[BaseException], None]]
_MANY = 2**20  # values of which the receipt's bytes are told


class Travel:
    """The collective calls of one process group, and how many bytes this rank sends in them.

    Counted is what the usual algorithms send: (W - 1) / W of an all-to-all's tensor, W - 1 times an
    all-gather's input (a ring passes every part on), 2 (W - 1) / W of an all-reduce's tensor.
    """

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        """Args: the group; None means all ranks, or without any process group this process alone."""
        initialized = distributed.is_initialized()
        self.group = group
        self.size = distributed.get_world_size(group) if initialized else 1
        self.rank = distributed.get_rank(group) if initialized else 0
        self.sent_bytes = 0

    def all_to_all(self, out: Tensor, sent: Tensor) -> distributed.Work | None:
        """Row r of ``sent`` goes to rank r, whose ``out`` has it in the sender's row.

        Both are (ranks, ...), of the same shape.
        """
        if self.size == 1:
            out.copy_(sent)
            return None
        self.sent_bytes += sent.nbytes // self.size * (self.size - 1)
        work: distributed.Work = distributed.all_to_all_single(out, sent, group=self.group, async_op=True)
        return work

    def all_gather(self, out: Tensor, sent: Tensor) -> distributed.Work | None:
        """``out`` is every rank's ``sent``, one after the other.

        ``sent`` is of any shape, ``out`` holds it once for each rank, (ranks, ...).
        """
        if self.size == 1:
            out.copy_(sent.view_as(out))
            return None
        self.sent_bytes += sent.nbytes * (self.size - 1)
        gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        work: distributed.Work = gather(out.view(-1), sent.reshape(-1), group=self.group, async_op=True)
        return work

    def reduce_scatter(self, out: Tensor, sent: Tensor) -> distributed.Work | None:
        """``out`` is the sum of all ranks' row ``rank`` of ``sent``, as it is.

        ``sent`` is (ranks, ...), ``out`` a row of it.
        """
        if self.size == 1:
            out.copy_(sent.view_as(out))
            return None
        self.sent_bytes += sent.nbytes // self.size * (self.size - 1)
        reduce = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
        work: distributed.Work = reduce(out.view(-1), sent.view(-1), group=self.group, async_op=True)
        return work

    def all_reduce(self, x: Tensor) -> distributed.Work | None:
        """The sum, in place, as it is: for comparison.

        x may have any shape, the same on every rank.
        """
        if self.size == 1:
            return None
        self.sent_bytes += 2 * x.nbytes * (self.size - 1) // self.size
        work: distributed.Work = distributed.all_reduce(x, group=self.group, async_op=True)
        return work


def wait(work: distributed.Work | None) -> None:
    """On a CPU until it is done; on CUDA the current stream waits, and the host goes on."""
    if work is not None:
        work.wait()


class Lane:
    """Where an exchange computes, in the order in which it was asked: a stream of a GPU, or a thread.

    A thread keeps the order of its collective calls only in a process group of its own. The first job that
    fails there is the last one; its error is in ``error``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.error: BaseException | None = None
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Run ``job`` behind those before it; on CUDA it is queued at once, behind what the caller queued.

        Args:
            job: what to do.
            failed: on a thread, told of the error; on CUDA errors rise here.
        """
        if self.error is not None:
            raise RuntimeError(
                f"an earlier exchange of gradients failed ({type(self.error).__name__}: {self.error})."
            ) from self.error
        if self.stream is not None:
            with self.on():
                job()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="gradient exchange", daemon=True)
            self._thread.start()
        self._jobs.put((job, failed))

    @contextmanager
    def on(self) -> Iterator[None]:
        """The lane's stream as the current one, behind all that the caller has queued."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def _work(self) -> None:
        while self.error is None:
            job, failed = self._jobs.get()
            with _Told(self, failed):
                job()


class _Told:
    """Passes every error on: on a thread nobody else would see it, and who waits would wait for ever."""

    def __init__(self, lane: Lane, failed: Callable[[BaseException], None]) -> None:
        self.lane, self.failed = lane, failed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is not None:
            self.lane.error = error
            self.failed(error)
        return True


class GradientExchange(ABC):
    """Gradients that travel in few bits: the format, the counter, what is kept, the bytes.

    Attributes:
        format: what the codes on the wire are, with blocks of its own (`wire_format`).
        step: exchanges so far; the counter of stochastic rounding.
        travel: the collective calls in few bits, and their bytes.
        node_size: GPUs of a node, which add their gradients as they are; 1: none do.
        tensor_size: ranks that share each layer, of which each has other parts of the gradients; 1: none do.
        rank: of all ranks, those of a node one after the other.
        notes: what was not as asked, for the receipt.
    """

    def __init__(
        self,
        format: Format,
        travel: Travel,
        *,
        seed: int = 0,
        error_feedback: bool = True,
        stochastic: bool | None = None,
        node_size: int = 1,
        rank: int | None = None,
    ) -> None:
        """See `fewbits.training.ranks.ddp.quantize_gradients`."""
        self.format = wire_format(format)
        self.travel = travel
        self.node_size = node_size
        self.tensor_size = 1
        self.rank = travel.rank if rank is None else rank
        self.seed = seed
        self.error_feedback = error_feedback
        self.stochastic = not error_feedback if stochastic is None else stochastic
        self.step = 0
        self.notes: list[str] = []
        self._asked = format.name

    def seed_of(self, step: int, stage: int, index: int) -> int | None:
        """The seed of one message, unlike for every step, stage, bucket and rank; None rounds to nearest."""
        if not self.stochastic:
            return None
        mixed = self.seed & _MASK
        for number in (step, stage, index, self.rank):
            mixed = _mix(mixed ^ (number + 1))
        return mixed & ~(3 << 62) | (1 << 62)  # 63 bits, never a small number: see the kernels' launch

    @property
    def size(self) -> int:
        """All ranks."""
        return self.travel.size * self.node_size

    @property
    def share(self) -> float:
        """Bytes on the wire over those of bfloat16, for a large gradient."""
        wire = wire_of(self.format, _MANY, self.travel.size)
        return wire.row_bytes * self.travel.size / (2 * _MANY)

    def __str__(self) -> str:
        wire = wire_of(self.format, _MANY, 1)
        how = "stochastic rounding" if self.stochastic else "rounding to nearest"
        feedback = "error feedback" if self.error_feedback else "no error feedback"
        where = f"{self.size} ranks" if self.travel.size > 1 else "one rank: nothing travels"
        if self.node_size > 1:
            where = f"{self.travel.size} nodes of {self.node_size} ranks, which add theirs as they are first"
        other = "" if self._asked == self.format.name else f" (asked: {self._asked})"
        text = (
            f"gradients travel in {self.format.name}{other}, a scale for {wire.block} values:"
            f" {self.share:.3f} of bfloat16's bytes; {how}, {feedback}; {where}"
        )
        return "\n".join([text, *self.notes])

    @abstractmethod
    def _state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What is kept, by name ("residual/..." is this rank's, "shard/..." a part of the mean's), flat.

        The second mapping says of tensors that are a part of their parameter where it begins.
        """

    @abstractmethod
    def _set_state(self, residuals: dict[str, Tensor], shards: dict[str, Tensor]) -> None:
        """Take up what `load` has read: this rank's residuals, and those of the mean, whole."""

    def save(self, folder: Path) -> None:
        """Write this rank's file into a checkpoint's folder; every rank calls it, and none waits."""
        tensors, starts = self._state()
        sizes = {"world_size": self.size, "node_size": self.node_size, "tensor_size": self.tensor_size}
        metadata = {"step": self.step, **sizes, "starts": starts}
        cpu = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
        path = Path(folder) / FILE.format(rank=self.rank)
        save_file(cpu, str(path), metadata={"exchange": json.dumps(metadata)})

    def load(self, folder: Path) -> None:
        """Go on with the counter and with what was kept; before the first exchange, or between two.

        With another number of ranks, each takes the mean of what the old ones had kept: the mean gradient
        gets all of it back. Where ranks shared layers, or do now, and are other ranks, what they had kept is
        of other parts of the parameters: it is dropped, which loses what one step's rounding took. A
        checkpoint of a run that did not exchange in few bits leaves everything at zero. Both are noted in
        the receipt.

        Raises:
            BadCheckpoint: a rank's file is missing or damaged.
        """
        files = sorted(Path(folder).glob(FILE.format(rank=0).replace("00000", "*")))
        if not files:
            self.notes.append(
                f"{Path(folder).name} has no rounding errors of earlier gradients: they begin at zero"
            )
            return
        headers = [_header(path) for path in files]
        world, node = int(headers[0]["world_size"]), int(headers[0]["node_size"])
        if len(files) != world:
            raise BadCheckpoint(
                f"{folder} holds the error-feedback state of {len(files)} of {world} ranks only; remove it to"
                " resume from the checkpoint before."
            )
        self.step = int(headers[0]["step"])
        shared = int(headers[0].get("tensor_size", 1))
        same = (world, node, shared) == (self.size, self.node_size, self.tensor_size)
        if not same and max(shared, self.tensor_size) > 1:
            self.notes.append(
                f"the rounding errors that {world} ranks, {shared} to a layer, had kept do not fit"
                f" {self.size} ranks, {self.tensor_size} to a layer: they are dropped and begin at zero"
            )
            return
        mine = range(self.rank // node * node, (self.rank // node + 1) * node) if same else range(world)
        residuals: _Pieces = {}
        shards: _Pieces = {}
        for rank, (path, header) in enumerate(zip(files, headers, strict=True)):
            with safe_open(str(path), "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    kind, _, key = name.partition("/")
                    begin = header["starts"].get(name, 0)
                    if kind == "shard":
                        shards.setdefault(key, []).append((begin, file.get_tensor(name)))
                    elif rank in mine:
                        residuals.setdefault(key, []).append((begin, file.get_tensor(name)))
        if not same:
            self.notes.append(
                f"the rounding errors that {world} ranks had kept are divided among {self.size}"
            )
        share = 1.0 if same else self.node_size / world
        self._set_state(
            {k: _joined(p, share) for k, p in residuals.items()},
            {k: _joined(p, 1.0) for k, p in shards.items()},
        )


_Pieces = dict[str, list[tuple[int, Tensor]]]


def _joined(pieces: list[tuple[int, Tensor]], share: float) -> Tensor:
    """The sum of pieces that begin somewhere, times ``share``."""
    if len(pieces) == 1 and share == 1.0:
        return pieces[0][1]
    whole = torch.zeros(max(begin + piece.numel() for begin, piece in pieces), dtype=torch.float32)
    for begin, piece in pieces:
        whole[begin : begin + piece.numel()] += piece.float() * share
    return whole


def check_seed(seed: int) -> None:
    """Refuse a seed that is no 63-bit number."""
    if not 0 <= seed < 2**63:
        raise BadInput(f"the seed is {seed}; it must be between 0 and 2**63 - 1.")


def _mix(x: int) -> int:
    """A number of 64 bits well mixed (the finaliser of splitmix64, Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _header(path: Path) -> dict[str, Any]:
    try:
        with safe_open(str(path), "pt") as file:
            header: dict[str, Any] = json.loads((file.metadata() or {})["exchange"])
            return header
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise BadCheckpoint(
            f"{path} cannot be read; remove {path.parent} to resume from the checkpoint before."
        ) from error
