"""``fewbits build`` on a terminal and in a pipe."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fewjobs.conftest import ROOT, Workshop, write_ninja


def fewbits(workshop: Workshop, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**workshop.env, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "fewbits.cli", "build", *words]
    return subprocess.run(command, cwd=workshop.folder, env=env, capture_output=True, text=True, timeout=200)


def test_report_and_profile_are_written(workshop: Workshop, tmp_path: Path) -> None:
    workshop.unit("a.cpp", 60)
    files = ("--profile", str(tmp_path / "p.json"), "--report", str(tmp_path / "r.html"))
    done = fewbits(workshop, "--memory", "1G", *files, "--", "g++", "-O0", "-c", "a.cpp")
    assert done.returncode == 0, done.stderr
    assert "fewbits build: 1 stages" in done.stderr
    assert "<svg" in (tmp_path / "r.html").read_text()
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["stages"][0]["unit"] == "a.cpp"
    assert found["controller"]["peak_rss_bytes"] < 60e6
    planned = fewbits(workshop, "--plan", str(tmp_path / "p.json"), "--memory", "8G")
    assert "MAX_JOBS=1" in planned.stdout


def test_the_memory_there_is(workshop: Workshop, tmp_path: Path) -> None:
    (workshop.folder / "a.cpp").write_text("int f(){return 1;}\n")
    budgets = []
    for words in ((), ("--memory", "auto")):
        profile = tmp_path / "p.json"
        done = fewbits(workshop, *words, "--profile", str(profile), "--", "g++", "-c", "a.cpp")
        assert done.returncode == 0, done.stderr
        found = json.loads(profile.read_text())
        assert found["facts"]["binding"] != "--memory"
        budgets.append(found["budget_bytes"])
    assert budgets[0] == pytest.approx(budgets[1], rel=0.5)
    assert min(budgets) > 0


def test_wrong_usage_is_one_sentence(workshop: Workshop) -> None:
    for words, said in (
        ((), "write the command that builds behind --"),
        (("ninja", "-j6"), "write the command that builds behind --"),
        (("--memory", "much", "--", "true"), "'much' is not an amount of memory"),
        (("--", "no-such-command"), "there is no command 'no-such-command'"),
    ):
        done = fewbits(workshop, *words)
        assert done.returncode in (1, 2)
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_terminal_shows_a_table_and_the_build_above(workshop: Workshop, ninja: str) -> None:
    units = [workshop.unit(f"u{i}.cpp", 150) for i in range(3)]
    write_ninja(workshop, units)
    env = {**workshop.env, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-m", "fewbits.cli", "build", "--memory", "600M", "--", ninja, "-j3"]
    leader, follower = pty.openpty()
    process = subprocess.Popen(command, cwd=workshop.folder, env=env, stdout=follower, stderr=follower)
    os.close(follower)
    text = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:
            break
        text += data
    os.close(leader)
    assert process.wait(200) == 0, text.decode()
    for word in ("[3/3]", "supposed", "u1.cpp", "of 600 MiB (--memory)", "waiting", "report"):
        assert word in text.decode(), word
