"""One run at a time in a run folder; what a killed one leaves is taken over, and told apart."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fewbits.cli import launch as cli_launch
from fewbits.cli.models import resolve
from fewbits.errors import BadInput, TrainingStopped
from fewbits.training.report.page import write_report
from fewbits.training.run_folder import lock as run_lock
from fewbits.training.run_folder.killed import note_if_killed, process_facts
from fewbits.training.run_folder.lock import FILE, Owner, RunLock, holder_of
from tests.training.test_resume import LORA, settings

HOLD = """
import sys, time
from fewbits.training.run_folder.lock import RunLock
lock = RunLock(sys.argv[1], launch=sys.argv[2] or None)
lock.take()
print("taken", flush=True)
time.sleep(float(sys.argv[3]))
lock.release()
"""


@pytest.fixture
def other(tmp_path):
    """Starts processes that hold a folder."""
    started = []

    def start(folder: Path, launch: str = "", seconds: float = 60) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLD, str(folder), launch, str(seconds)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "taken\n"
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def foreign(folder: Path, **facts: object) -> Owner:
    """A lock that a process of another machine has left."""
    folder.mkdir(exist_ok=True)
    owner = {"pid": 7, "host": "elsewhere", "machine": "m", "began": 1.0, "taken": "then", **facts}
    (folder / FILE).write_text(json.dumps(owner))
    return Owner.read(json.dumps(owner))


def test_a_folder_in_use_is_refused_and_a_killed_owner_taken_over(other, tmp_path):
    folder = tmp_path / "run"
    process = other(folder)
    with pytest.raises(BadInput, match=rf"in use by process {process.pid} on .*, since 20"):
        RunLock(folder).take()
    assert holder_of(folder).is_alive and holder_of(folder).owner.pid == process.pid
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert holder_of(folder).is_alive is False
    told = []
    with RunLock(folder, tell=told.append) as lock:
        lock.take()
        lock.take()
        assert holder_of(folder).owner.pid == os.getpid() and holder_of(folder).is_alive
    assert len(told) == 1 and f"left behind by process {process.pid}" in told[0] and "killed" in told[0]
    assert not folder.exists() or not list(folder.iterdir())


def test_given_back_nothing_remains(tmp_path):
    with RunLock(tmp_path / "a" / "b") as lock:
        lock.take()
        assert (tmp_path / "a/b" / FILE).is_file()
    assert not (tmp_path / "a").exists()
    (tmp_path / "kept").mkdir()
    with RunLock(tmp_path / "kept") as lock:
        lock.take()
    assert (tmp_path / "kept").is_dir() and holder_of(tmp_path / "kept") is None


def test_another_machine_is_refused_unless_asked(tmp_path):
    foreign(tmp_path)
    assert holder_of(tmp_path).is_alive is None
    with pytest.raises(BadInput, match=r"process 7 on elsewhere, another machine .* take_over=true"):
        RunLock(tmp_path).take()
    assert holder_of(tmp_path).owner.host == "elsewhere"  # refused, and left as it was
    told = []
    RunLock(tmp_path, take_over=True, tell=told.append).take()
    assert "taken for gone" in told[0]


def test_an_earlier_attempt_of_one_launch_is_taken_over_or_waited_for(other, tmp_path, monkeypatch):
    foreign(tmp_path, launch="job-1")
    with pytest.raises(BadInput, match="another machine"):
        RunLock(tmp_path, launch="job-2").take()
    lock = RunLock(tmp_path, launch="job-1")
    lock.take()
    lock.release()
    process = other(tmp_path / "near", launch="job-1", seconds=0.6)
    with RunLock(tmp_path / "near", launch="job-1") as lock:
        lock.take()
    assert process.wait(timeout=10) == 0
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.3)
    other(tmp_path / "stuck", launch="job-1")
    with pytest.raises(BadInput, match="in use"):
        RunLock(tmp_path / "stuck", launch="job-1").take()


def test_who_was_taken_over_writes_no_more(tmp_path):
    lock = RunLock(tmp_path)
    lock.take()
    lock.confirm()
    foreign(tmp_path)
    with pytest.raises(TrainingStopped, match="taken over by process 7 on elsewhere"):
        lock.confirm()
    lock.release()
    assert (tmp_path / FILE).is_file()  # it is another's


def test_without_flock_the_process_is_looked_for(other, tmp_path, monkeypatch):
    process = other(tmp_path)
    monkeypatch.setattr(run_lock, "fcntl", None)
    assert holder_of(tmp_path).is_alive
    with pytest.raises(BadInput, match="in use by"):
        RunLock(tmp_path).take()
    process.kill()
    process.wait()
    assert holder_of(tmp_path).is_alive is False
    RunLock(tmp_path).take()


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"pid": "x"}', "\x00\xff" * 9, "[" * 5000])
def test_a_damaged_lock_is_nobodys(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert holder_of(tmp_path).is_alive is False
    RunLock(tmp_path).take()


def test_a_folder_in_the_locks_place(tmp_path):
    (tmp_path / FILE).mkdir()
    with pytest.raises(BadInput, match="is a folder"):
        RunLock(tmp_path).take()
    assert holder_of(tmp_path) is None


def test_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.05)
    with RunLock(tmp_path) as lock:
        lock.take()
        os.utime(tmp_path / FILE, (1, 1))
        deadline = time.monotonic() + 5
        while holder_of(tmp_path).seen.year == 1970 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert holder_of(tmp_path).seen.year > 2000


def test_the_report_says_whether_a_run_lives_or_was_killed(other, tmp_path):
    def page() -> str:
        return write_report(tmp_path).read_text()

    def write(**facts: object) -> None:
        (tmp_path / "run.json").write_text(json.dumps({"status": "running", **facts}))

    write(process={"pid": 5, "host": "here"})
    assert "was killed" in page() and "process 5 on here" in page()  # no lock: nobody is there
    write()
    process = other(tmp_path)
    assert "being trained by process" in page() and "was killed" not in page()
    process.kill()
    process.wait()
    assert f"(process {process.pid} on" in page() and "was killed" in page() and "--resume" in page()
    write()
    foreign(tmp_path)
    assert "cannot be seen" in page() and "was begun by process 7 on elsewhere" in page()


def test_who_looks_at_a_killed_run_notes_it(other, tmp_path):
    """`fewbits generate`, the launcher, the next run: all by this one function; a live run is left alone."""
    facts = {"status": "running", "steps": 3}
    (tmp_path / "run.json").write_text(json.dumps(facts))

    def noted() -> dict:
        note_if_killed(tmp_path)
        return json.loads((tmp_path / "run.json").read_text())

    process = other(tmp_path)
    lock = (tmp_path / FILE).read_text()
    assert noted() == facts and (tmp_path / FILE).read_text() == lock
    with pytest.raises(BadInput, match=rf"is being trained by process {process.pid} on "):
        resolve(str(tmp_path))
    process.kill()
    process.wait()
    with pytest.raises(BadInput, match=r"was killed and has no model; end it with fewbits train --resume"):
        resolve(str(tmp_path))
    after = noted()
    assert after["status"] == "killed" and after["steps"] == 3 and after["ended"]
    assert re.fullmatch(
        rf"The run's process \(process {process.pid} on .+\) was killed .+ UTC\.", after["error"]
    )
    assert not (tmp_path / FILE).exists()  # nobody has it
    for left in ("finished", "stopped", "killed"):
        (tmp_path / "run.json").write_text(json.dumps({"status": left}))
        assert noted() == {"status": left}


def test_a_run_that_lives_is_never_called_dead(tmp_path, monkeypatch):
    """Without a lock to ask (removed by hand, no flock) the process counts, but not another of its number."""
    living = process_facts()
    cases = (
        (living, "running"),
        ({**living, "began": living["began"] - 60}, "killed"),  # its number has come again
        ({**living, "pid": 2**22 + 1}, "killed"),
        ({"pid": "x", "host": []}, "killed"),
    )
    for flock in (True, False):
        if not flock:
            monkeypatch.setattr(run_lock, "fcntl", None)
        for process, status in cases:
            (tmp_path / "run.json").write_text(json.dumps({"status": "running", "process": process}))
            if not flock and "began" in process:
                (tmp_path / FILE).write_text(json.dumps({**process, "taken": "then"}))
            note_if_killed(tmp_path)
            assert json.loads((tmp_path / "run.json").read_text())["status"] == status, (flock, process)
            (tmp_path / FILE).unlink(missing_ok=True)
    (tmp_path / "run.json").write_text("{")
    note_if_killed(tmp_path)  # it is told by who reads it
    note_if_killed(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_launcher_that_has_lost_its_ranks_says_how(other, tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text(json.dumps({"status": "running"}))
    process = other(tmp_path)
    sentence = f"rank 0 (process {process.pid}) was killed by SIGKILL."

    def run(command, args, *, count, logs, note):
        process.kill()
        process.wait()
        note(sentence)
        return 137

    monkeypatch.setattr(cli_launch, "run_processes", run)
    args = argparse.Namespace(nproc_per_node="2", threads=1, max_restarts=None)
    assert cli_launch.launch(args, ["train"], device="cpu", output_dir=tmp_path) == 137
    noted = json.loads((tmp_path / "run.json").read_text())
    assert (noted["status"], noted["error"]) == ("killed", sentence)
    assert f"{sentence} The page shows" in write_report(tmp_path).read_text()


@pytest.mark.slow
def test_a_second_run_notes_it_and_resume_says_it(killer, tiny_folder, tiny_data, tmp_path):
    config = settings(tiny_folder, tiny_data, tmp_path / "run", **LORA)
    assert killer.run(config, resume=False, at_step=6)["status"] == -9

    def status() -> str:
        return json.loads((tmp_path / "run/run.json").read_text())["status"]

    assert status() == "running"
    assert "holds another run" in killer.run(config, resume=False)["error"]
    assert status() == "killed"
    assert killer.run(config, resume=True)["status"] == 0
    assert status() == "finished"
