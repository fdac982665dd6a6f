"""How the ranks of a run find each other, also when a launcher has started all of them again.

torch's elastic agent keeps its store when it starts ranks again, with all that an earlier attempt wrote into
it: addresses where nobody listens any more, barriers that look passed, answers to questions not yet asked.
How often a rank was started again does not tell attempts apart: of two machines only the one that lost a rank
counts. So the ranks agree on a name that no attempt had before, and speak under that:

* each rank writes a call of its own, a random word; rank 0 answers every call that it finds with its name for
  the attempt, those of dead ranks too, which nobody reads;
* each rank says under that name that it has come, and rank 0 says "go" when all have.

A rank that was answered by a rank 0 which is just being ended hears no "go", and fails like one that nobody
answers: with a sentence, after `AGAIN_S` where an earlier attempt had met.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from fewbits.errors import PeerLost

AGAIN_S = 50.0  # what ranks that were started again wait for each other; the first time imports may take long
_LOOK_S = 0.05


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


def meet(store: Any, rank: int, size: int, *, attempt: int, wait_seconds: float) -> Met:
    """Agree on a part of ``store`` that only these processes use.

    Args:
        store: of the launcher or of rank 0; each process calls this once.
        rank: this process among all.
        size: how many there are.
        attempt: how often a launcher says it has started this process again.
        wait_seconds: the longest wait for the others at the first attempt.

    Raises:
        PeerLost: some have not come.
    """
    room = PrefixStore("fewbits-meeting", store)
    before = attempt > 0 or room.check(["met"])
    deadline = time.monotonic() + (min(AGAIN_S, wait_seconds) if before else wait_seconds)
    launch = room.compare_set("launch", "", secrets.token_hex(8)).decode()
    call = secrets.token_hex(8)
    room.set(f"call/{rank}", call)
    if rank == 0:
        name = secrets.token_hex(8)
        _answer(room, name, size, deadline)
        room.set("met", "")
        again = before or any(room.get(f"{name}/came/{other}") == b"again" for other in range(1, size))
        room.set(f"{name}/go", json.dumps(again))
    else:
        name = _wait(room, f"answer/{call}", deadline, size)
        room.set(f"{name}/came/{rank}", "again" if before else "first")
        again = bool(json.loads(_wait(room, f"{name}/go", deadline, size)))
    return Met(PrefixStore(f"fewbits-{name}", store), launch, again)


def _answer(room: Any, name: str, size: int, deadline: float) -> None:
    """Give the attempt's name to every rank that calls, until all have come."""
    missing, answered = set(range(1, size)), set()
    while missing:
        for other in sorted(missing):
            call = room.get(f"call/{other}").decode() if room.check([f"call/{other}"]) else ""
            if call and call not in answered:
                answered.add(call)
                room.set(f"answer/{call}", name)
            if room.check([f"{name}/came/{other}"]):
                missing.discard(other)
        if missing and time.monotonic() > deadline:
            raise _alone(f"ranks {', '.join(str(other) for other in sorted(missing))} of {size}")
        time.sleep(_LOOK_S if missing else 0)


def _wait(room: Any, key: str, deadline: float, size: int) -> str:
    try:
        room.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        return str(room.get(key).decode())
    except dist.DistStoreError as error:  # a time-out
        raise _alone(f"rank 0 of {size} and the others") from error


def _alone(who: str) -> PeerLost:
    return PeerLost(
        f"{who} have not come to the meeting of this run's ranks in time; look at their logs, then start all"
        " again, with resume."
    )


__all__ = ["AGAIN_S", "Met", "meet"]
