"""Ranks that a launcher starts again meet anew, in a store that is full of what earlier attempts said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from fewbits.errors import PeerLost
from fewbits.training.ranks import meeting
from fewbits.training.ranks.meeting import Met, meet


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
                found[place] = meet(own, rank, size, attempt=count, wait_seconds=wait)
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
    assert all(isinstance(error, PeerLost) for error in attempt(1, 2, size=3, wait=0.3))
    met = attempt(0, 1, 2, size=3)
    assert all(isinstance(found, Met) for found in met)
    met[1].store.set("word", "of this attempt")
    assert all(found.store.get("word") == b"of this attempt" for found in met)


@pytest.mark.parametrize("rank, missing", [(0, "ranks 1 of 2"), (1, "rank 0 of 2")])
def test_who_waits_in_vain_says_so_and_soon_where_there_was_an_attempt(
    rank: int, missing: str, attempt, monkeypatch
) -> None:
    assert all(isinstance(met, Met) for met in attempt(0, 1))
    monkeypatch.setattr(meeting, "AGAIN_S", 0.5)
    began = time.monotonic()
    (error,) = attempt(rank, wait=1800)
    assert isinstance(error, PeerLost) and time.monotonic() - began < 10
    assert str(error).startswith(missing) and "have not come" in str(error)
    assert meeting.AGAIN_S < 60
