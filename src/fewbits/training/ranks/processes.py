"""The processes of one run: who they are, what they tell each other before and beside the training.

Short messages (configurations, fingerprints, verdicts) go through the store that brought the processes
together: it works wherever the processes could meet at all, names those that did not answer, and does not
touch the GPUs. Gradients travel by collectives, elsewhere.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.utils.api import get_env_variable_or_raise
from torch.distributed.rendezvous import rendezvous

from fewbits import errors
from fewbits.errors import FewbitsError, PeerLost, SpecMismatch, Unsupported
from fewbits.training.ranks.meeting import AGAIN_S, MEETING_SECONDS, Met, meet

T = TypeVar("T")
WAIT_SECONDS = 1800
_BROKEN = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL")


class Ranks:
    """One of the processes of a run, which speaks with the others.

    Attributes:
        rank: its number among all.
        size: how many there are.
        local_rank: its number on its machine.
        host: its machine's name.
        wait_seconds: the longest that one rank waits for another.
        launch: a word that all attempts of one launch share, and no other launch has; None: not known.
        again: whether a launcher has started these processes again.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        local_rank: int = 0,
        store: Any = None,
        wait_seconds: float = WAIT_SECONDS,
        launch: str | None = None,
        again: bool = False,
    ) -> None:
        """A process alone, or one of several that share a store."""
        self.launch, self.again = launch, again
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self.host = socket.gethostname()
        self.store = store
        self.wait_seconds = wait_seconds
        self._times: Counter[str] = Counter()

    @property
    def leads(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    def __str__(self) -> str:
        """Who this is, for a sentence."""
        return f"rank {self.rank} of {self.size} (on {self.host})"

    def exchange(self, subject: str, value: T) -> list[T]:
        """What each rank has to say on a subject, by rank; every rank calls this with the same subjects.

        Args:
            subject: what it is about, for messages.
            value: anything that JSON holds.

        Raises:
            PeerLost: some have said nothing for `wait_seconds`.
        """
        if self.size == 1:
            return [value]
        key = self._key(subject)
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        if not self.leads:
            answers: list[T] = json.loads(self._answer(f"{key}/all", subject))
            return answers
        every = f"[{', '.join(self._answer(f'{key}/{rank}', subject, rank) for rank in range(self.size))}]"
        self.store.set(f"{key}/all", every)
        values: list[T] = json.loads(every)
        return values

    def led(self, subject: str, work: Callable[[], T]) -> T:
        """The leader does some work and all have its result (something that JSON holds), or its refusal."""
        if self.size == 1:
            return work()
        key = self._key(subject)
        if self.leads:
            with _Told(self.store, key):
                value = work()
            self.store.set(key, json.dumps({"value": value}))
            return value
        told = json.loads(self._answer(key, subject, 0))
        if "error" in told:
            raise getattr(errors, told["error"])(told["text"])
        result: T = told["value"]
        return result

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Every rank must bring the same facts.

        Raises:
            SpecMismatch: with the first fact that differs, the ranks that hold it, and both values.
        """
        plain = json.loads(json.dumps(dict(facts), default=str))
        everyone = self.exchange("configuration", {"host": self.host, "facts": plain})
        first = everyone[0]["facts"]
        for rank, other in enumerate(everyone):
            theirs = other["facts"]
            for name in [*first, *(name for name in theirs if name not in first)]:
                if first.get(name) != theirs.get(name):
                    raise SpecMismatch(
                        f"{name} differs between the ranks: rank 0 (on {everyone[0]['host']}) has"
                        f" {_short(first.get(name))}, rank {rank} (on {other['host']}) has"
                        f" {_short(theirs.get(name))}; start all of them with the same configuration, data,"
                        " model and versions."
                    )

    def barrier(self) -> None:
        """Wait for all."""
        self.exchange("barrier", None)

    def leave(self) -> None:
        """The end of a run that went well; the leader, which may hold the store, goes last."""
        if self.size == 1:
            return
        self.store.set(f"bye/{self.rank}", "")
        for rank in range(self.size) if self.leads else ():
            self._answer(f"bye/{rank}", "the end", rank)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _key(self, subject: str) -> str:
        self._times[subject] += 1
        return f"{subject}.{self._times[subject]}"

    def _answer(self, key: str, subject: str, rank: int | None = None) -> str:
        try:
            self.store.wait([key], timedelta(seconds=self.wait_seconds))
            return str(self.store.get(key).decode())
        except dist.DistStoreError as error:  # a time-out
            who = "another rank" if rank is None else f"rank {rank}"
            raise PeerLost(
                f"{self} has waited {self.wait_seconds:g} s for {who} ({subject}) in vain; look at that"
                " rank's log, then go on with resume."
            ) from error


class _Told:
    """Passes the leader's refusal on."""

    def __init__(self, store: Any, key: str) -> None:
        self.store, self.key = store, key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, FewbitsError):
            told = {"error": type(error).__name__, "text": str(error)}
            self.store.set(self.key, json.dumps(told))


def join(
    *,
    on_gpu: bool,
    wait_seconds: float = WAIT_SECONDS,
    meeting_seconds: float = MEETING_SECONDS,
    attempt: int = 0,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Ranks:
    """This process among those that torchrun (or another launcher that sets torch's variables) has started.

    Each gets the GPU of its number on its machine; a process that was started alone stays alone.

    Args:
        on_gpu: whether the run computes there.
        wait_seconds: the longest that one rank waits for another, once all have met.
        meeting_seconds: the longest that it waits for the others to start.
        attempt: how often a launcher says it has started this process again.
        tell: gets a sentence about ranks that are long in coming, on rank 0.

    Raises:
        Unsupported: a machine has fewer GPUs than processes.
        PeerLost: others did not come.
    """
    from accelerate import PartialState

    local = _local_rank()
    if on_gpu and local >= torch.cuda.device_count():
        raise Unsupported(
            f"process {local} of this machine has no GPU: {torch.cuda.device_count()} are visible here; start"
            " at most one process for each (--nproc-per-node)."
        )
    met = None
    if _launched() and not dist.is_initialized():
        store, rank, size = _find_store(min(AGAIN_S, meeting_seconds) if attempt else meeting_seconds)
        if size > 1:
            met = meet(store, rank, size, attempt=attempt, seconds=meeting_seconds, tell=tell)
            _make_group("nccl" if on_gpu else "gloo", met.store, rank, size, wait_seconds)
    state = PartialState(cpu=not on_gpu, timeout=timedelta(seconds=wait_seconds)) if _launched() else None
    if state is None or state.num_processes == 1:
        return Ranks(wait_seconds=wait_seconds, again=attempt > 0)
    if met is None:  # the caller's own process group
        token = [secrets.token_hex(8)]
        dist.broadcast_object_list(token)
        met = Met(PrefixStore(token[0], dist.distributed_c10d._get_default_store()), token[0], attempt > 0)
    return Ranks(
        state.process_index,
        state.num_processes,
        local_rank=max(0, state.local_process_index),
        store=PrefixStore("fewbits", met.store),
        wait_seconds=wait_seconds,
        launch=met.launch,
        again=met.again,
    )


def _find_store(seconds: float) -> tuple[Any, int, int]:
    """Where the ranks meet, this one's number, and how many there are."""
    try:
        size = int(get_env_variable_or_raise("WORLD_SIZE"))
        # of an unknown number: otherwise a rank 0 that holds the store waits here, for it knows not whom
        store, rank, _ = next(rendezvous("env://?world_size=-1", timeout=timedelta(seconds=seconds)))
    except ValueError as error:
        raise Unsupported(
            f"LOCAL_RANK says that this process is one of several, but {_first_line(error)}; set RANK,"
            " WORLD_SIZE, MASTER_ADDR and MASTER_PORT too, as torchrun does, or unset LOCAL_RANK."
        ) from error
    except dist.DistError as error:
        raise PeerLost(
            f"the store at which the ranks of this run meet did not answer within {seconds:g} s"
            f" ({_first_line(error)}), so rank 0 or the launcher that holds it has not come; look at its log,"
            " then start all again, with resume. Where starting takes longer, raise meeting_seconds."
        ) from error
    return store, rank, size


def _make_group(backend: str, store: Any, rank: int, size: int, wait_seconds: float) -> None:
    """The process group, over a part of the store that no earlier attempt used."""
    patience = timedelta(seconds=wait_seconds)
    store.set_timeout(patience)
    group = PrefixStore("group", store)
    dist.init_process_group(backend, store=group, rank=rank, world_size=size, timeout=patience)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def _local_rank() -> int:
    return dist.get_node_local_rank(fallback_rank=0) if dist.is_available() else 0


def _launched() -> bool:
    """Whether a launcher has numbered this process: torch's own rule, where the number may be missing."""
    if not dist.is_available():
        return False
    return dist.is_initialized() or dist.get_node_local_rank(fallback_rank=-1) >= 0


def is_broken_connection(error: BaseException) -> bool:
    """Whether a collective failed because another process is gone or does not answer."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _BROKEN)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
