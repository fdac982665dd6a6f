"""Ranks that a launcher starts again meet anew, in a store that is full of what earlier attempts said."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from fewbits.errors import PeerLost, Unsupported
from fewbits.training.config import TrainConfig
from fewbits.training.ranks import meeting
from fewbits.training.ranks.meeting import Met, meet
from fewbits.training.ranks.processes import join


@pytest.fixture
def store() -> TCPStore:
    """As an elastic agent keeps it: it outlives the ranks."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def attempt(store: TCPStore) -> Callable[..., list[Any]]:
    """What some of the ranks of an attempt find, or the error of each."""

    def run(*ranks: int, size: int = 2, counts: tuple[int, ...] = (), wait: float = 20) -> list[Any]:
        found: list[Any] = [None] * len(ranks)

        def one(place: int, rank: int) -> None:
            own = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))
            count = counts[place] if counts else 0
            try:
                found[place] = meet(own, rank, size, attempt=count, seconds=wait)
            except PeerLost as error:
                found[place] = error

        threads = [threading.Thread(target=one, args=pair) for pair in enumerate(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    return run


def test_each_attempt_has_a_store_of_its_own_and_all_share_the_launch(attempt) -> None:
    first = attempt(0, 1, 2, size=3)
    assert [met.again for met in first] == [False] * 3
    first[1].store.set("address", "nobody listens here any more")
    assert first[2].store.get("address") == b"nobody listens here any more"
    second = attempt(2, 0, 1, size=3)  # of several machines, those without a failure do not count
    assert [met.again for met in second] == [True] * 3
    assert not any(met.store.check(["address"]) for met in second)
    assert len({met.launch for met in first + second}) == 1
    second[0].store.set("address", "here")
    assert all(met.store.get("address") == b"here" for met in second)


def test_one_that_was_started_again_is_enough(attempt) -> None:
    """The first attempt had ended before its ranks met: only the machine of the dead one counts."""
    assert [met.again for met in attempt(0, 1, counts=(0, 1))] == [True, True]


def test_calls_of_dead_ranks_are_answered_in_vain(attempt, monkeypatch) -> None:
    """Ranks 1 and 2 of an attempt came, rank 0 did not; then all three come."""
    monkeypatch.setattr(meeting, "AGAIN_S", 5.0)
    monkeypatch.setattr(meeting, "_RANK_0_FIRST_S", 0.0)
    assert all(isinstance(error, PeerLost) for error in attempt(1, 2, size=3, wait=0.3))
    met = attempt(0, 1, 2, size=3)
    assert all(isinstance(found, Met) for found in met)
    met[1].store.set("word", "of this attempt")
    assert all(found.store.get("word") == b"of this attempt" for found in met)


@pytest.mark.parametrize("rank, missing", [(0, "rank 1 of 2"), (1, "rank 0 of 2")])
def test_who_waits_in_vain_says_so_and_soon_where_there_was_an_attempt(
    rank: int, missing: str, attempt, monkeypatch
) -> None:
    assert all(isinstance(met, Met) for met in attempt(0, 1))
    monkeypatch.setattr(meeting, "AGAIN_S", 0.3)
    monkeypatch.setattr(meeting, "_LET_READ_S", 0.0)
    monkeypatch.setattr(meeting, "_RANK_0_FIRST_S", 0.0)
    began = time.monotonic()
    (error,) = attempt(rank, wait=1800)
    assert isinstance(error, PeerLost) and time.monotonic() - began < 10
    assert str(error).startswith(f"{missing} did not come"), error
    assert meeting.AGAIN_S < 60


def test_all_that_came_name_those_that_did_not(attempt) -> None:
    """Ranks 3 and 12 to 23 of 24 do not start."""
    came = [rank for rank in range(12) if rank != 3]
    errors = {str(error) for error in attempt(*came, size=24, wait=0.5)}
    assert len(errors) == 1, errors
    assert errors.pop().startswith(
        "ranks 3, 12, 13, 14, 15, 16, 17, 18 and 5 more of 24 did not come to the meeting of this run's ranks"
        " within 0.5 s (11 of 24 have come); "
    )


def test_rank_0_says_for_whom_it_waits(store, monkeypatch) -> None:
    monkeypatch.setattr(meeting, "_SAID_S", 0.1)
    monkeypatch.setattr(meeting, "_LET_READ_S", 0.0)
    told: list[str] = []
    with pytest.raises(PeerLost):
        meet(store, 0, 2, attempt=0, seconds=0.4, tell=told.append)
    assert len(told) == 1
    assert re.fullmatch(
        r"waiting for rank 1 of 2 to start \(1 of 2 have come\); without them the run ends in 0 s\.", told[0]
    )


@pytest.mark.parametrize(
    "rank, said",
    [
        (0, r"ranks 1, 2 of 3 did not come to the meeting of this run's ranks within 0.5 s \(1 of 3 have"),
        (1, r"the store at which the ranks of this run meet did not answer within 0.5 s \(.+\), so rank 0"),
    ],
)
def test_started_without_a_launcher_who_is_alone_says_so(rank: int, said: str, monkeypatch) -> None:
    """Rank 0 then holds the store: torch would wait in it, and not say for whom."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    for name, value in {**place, "LOCAL_RANK": str(rank), "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "_LET_READ_S", 0.0)
    began = time.monotonic()
    with pytest.raises(PeerLost, match=said):
        join(on_gpu=False, meeting_seconds=0.5)
    assert time.monotonic() - began < 10
    assert TrainConfig(model="m", train_data="d").meeting_seconds == meeting.MEETING_SECONDS <= 120
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(Unsupported, match=r"one of several, but .*WORLD_SIZE.*; set RANK, WORLD_SIZE,"):
        join(on_gpu=False)
