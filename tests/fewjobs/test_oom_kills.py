"""Whether the kernel has killed for want of memory is read from its counters, not guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fewjobs.oom_kills import UNKNOWN, OomKills, oom_kills

MOUNTS = {
    "v2": "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "v1": "30 20 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
}
FILES = {
    "v2": ("0::/job/step\n", "sys/fs/cgroup/job/step/memory.events"),
    "v1": ("4:memory:/job/step\n", "sys/fs/cgroup/memory/job/step/memory.oom_control"),
}


def machine(root: Path, version: str | None, group: int = 0, all_of_it: int | None = None) -> OomKills:
    """What is read on a system of which a folder pretends to be the root."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    if version is not None:
        (root / "proc/self/mountinfo").write_text(MOUNTS[version])
        (root / "proc/self/cgroup").write_text(FILES[version][0])
        counter = root / FILES[version][1]
        counter.parent.mkdir(parents=True, exist_ok=True)
        counter.write_text(f"oom {group + 3}\noom_kill_disable 0\noom_kill {group}\n")
    if all_of_it is not None:
        (root / "proc/vmstat").write_text(f"nr_free_pages 5\noom_kill {all_of_it}\n")
    return oom_kills(root)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_counts_of_our_group_and_of_the_machine(tmp_path: Path, version: str) -> None:
    before = machine(tmp_path, version, 2, 7)
    assert before == OomKills(2, 7)
    assert "from outside" in machine(tmp_path, version, 2, 7).since(before).reason()
    assert "the kernel has killed 2 processes" in machine(tmp_path, version, 2, 9).since(before).reason()
    assert "(its cgroup) was full" in machine(tmp_path, version, 3, 9).since(before).reason()


def test_a_system_that_does_not_count(tmp_path: Path) -> None:
    assert machine(tmp_path, None) == UNKNOWN
    assert "does not tell" in machine(tmp_path, None).since(UNKNOWN).reason()
    assert "from outside" in machine(tmp_path, None, all_of_it=1).since(OomKills(None, 1)).reason()
