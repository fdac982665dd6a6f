"""The memory budget on staged /proc and /sys trees."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fewjobs import parse_bytes, read_budget
from fewjobs.errors import BadInput, Unsupported

GIB = 2**30
V1 = "31 23 0:28 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw"
NO_LIMIT_V1 = 9223372036854771712


class Machine:
    """A folder with the files that the budget is read from."""

    def __init__(self, root: Path, total: int = 64 * GIB, available: int = 48 * GIB) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB\n")

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))

    def v2(self, path: str, mount: str = V2) -> None:
        self.write("proc/self/cgroup", f"0::{path}\n")
        self.write("proc/self/mountinfo", f"22 27 0:21 / /proc rw - proc proc rw\n{mount}\n")

    def v1(self, path: str, mount: str = V1) -> None:
        self.write("proc/self/cgroup", f"5:cpu,cpuacct:/\n4:memory:{path}\n")
        self.write("proc/self/mountinfo", mount + "\n")

    def v2_group(self, path: str, limit: object, used: int = 0, inactive: int = 0, active: int = 0) -> None:
        folder = f"sys/fs/cgroup{path}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {inactive}\nactive_file {active}\n")

    def v1_group(self, path: str, limit: int, used: int = 0, inactive: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory{path}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}\n")

    def budget(self, given: int | None = None, **environ: str):
        return read_budget(given_bytes=given, root=self.root, environ=environ)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_no_limits(machine: Machine) -> None:
    budget = machine.budget()
    assert (budget.binding.name, budget.available_bytes, len(budget.limits)) == ("machine", 48 * GIB, 1)
    assert budget.binding.limit_bytes == 64 * GIB


def test_a_given_limit(machine: Machine) -> None:
    assert machine.budget(12 * GIB).available_bytes == 12 * GIB
    assert machine.budget(12 * GIB).binding.name == "given"
    assert machine.budget(100 * GIB).binding.name == "machine"


def test_an_old_kernel_has_no_available(machine: Machine) -> None:
    machine.write(
        "proc/meminfo", "MemTotal: 1000 kB\nMemFree: 100 kB\nBuffers: 20 kB\nCached: 300 kB\nShmem: 50 kB\n"
    )
    assert machine.budget().available_bytes == 370 * 1024


def test_cgroup_v2_is_charged_without_what_can_be_dropped(machine: Machine) -> None:
    machine.v2("/job")
    machine.v2_group("/job", 16 * GIB, used=10 * GIB, inactive=3 * GIB, active=2 * GIB)
    budget = machine.budget()
    assert budget.binding.name == "cgroup v2"
    assert budget.binding.where == "/sys/fs/cgroup/job/memory.max"
    assert budget.available_bytes == (16 - 10 + 3 + 1) * GIB


def test_cgroup_v2_with_the_limit_on_a_parent(machine: Machine) -> None:
    machine.v2("/user.slice/user-1.slice/session")
    machine.v2_group("/user.slice/user-1.slice/session", "max", used=GIB)
    machine.v2_group("/user.slice/user-1.slice", 8 * GIB, used=5 * GIB)
    machine.v2_group("/user.slice", 30 * GIB, used=6 * GIB)
    budget = machine.budget()
    assert budget.available_bytes == 3 * GIB
    assert budget.binding.where == "/sys/fs/cgroup/user.slice/user-1.slice/memory.max"
    assert len(budget.limits) == 3


def test_cgroup_v2_throttles_at_memory_high(machine: Machine) -> None:
    machine.v2("/job")
    machine.v2_group("/job", 16 * GIB)
    machine.write("sys/fs/cgroup/job/memory.high", 12 * GIB)
    assert machine.budget().available_bytes == 12 * GIB
    assert machine.budget().binding.where.endswith("memory.high")


def test_cgroup_v1(machine: Machine) -> None:
    machine.v1("/a/b")
    machine.v1_group("/a/b", NO_LIMIT_V1, used=GIB)
    machine.v1_group("/a", 10 * GIB, used=4 * GIB, inactive=GIB)
    machine.v1_group("", NO_LIMIT_V1)
    budget = machine.budget()
    assert (budget.binding.name, budget.available_bytes) == ("cgroup v1", 7 * GIB)
    assert len(budget.limits) == 2


@pytest.mark.parametrize("path", ["/docker/abc", "/", "/docker/of-the-host/but-not-here", "/../.."])
def test_inside_a_container_the_mount_is_our_own_group(machine: Machine, path: str) -> None:
    machine.v2(path, "31 23 0:28 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup2 rw")
    machine.v2_group("", 6 * GIB, used=GIB)
    assert machine.budget().available_bytes == 5 * GIB


def test_hybrid_v1_and_v2_and_a_mount_point_with_a_space(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/m\n1:name=systemd:/\n0::/u\n")
    machine.write(
        "proc/self/mountinfo", f"{V1}\n32 23 0:29 / /sys/fs/my\\040groups rw - cgroup2 cgroup2 rw\n"
    )
    machine.v1_group("/m", 9 * GIB)
    machine.write("sys/fs/my groups/u/memory.max", 7 * GIB)
    assert [(limit.name, limit.limit_bytes) for limit in machine.budget().limits[:2]] == [
        ("cgroup v2", 7 * GIB),
        ("cgroup v1", 9 * GIB),
    ]


def test_a_charge_above_the_limit_leaves_nothing(machine: Machine) -> None:
    machine.v2("/job")
    machine.v2_group("/job", GIB, used=2 * GIB)
    assert machine.budget().available_bytes == 0


@pytest.mark.parametrize(
    ("environ", "gib"),
    [
        ({"SLURM_MEM_PER_NODE": "20480"}, 20),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "8"}, 16),
        ({"SLURM_MEM_PER_GPU": "10240", "SLURM_GPUS_ON_NODE": "2"}, 20),
        ({"SLURM_MEM_PER_NODE": "0"}, 48),
        ({"SLURM_MEM_PER_NODE": "nonsense"}, 48),
    ],
)
def test_slurm(machine: Machine, environ: dict[str, str], gib: int) -> None:
    budget = machine.budget(**environ)
    assert budget.available_bytes == gib * GIB
    assert budget.binding.name == ("machine" if gib == 48 else "Slurm")


def test_slurm_charges_the_processes_of_the_job(machine: Machine) -> None:
    pages = GIB // os.sysconf("SC_PAGE_SIZE")
    for process, job in (("101", "7"), ("102", "7"), ("103", "77")):
        machine.write(f"proc/{process}/environ", f"A=b\0SLURM_JOB_ID={job}\0")
        machine.write(f"proc/{process}/statm", f"{3 * pages} {pages} 1 1 0 1 0")
    assert machine.budget(SLURM_MEM_PER_NODE="10240", SLURM_JOB_ID="7").available_bytes == 8 * GIB


def test_process_limits(machine: Machine) -> None:
    machine.write(
        "proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max data size             unlimited            unlimited            bytes     \n"
        f"Max address space         {4 * GIB}           unlimited            bytes     \n",
    )
    binding = machine.budget().binding
    assert (binding.name, binding.available_bytes, binding.per_process) == ("RLIMIT_AS", 4 * GIB, True)


def test_limits_that_change_while_running(machine: Machine) -> None:
    machine.v2("/job")
    machine.v2_group("/job", 16 * GIB, used=GIB)
    assert machine.budget().available_bytes == 15 * GIB
    machine.v2_group("/job", 16 * GIB, used=9 * GIB)  # somebody else in the group grew
    assert machine.budget().available_bytes == 7 * GIB
    machine.v2_group("/job", 4 * GIB, used=GIB)  # the administrator lowered it
    assert machine.budget().available_bytes == 3 * GIB
    Machine(machine.root, available=2 * GIB)  # other users took the machine
    assert machine.budget().binding.name == "machine"
    assert machine.budget().available_bytes == 2 * GIB


def test_this_machine_and_how_long_it_takes() -> None:
    start = time.process_time()
    for _ in range(10):
        budget = read_budget(environ={})
    assert (time.process_time() - start) / 10 < 0.02
    assert 0 < budget.available_bytes <= budget.binding.limit_bytes


def test_without_proc(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="--memory"):
        read_budget(root=tmp_path, environ={})
    assert read_budget(root=tmp_path, environ={}, given_bytes=GIB).available_bytes == GIB


@pytest.mark.parametrize(
    ("text", "value"),
    [("12G", 12 * GIB), ("1.5 GiB", 3 * GIB // 2), ("800M", 800 * 2**20), ("4096", 4096), ("2kb", 2048)],
)
def test_amounts(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "12X", "-1G", "G", "0", "many"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(BadInput, match="not an amount"):
        parse_bytes(text)
