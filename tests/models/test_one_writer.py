"""Two that write one destination: the second is refused, and a killed process stands in nobody's way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fewbits.errors import BadInput
from fewbits.models.folders import one_writer as module
from fewbits.models.folders.one_writer import one_writer, refuse_second_writer
from fewbits.models.folders.whole_folder import this_process
from tests.forks import fork


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("locks", [True, False])
def test_who_comes_second_is_refused_and_who_was_killed_is_not_waited_for(
    locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a file system without locks, where the process is looked for."""
    if not locks:
        monkeypatch.setattr(module, "fcntl", None)
    target, (told, tell) = tmp_path / "out.jsonl", os.pipe()
    pid = fork()
    if pid == 0:
        with one_writer(target):
            os.write(tell, b"1")
            threading.Event().wait(60)
        os._exit(0)
    assert os.read(told, 1) == b"1"
    for name in (target, str(tmp_path / "." / "out.jsonl")):
        for ask in (refuse_second_writer, lambda path: one_writer(path).__enter__()):
            with pytest.raises(
                BadInput, match=f"is being written by process {pid} on .*; wait until"
            ) as said:
                ask(name)
            assert "\n" not in str(said.value)
    with one_writer(tmp_path / "other.jsonl"):  # which is nobody's
        pass
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert names(tmp_path) == {".out.jsonl.lock"}
    refuse_second_writer(target)
    with one_writer(target):
        assert json.loads((tmp_path / ".out.jsonl.lock").read_text()) == this_process()
        with pytest.raises(BadInput, match="being written"), one_writer(target):
            raise AssertionError("two have it")
    assert not names(tmp_path)


def test_who_was_killed_on_another_machine_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system has no locks, nobody can see from here whether it lives."""
    lock = tmp_path / ".out.lock"
    lock.write_text(json.dumps({**this_process(), "host": "node7"}))
    with one_writer(tmp_path / "out"):  # with locks it can be seen
        pass
    lock.write_text(json.dumps({**this_process(), "host": "node7"}))
    monkeypatch.setattr(module, "fcntl", None)
    with (
        pytest.raises(BadInput, match=f"on node7; .*; if it is gone, remove {lock}"),
        one_writer(tmp_path / "out"),
    ):
        raise AssertionError("it may live")


def test_who_only_looks_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock that looking takes for an instant is waited for."""
    assert 0.1 < module._GLANCE_S < 1
    monkeypatch.setattr(module, "_GLANCE_S", 30.0)  # instants are long on a busy machine
    target = tmp_path / "out"
    (tmp_path / ".out.lock").touch()
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_SH);"
        "print(flush=True); time.sleep(0.1)"
    )
    looks = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".out.lock")], stdout=subprocess.PIPE, text=True
    )
    looks.stdout.readline()
    with one_writer(target):
        pass
    looks.wait()
    looks.stdout.close()


def test_many_take_turns(tmp_path: Path) -> None:
    """Among threads that try at once never two have it, though the file goes each time."""
    inside, most, turns = 0, 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal inside, most, turns
        for _ in range(20):
            try:
                with one_writer(tmp_path / "out"):
                    with lock:
                        inside, turns = inside + 1, turns + 1
                        most = max(most, inside)
                    with lock:
                        inside -= 1
            except BadInput:
                continue

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and turns >= 20 and not names(tmp_path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot write beside"), one_writer(tmp_path / "file" / "out"):
        raise AssertionError("there is no such folder")
