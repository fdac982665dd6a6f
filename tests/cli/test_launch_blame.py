"""Which of several ranks is to blame, whenever the launcher comes to look at them."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap

import psutil
import pytest

from fewbits.cli.launch import run_processes
from fewbits.errors import PeerLost
from fewjobs.oom_kills import OomKills
from tests.cli.launched import HEAD, flags, wait_for
from tests.forks import fork


@pytest.mark.slow
def test_a_killed_rank_is_to_blame_and_not_the_one_that_lost_it(launched, monkeypatch):
    monkeypatch.setattr("fewbits.cli.launch.oom_kills", lambda: OomKills(None, 5))  # as before the launch
    code, told = launched(
        """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        fail("PeerLost: rank 0 of 2 lost the connection to another rank.")
        """
    )
    assert code == 128 + 9
    assert re.fullmatch(
        r"error: rank 1 \(process \d+\) was killed by SIGKILL, from outside: the kernel has killed nothing"
        r" for want of memory; the checkpoints are whole: go on with --resume\.\n",
        told,
    ), told


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_rank_that_somebody_else_ends_is_to_blame(number, launched):
    """Not the other one, which the agent ends with the same signal, or which lost it."""
    code, told = launched(
        f"""
        time.sleep(2)
        if rank == 1:
            os.kill(os.getpid(), {int(number)})
        time.sleep(60)
        """
    )
    assert code == 128 + number
    assert re.match(rf"error: rank 1 \(process \d+\) was killed by {number.name}; ", told), told


@pytest.mark.parametrize(
    "end, to_blame",
    [
        (signal.SIGTERM, 1),
        (None, 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((signal.SIGTERM, 0), (signal.SIGKILL, 0), (signal.SIGKILL, 1), (None, 1))
        ),
    ],
)
def test_two_deaths_that_the_launcher_sees_at_once(end, to_blame, tmp_path):
    """It stands still while a rank ends, by a signal or by an error, and the other one loses it."""
    code = HEAD + textwrap.dedent(
        f"""
        from pathlib import Path
        folder = Path({str(tmp_path)!r})
        (folder / f"new{{rank}}").write_text(str(os.getpid()))
        (folder / f"new{{rank}}").rename(folder / str(rank))
        while not (other := folder / str(1 - rank)).exists():
            time.sleep(0.01)
        while Path(f"/proc/{{other.read_text()}}/stat").read_text().split()[2] != "Z":
            if rank == {to_blame} and (folder / "fail").exists():
                fail("RuntimeError: no luck")
            time.sleep(0.01)
        fail("PeerLost: another rank is gone.")
        """
    )
    launcher = fork()
    if launcher == 0:
        with (tmp_path / "told").open("w") as sys.stderr:
            args = flags("--nproc-per-node", "2")
            result = run_processes([sys.executable, "-c", code], args, count=2, logs=tmp_path / "run/logs")
        os._exit(result)
    wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in (0, 1)))
    ranks = [int((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    os.kill(launcher, signal.SIGSTOP)
    if end is None:
        (tmp_path / "fail").touch()
    else:
        os.kill(ranks[to_blame], end)
    wait_for(lambda: all(psutil.Process(rank).status() == psutil.STATUS_ZOMBIE for rank in ranks))
    os.kill(launcher, signal.SIGCONT)
    result = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
    told = (tmp_path / "told").read_text()
    who = rf"error: rank {to_blame} \(process {ranks[to_blame]}\)"
    if end is None:
        assert (result, f"{told.strip()}\n") == (1, told), told
        assert re.fullmatch(rf"{who} ended with code 1: RuntimeError: no luck\n", told), told
    else:
        assert result == 128 + end and re.match(rf"{who} was killed by {end.name}", told), told


@pytest.mark.slow
@pytest.mark.parametrize("to_blame", [1, 0])
def test_what_a_rank_says_that_was_ended_with_the_others_is_no_reason(to_blame, launched):
    """Before the training a rank that gets SIGTERM says so; the agent sends it when another has failed."""
    code, told = launched(
        f"""
        def heard(number, frame):
            fail("StoppedBySignal: SIGTERM came to a rank, which was not training at that moment.")
        signal.signal(signal.SIGTERM, heard)
        if rank == {to_blame}:
            time.sleep(1)
            fail("RuntimeError: no luck")
        time.sleep(60)
        """
    )
    assert code == 1, told
    assert re.fullmatch(
        rf"error: rank {to_blame} \(process \d+\) ended with code 1: RuntimeError: no luck\n", told
    )


@pytest.mark.slow
def test_who_said_why_before_the_agent_ended_it_goes_before_who_lost_it(launched):
    """Rank 0 has failed and is slow to end; rank 1 has lost it and ends first."""
    code, told = launched(
        """
        if rank == 0:
            try:
                fail("RuntimeError: no luck")
            finally:
                time.sleep(60)
        time.sleep(1)
        fail("PeerLost: rank 0 of 2 is gone.")
        """
    )
    assert code == 1
    assert re.fullmatch(r"error: rank 0 \(process \d+\) ended: RuntimeError: no luck\n", told), told


@pytest.mark.slow
def test_a_rank_that_could_not_write_why_it_ended(launched):
    """Killed while it wrote, or the disk is full: torch's agent cannot read half a file."""
    with pytest.raises(PeerLost, match=r"a rank ended and could not write down why; see its log in .+logs/"):
        launched(
            """
            if rank == 1:
                open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write('{"message": {"mess')
                sys.exit(1)
            time.sleep(60)
            """
        )
