"""The large scenarios: builds that die without fewbits, and end with it.

They are smaller than the figures that docs/guide/building-from-source.md gives; these come from the same
tests with FEWBITS_FULL_SCENARIOS=1 and FEWBITS_QUIET_MACHINE=1, which also asserts times and pauses:

    FEWBITS_FULL_SCENARIOS=1 FEWBITS_QUIET_MACHINE=1 pytest -m slow tests/fewjobs/test_scenarios.py -s
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fewjobs.replay import items_of, lower_bound, plan
from fewjobs.sample import descendants
from tests.fewjobs.conftest import FULL, QUIET, Workshop, full, write_ninja, write_unit
from tests.fewjobs.test_runner import descendants_of

pytestmark = pytest.mark.slow
SIZES = (80, 100, 120, 150, 180, 200, 240, 280, 320, 400, 480, 560, 650, 750)
COMPILERS = {"cc1plus", "cc1", "cicc", "ptxas", "cudafe++"}


class Box(threading.Thread):
    """A stand-in for the kernel: kills the largest compiler below a process when the sum passes the limit."""

    def __init__(self, root: int, limit_bytes: float) -> None:
        super().__init__(daemon=True)
        self.root, self.limit_bytes = root, limit_bytes
        self.peak_bytes, self.kills, self.done = 0.0, 0, False

    def run(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while not self.done:
            found = []
            for pid in descendants(self.root):
                with contextlib.suppress(OSError, IndexError):
                    if Path(f"/proc/{pid}/comm").read_text().strip() in COMPILERS:
                        found.append((int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page, pid))
            total = sum(size for size, _ in found)
            self.peak_bytes = max(self.peak_bytes, total)
            if total > self.limit_bytes:
                with contextlib.suppress(OSError):
                    os.kill(max(found)[1], signal.SIGKILL)
                self.kills += 1
            time.sleep(0.05)


def boxed(process: subprocess.Popen[str], limit_bytes: float) -> tuple[int, Box, float]:
    box = Box(process.pid, limit_bytes)
    begun = time.monotonic()
    box.start()
    process.communicate(timeout=170)
    box.done = True
    box.join()
    return process.returncode, box, time.monotonic() - begun


def popen(workshop: Workshop, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=workshop.folder,
        env=workshop.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def clean(workshop: Workshop) -> None:
    for file in [*workshop.folder.glob("*.o"), *workshop.folder.glob(".ninja*")]:
        file.unlink()
    shutil.rmtree(workshop.root / "cache", ignore_errors=True)


def objects(workshop: Workshop) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(workshop.folder.glob("*.o"))}


def scenario(
    workshop: Workshop, ninja: str, sizes: Sequence[int], box_bytes: int, budget_bytes: int
) -> dict[str, Any]:
    """Dies without; with fewbits it ends, cold and warm, within the box, with the same objects."""
    # In the order of their sizes ninja's -j6 hides the large ones until the small ones have gone.
    order = random.Random(5).sample(list(enumerate(sizes)), len(sizes))
    write_ninja(workshop, [write_unit(workshop.folder / f"u{i}.cpp", s, f"t{i}") for i, s in order])
    code, box, _ = boxed(popen(workshop, ninja, "-j6"), box_bytes)
    assert code != 0
    assert box.kills > 0
    clean(workshop)
    _, _, one = boxed(popen(workshop, ninja, "-j1" if FULL else "-j2"), 1e12)
    plain = objects(workshop)
    figures: dict[str, Any] = {"j1": one}
    for name in ("cold", "warm"):
        clean(workshop)
        code, box, seconds = boxed(workshop.start(ninja, "-j6", memory_bytes=budget_bytes), box_bytes)
        found = workshop.last_profile()
        assert code == 0
        assert objects(workshop) == plain
        assert (box.kills, found["counts"].get("killed by the kernel", 0)) == (0, 0)
        assert box.peak_bytes <= box_bytes
        figures[name] = {"s": seconds, "peak": box.peak_bytes, "counts": found["counts"]}
    items = items_of(found)
    figures["bound"] = lower_bound(items, budget_bytes=budget_bytes, slots=found["slots"])
    figures["plan"] = plan(items, budget_bytes=budget_bytes, slots=found["slots"]).seconds
    sys.stderr.write(f"\n{figures}\n")
    return figures


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_fourteen_units_in_a_box(workshop: Workshop, ninja: str) -> None:
    if not FULL:
        scenario(workshop, ninja, [int(0.36 * s) for s in SIZES], 400_000_000, 340_000_000)
        return
    figures = scenario(workshop, ninja, SIZES, 1_000_000_000, 1_000_000_000)
    if QUIET:
        assert figures["warm"]["counts"].get("paused", 0) == 0
        assert figures["cold"]["s"] <= 0.75 * figures["j1"]
        assert figures["warm"]["s"] <= 1.15 * figures["bound"]


@full
@pytest.mark.timeout(600)
def test_eighty_units_in_a_box(workshop: Workshop, ninja: str) -> None:
    sizes = [int(40 + 260 * (i / 79) ** 2) for i in range(80)]
    figures = scenario(workshop, ninja, sizes, 400_000_000, 400_000_000)
    if QUIET:
        assert figures["cold"]["s"] <= 0.75 * figures["j1"]


@contextlib.contextmanager
def cgroup(limit_bytes: int) -> Iterator[Path]:
    """A memory cgroup of our own, where one can be made."""
    for base, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(base, f"fewbits-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        if not (group / file).exists():
            group.rmdir()
            continue
        (group / file).write_text(str(limit_bytes))
        try:
            yield group
        finally:
            for _ in range(50):
                try:
                    group.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)
        return
    pytest.skip("needs a memory cgroup that can be made here")


@pytest.mark.timeout(600)
def test_in_a_real_cgroup(workshop: Workshop, ninja: str) -> None:
    sizes = (100, 150, 200, 250, 300, 350) if FULL else (60, 90, 120, 150, 180, 210)
    write_ninja(workshop, [write_unit(workshop.folder / f"u{s}.cpp", s, f"t{s}") for s in sizes])
    with cgroup(450_000_000 if FULL else 290_000_000) as group:
        enter = f"echo $$ > {group}/cgroup.procs; exec "
        code, _, _ = boxed(popen(workshop, "sh", "-c", f"{enter}{ninja} -j6"), 1e12)
        assert code != 0
        clean(workshop)
        command = shlex.join(workshop.command(ninja, "-j6", memory_bytes=None))
        done = subprocess.run(
            ["sh", "-c", enter + command],
            cwd=workshop.folder,
            env=workshop.env,
            capture_output=True,
            text=True,
        )
        found = workshop.last_profile()
        sys.stderr.write(
            f"\n{found['counts']} {found['seconds']} s, peak {found['peak_bytes'] / 1e6:.0f} MB\n"
        )
        assert done.returncode == 0, done.stderr
        assert found["facts"]["binding"].startswith("cgroup")
        assert found["counts"].get("killed by the kernel", 0) == 0 or not QUIET
        assert len(objects(workshop)) == len(sizes)


CMAKE = """cmake_minimum_required(VERSION 3.16)
project(heavy CXX)
add_library(heavy STATIC a.cpp b.cpp c.cpp)
"""
SETUP = """from setuptools import Extension, setup
heavy = Extension("heavy", ["m.c", "a.cpp", "b.cpp"], extra_compile_args=["-O0"])
setup(name="heavy", version="1", ext_modules=[heavy])
"""
MODULE = """#include <Python.h>
static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "heavy", 0, -1, 0};
PyMODINIT_FUNC PyInit_heavy(void) { return PyModule_Create(&def); }
"""


def three_units(workshop: Workshop) -> None:
    for name, size in (("a", 80), ("b", 130), ("c", 105)):
        write_unit(workshop.folder / f"{name}.cpp", size, f"t{name}")


@pytest.mark.parametrize("generator", ["Ninja", pytest.param("Unix Makefiles", marks=pytest.mark.nightly)])
def test_cmake(workshop: Workshop, ninja: str, generator: str) -> None:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    if cmake is None:
        pytest.skip("needs cmake")
    three_units(workshop)
    (workshop.folder / "CMakeLists.txt").write_text(CMAKE)
    make = f"-DCMAKE_MAKE_PROGRAM={ninja}" if generator == "Ninja" else ""
    line = f"{cmake} -G '{generator}' {make} -S . -B out >/dev/null && {cmake} --build out -j 6"
    assert workshop.plain("sh", "-c", line.replace("out", "plain")).returncode == 0
    done = workshop.build("sh", "-c", line, memory_bytes=180_000_000, worth_keeping_s=0)
    assert done.code == 0, done.err
    for name in "abc":
        path = f"CMakeFiles/heavy.dir/{name}.cpp.o"
        assert (workshop.folder / "out" / path).read_bytes() == (
            workshop.folder / "plain" / path
        ).read_bytes()
    units = [s["unit"] for s in done.profile["stages"]]
    assert all(any(u.endswith(f"{name}.cpp") for u in units) for name in "abc")
    shutil.rmtree(workshop.folder / "out")  # a folder that was made by pip, say
    again = workshop.build("sh", "-c", line, memory_bytes=180_000_000)
    assert again.profile["counts"]["kept result"] >= 3


def test_make(workshop: Workshop) -> None:
    three_units(workshop)
    (workshop.folder / "Makefile").write_text("all: a.o b.o c.o\n%.o: %.cpp\n\tg++ -O0 -c $< -o $@\n")
    assert workshop.plain("make", "-j3").returncode == 0
    plain = objects(workshop)
    clean(workshop)
    done = workshop.build("make", "-j3", memory_bytes=180_000_000)
    assert done.code == 0, done.err
    assert objects(workshop) == plain


def test_pip_wheel(workshop: Workshop) -> None:
    if subprocess.run([sys.executable, "-c", "import setuptools, pip"], check=False).returncode:
        pytest.skip("needs setuptools and pip")
    three_units(workshop)
    (workshop.folder / "setup.py").write_text(SETUP)
    (workshop.folder / "m.c").write_text(MODULE)
    pip = (
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-q",
        "-w",
        "wheels",
        ".",
    )
    done = workshop.build(*pip, memory_bytes=400_000_000, worth_keeping_s=0)
    assert done.code == 0, done.err
    assert len(list((workshop.folder / "wheels").glob("heavy-1-*.whl"))) == 1
    assert {"a.cpp", "b.cpp", "m.c"} <= {s["unit"] for s in done.profile["stages"]}
    shutil.rmtree(workshop.folder / "build")
    assert workshop.build(*pip, memory_bytes=400_000_000).profile["counts"]["kept result"] == 3


@full  # test_front_ends.py has one without torch's own headers, which take half a minute
def test_torch_extension(workshop: Workshop, ninja: str) -> None:
    pytest.importorskip("torch")
    (workshop.folder / "m.cpp").write_text(
        "#include <torch/extension.h>\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}\n"
    )
    three_units(workshop)
    code = (
        "from torch.utils.cpp_extension import load; load('heavy', ['m.cpp', 'a.cpp'], extra_cflags=['-O0'])"
    )
    env = {"TORCH_EXTENSIONS_DIR": str(workshop.home / "ext"), "PATH": f"{Path(ninja).parent}:/usr/bin:/bin"}
    done = workshop.build(sys.executable, "-c", code, env=env, memory_bytes=1_500_000_000)
    assert done.code == 0, done.err
    assert {"m.cpp", "a.cpp"} <= {Path(s["unit"]).name for s in done.profile["stages"]}


@pytest.mark.nightly
def test_hibernation_every_half_second(workshop: Workshop) -> None:
    if workshop.native.pager is None:
        pytest.skip(workshop.native.reason)
    unit = write_unit(workshop.folder / "a.cpp", 180 if FULL else 85)
    optimised = "template<int N> int f(int x){return f<N-1>(x)*N+x;} template<> int f<0>(int x){return x;}\n"
    (workshop.folder / "b.cpp").write_text(
        optimised
        + "int g(int x){return "
        + "+".join(f"f<{n}>(x)" for n in range(60, 640 if FULL else 360, 60))
        + ";}\n"
    )
    env = {**workshop.env, "LD_PRELOAD": str(workshop.native.pager), "FEWBITS_PAGER": str(workshop.home)}
    pageouts = 0
    for name, flags in ((unit.name, "-O0"), ("b.cpp", "-O2")):
        workshop.plain("g++", flags, "-c", name, "-o", "plain.o")
        for _ in range(10):
            process = subprocess.Popen(["g++", flags, "-c", name, "-o", "o.o"], cwd=workshop.folder, env=env)
            while process.poll() is None:
                time.sleep(random.uniform(0.1, 0.3) if FULL else random.uniform(0.03, 0.15))
                for pid in descendants(process.pid):
                    with contextlib.suppress(OSError):
                        if Path(f"/proc/{pid}/comm").read_text().strip() == "cc1plus":
                            os.kill(pid, signal.SIGURG)
                            pageouts += 1
            assert process.returncode == 0
            assert (workshop.folder / "o.o").read_bytes() == (workshop.folder / "plain.o").read_bytes()
    assert pageouts >= 20


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_killed_at_thirty_moments(
    workshop: Workshop, ninja: str, record_property: Callable[[str, object], None]
) -> None:
    """At any moment of what is left to build; each fifth begins with an empty cache.

    How long a build takes is measured again and again: other work on the machine comes and goes.
    """
    units = [write_unit(workshop.folder / f"u{i}.cpp", 75 + i % 7, f"t{i}") for i in range(8)]
    write_ninja(workshop, units)
    options: dict[str, Any] = {"memory_bytes": 400_000_000, "worth_keeping_s": 0}
    begun = time.monotonic()
    assert workshop.build(ninja, "-j3", **options).code == 0
    whole_s, mark = time.monotonic() - begun, f"MARK={workshop.home.parent.name}"
    kills, too_late, midway = 0, 0, 0
    while kills < 30:
        stored = kept_in(workshop)
        if stored == len(units) or kills % 5 == 0:
            shutil.rmtree(workshop.root / "cache", ignore_errors=True)
            stored = 0
        if kills % 2 or not stored:  # as if the build folder was a temporary one
            clean_but_keep(workshop)
        begun = time.monotonic()
        process = workshop.start(ninja, "-j3", env=dict([mark.split("=")]), **options)
        time.sleep(random.random() * whole_s * (1 - stored / len(units)))
        if kills % 3 == 2:  # compilers as well, by somebody else
            kill_compilers(process.pid)
            time.sleep(0.1)
        process.kill()
        ended, took_s = process.wait() != -signal.SIGKILL, time.monotonic() - begun
        if more := kept_in(workshop) - stored:
            whole_s = (whole_s + took_s * len(units) / more) / 2
        if ended:
            too_late += 1
            assert too_late < 60
            continue
        kills += 1
        deadline = time.monotonic() + 60
        while descendants_of(mark) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert descendants_of(mark) == []
        midway += 0 < kept_in(workshop) < len(units)
    clean_but_keep(workshop)
    stored = kept_in(workshop)
    done = workshop.build(ninja, "-j3", **options)
    assert done.code == 0, done.err
    compiled, kept = len(done.profile["stages"]), done.profile["counts"].get("kept result", 0)
    record_property("kills", kills)
    record_property("of them with a part of the objects stored", midway)
    record_property("at the end", f"{stored} of {len(units)} stored: {kept} kept, {compiled} compiled")
    assert (compiled, kept) == (len(units) - stored, stored)
    assert midway >= 3  # or nothing was shown
    for unit in units if FULL else random.sample(units, 4):
        workshop.plain("g++", "-O0", "-c", unit.name, "-o", "plain.o")
        made = workshop.folder / f"{unit.stem}.o"
        assert made.read_bytes() == (workshop.folder / "plain.o").read_bytes()


def kept_in(workshop: Workshop) -> int:
    return len(list((workshop.root / "cache/entries").glob("*/*.json")))


def kill_compilers(root: int) -> None:
    for pid in descendants(root):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() in COMPILERS:
                os.kill(pid, signal.SIGKILL)


def clean_but_keep(workshop: Workshop) -> None:
    for file in [*workshop.folder.glob("*.o"), *workshop.folder.glob(".ninja*")]:
        file.unlink()


@pytest.mark.nightly
def test_overhead_of_three_hundred_tiny_units(workshop: Workshop, ninja: str) -> None:
    units = []
    for i in range(300):
        units.append(workshop.folder / f"u{i}.cpp")
        units[-1].write_text(f"#include <cstddef>\nint f{i}(){{return {i};}}\n")
    write_ninja(workshop, units)
    seconds = []
    for _ in range(2 if FULL else 1):
        begun = time.monotonic()
        assert workshop.plain(ninja, "-j2").returncode == 0
        seconds.append(time.monotonic() - begun)
        clean(workshop)
    done = workshop.build(ninja, "-j2", memory_bytes=2_000_000_000)
    assert done.code == 0
    each = (done.profile["seconds"] - min(seconds)) / 300 * 2  # two at a time
    controller = done.profile["controller"]
    share = controller["cpu_s"] / done.profile["seconds"]
    sys.stderr.write(
        f"\nplain {seconds}, ours {done.profile['seconds']}, {1000 * each:.1f} ms each, "
        f"{controller}, {share:.1%}\n"
    )
    assert each < 0.008 or not QUIET
    assert controller["peak_rss_bytes"] < 60e6
