"""How the ranks of a run find each other, also when a launcher has started all of them again.

torch's elastic agent keeps its store when it starts ranks again, with all that an earlier attempt wrote into
it: addresses where nobody listens any more, barriers that look passed, answers to questions not yet asked.
How often a rank was started again does not tell attempts apart: of two machines only the one that lost a rank
counts. So the ranks agree on a name that no attempt had before, and speak under that:

* each rank writes a call of its own, a random word; rank 0 answers every call that it finds with its name for
  the attempt, those of dead ranks too, which nobody reads;
* each rank says under that name that it has come, and rank 0 says "go" when all have.

A rank that was answered by a rank 0 which is just being ended hears no "go", and fails like one that nobody
answers: with a sentence, after `MEETING_SECONDS` or what the run's settings say, and no later than `AGAIN_S`
where an earlier attempt had met. Ranks that have met wait for each other much longer: loading takes its time.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from fewbits.errors import PeerLost

MEETING_SECONDS = 90  # the first time: imports from a slow disk take some ranks longer than others
AGAIN_S = 50.0  # what ranks that were started again wait for each other
_SAID_S = 15.0  # after which rank 0 says for whom it waits
_LOOK_S, _LET_READ_S, _RANK_0_FIRST_S = 0.05, 1.0, 3.0
_NAMED = 8  # ranks that are named in a sentence, at most


@dataclass(frozen=True)
class Met:
    """What the ranks have agreed on.

    Attributes:
        store: what they speak through; nothing was said in it before.
        launch: the same word in all attempts of one launch whose store is kept, and in no other launch.
        again: these are not the first processes of their launch.
    """

    store: Any
    launch: str
    again: bool


def meet(
    store: Any,
    rank: int,
    size: int,
    *,
    attempt: int,
    seconds: float,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Met:
    """Agree on a part of ``store`` that only these processes use.

    Args:
        store: of the launcher or of rank 0; each process calls this once.
        rank: this process among all.
        size: how many there are.
        attempt: how often a launcher says it has started this process again.
        seconds: the longest wait for the others, at most `AGAIN_S` where an earlier attempt had met.
        tell: gets a sentence about ranks that rank 0 waits for, once.

    Raises:
        PeerLost: some have not come.
    """
    room = PrefixStore("fewbits-meeting", store)
    before = attempt > 0 or room.check(["met"])
    patience = _Patience(size, min(AGAIN_S, seconds) if before else seconds)
    launch = room.compare_set("launch", "", secrets.token_hex(8)).decode()
    call = secrets.token_hex(8)
    room.set(f"call/{rank}", call)
    if rank == 0:
        name = secrets.token_hex(8)
        if missing := _answer(room, name, patience, tell):
            error = patience.over(missing)
            room.set(f"{name}/go", json.dumps(str(error)))
            time.sleep(_LET_READ_S)  # where no launcher holds the store, it goes with this process
            raise error
        room.set("met", "")
        again = before or any(room.get(f"{name}/came/{other}") == b"again" for other in range(1, size))
        room.set(f"{name}/go", json.dumps(again))
    else:
        name = _wait(room, f"answer/{call}", patience, lambda: {0} | _without(room, "call/{}", size))
        room.set(f"{name}/came/{rank}", "again" if before else "first")
        go = _wait(
            room, f"{name}/go", patience, lambda: _without(room, f"{name}/came/{{}}", size) - {0} or {0}
        )
        again = json.loads(go)
        if isinstance(again, str):
            raise PeerLost(again)
    return Met(PrefixStore(f"fewbits-{name}", store), launch, again)


class _Patience:
    """How long a rank waits, and what it says when the others have not come."""

    def __init__(self, size: int, seconds: float) -> None:
        self.size, self.seconds, self.began = size, seconds, time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.seconds - self.waited

    def waiting_for(self, missing: Iterable[int]) -> str:
        return (
            f"waiting for {_named(missing)} of {self.size} to start ({self._come(missing)}); without them"
            f" the run ends in {self.left:.0f} s."
        )

    def over(self, missing: Iterable[int]) -> PeerLost:
        return PeerLost(
            f"{_named(missing)} of {self.size} did not come to the meeting of this run's ranks within"
            f" {self.seconds:g} s"
            f" ({self._come(missing)}); look at their logs, then start all again, with resume. Where starting"
            " takes longer, raise meeting_seconds."
        )

    def _come(self, missing: Iterable[int]) -> str:
        return f"{self.size - len(set(missing))} of {self.size} have come"


def _named(ranks: Iterable[int]) -> str:
    """As in "ranks 1, 3"; of many the first."""
    numbers = sorted(ranks)
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:_NAMED]))}{more}"


def _answer(room: Any, name: str, patience: _Patience, tell: Callable[[str], None]) -> set[int]:
    """Give the attempt's name to every rank that calls, until all have come; those that have not."""
    missing, answered, told = set(range(1, patience.size)), set(), False
    while missing:
        for other in sorted(missing):
            call = room.get(f"call/{other}").decode() if room.check([f"call/{other}"]) else ""
            if call and call not in answered:
                answered.add(call)
                room.set(f"answer/{call}", name)
            if room.check([f"{name}/came/{other}"]):
                missing.discard(other)
        if missing and patience.left < 0:
            break
        if missing and not told and patience.waited > _SAID_S:
            told = True
            tell(patience.waiting_for(missing))
        time.sleep(_LOOK_S if missing else 0)
    return missing


def _wait(room: Any, key: str, patience: _Patience, missing: Callable[[], set[int]]) -> str:
    """What stands under a key that rank 0 writes; ``missing`` says who has not come, if it does not."""
    try:
        # rank 0, which knows who is missing, is to speak first
        room.wait([key], timedelta(seconds=max(0.1, patience.left + _RANK_0_FIRST_S)))
        return str(room.get(key).decode())
    except dist.DistStoreError as error:  # a time-out
        raise patience.over(missing()) from error


def _without(room: Any, key: str, size: int) -> set[int]:
    """The ranks that have not written their key."""
    return {rank for rank in range(size) if not room.check([key.format(rank)])}


__all__ = ["AGAIN_S", "MEETING_SECONDS", "Met", "meet"]
