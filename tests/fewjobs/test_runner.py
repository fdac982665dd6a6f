"""Whole builds of small units: what a build tool sees, what is left behind, who is stopped."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fewjobs.sample import descendants
from fewjobs.stage import LARGEST_SEEN
from tests.fewjobs.conftest import ROOT, Workshop, write_ninja

GROWING = """#!/usr/bin/env python3
import sys, time
held = []
while True:
    held.append(bytearray({step}))
    time.sleep({pause})
"""


def descendants_of(marker: str) -> list[str]:
    """Command lines of processes whose environment holds a marker."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_importing_needs_nothing() -> None:
    code = "import sys, fewjobs.runner, fewjobs.report as _; "
    code += "print([m for m in ('torch', 'numpy', 'rich', 'psutil') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("code", [0, 1, 3, 42])
def test_exit_codes_are_the_commands(workshop: Workshop, code: int) -> None:
    assert workshop.build("sh", "-c", f"exit {code}").code == code


def test_output_and_codes_of_compilers_are_unchanged(workshop: Workshop) -> None:
    (workshop.folder / "bad.cpp").write_text("int f() { return x; }\n")
    (workshop.folder / "warns.cpp").write_text("int f() { int unused; return 1; }\n")
    for command in ("g++ -c bad.cpp -o bad.o", "g++ -Wall -c warns.cpp -o w.o", "g++ -c missing.cpp", "g++"):
        plain, ours = workshop.plain("sh", "-c", command), workshop.build("sh", "-c", command)
        assert (ours.code, ours.out, ours.err) == (plain.returncode, plain.stdout, plain.stderr)


def test_standard_input_and_output_pass_through(workshop: Workshop) -> None:
    command = "echo 'int f(){return 3;}' | gcc -x c -S - -o - | grep -c '\\.globl'"
    assert workshop.build("sh", "-c", command).out == "1\n"


def test_names_with_spaces_and_quotes(workshop: Workshop) -> None:
    odd = workshop.folder / "a 'b\" c"
    odd.mkdir()
    (odd / "o d'd.cpp").write_text("int f(){return 1;}\n")
    (odd / "r.rsp").write_text('-c "o d\'d.cpp" -o "out put.o"\n')
    name = shlex.quote(str(odd))
    done = workshop.build("sh", "-c", f'cd {name} && g++ @r.rsp && g++ -c "o d\'d.cpp" -o 2.o')
    assert (done.code, done.err) == (0, "")
    assert (odd / "out put.o").read_bytes() == (odd / "2.o").read_bytes()
    assert [s["unit"] for s in done.profile["stages"]] == ["o d'd.cpp"] * 2


def test_long_lists_of_arguments_and_odd_ones(workshop: Workshop) -> None:
    # Short lists come with the launcher's question, long ones are read from /proc.
    (workshop.folder / "a.cpp").write_text("const char *f(){return TEXT;}\n")
    for count in (1, 6000):
        words = [
            "g++",
            *(f"-DNAME_{i}={i}" for i in range(count)),
            '-DTEXT="\udcff \t\'x"',
            "-I",
            "",
            "-c",
            "a.cpp",
        ]
        assert workshop.plain(*words, "-o", "plain.o").returncode == 0
        done = workshop.build(*words, "-o", "a.o")
        assert (done.code, done.err, [s["unit"] for s in done.profile["stages"]]) == (0, "", ["a.cpp"])
        assert (workshop.folder / "a.o").read_bytes() == (workshop.folder / "plain.o").read_bytes()


@pytest.mark.parametrize("compiled", [True, False])
def test_a_launcher_in_front_of_a_name(workshop: Workshop, compiled: bool) -> None:
    (workshop.folder / "a.cpp").write_text("int f(){return 1;}\n")
    launcher = f"{workshop.root}/tools/*/bin/fewbits-launch"
    done = workshop.build("sh", "-c", f"{launcher} g++ -c a.cpp -o a.o", compile_native=compiled)
    assert (done.code, [s["unit"] for s in done.profile["stages"]]) == (0, ["a.cpp"])
    missing = workshop.build("sh", "-c", f"{launcher} no-such-compiler -c a.cpp", compile_native=compiled)
    assert missing.code == 127
    assert "cannot run no-such-compiler" in missing.err


@pytest.mark.parametrize("compiled", [True, False])
def test_each_tool_has_a_hard_cap_and_is_first_in_line_for_the_kernel(
    workshop: Workshop, compiled: bool
) -> None:
    said = "cat /proc/self/oom_score_adj; grep 'Max data size' /proc/self/limits; ps -o pgid= $$"
    fake = script(workshop.home / "fake/x-clang++", f"#!/bin/sh\n{said}; echo $$\n")
    env = {"PATH": f"{fake.parent}:/usr/bin:/bin"}
    line = "ulimit -S -d unlimited; x-clang++ -c a.cpp; ulimit -S -d 300000; x-clang++ -c a.cpp"
    done = workshop.build("sh", "-c", line, env=env, compile_native=compiled)
    score, limit, group, pid, _, second, *_ = done.out.splitlines()
    largest = 2 * LARGEST_SEEN["c++"]
    assert (score, limit.split()[3], group.strip()) == ("600", str(2 * largest), pid)
    assert int(second.split()[3]) == 300_000 * 1024  # the user's own is lower, and stays


@pytest.mark.slow
def test_who_waits_takes_little(workshop: Workshop, ninja: str) -> None:
    units = [workshop.unit(f"u{i}.cpp", 170) for i in range(2)]
    write_ninja(workshop, units)
    process = workshop.start(ninja, "-j2", memory_bytes=220_000_000)
    held = set()
    while process.poll() is None:
        for pid in descendants(process.pid):
            with contextlib.suppress(OSError, IndexError):
                if "/tools/" in str(Path(f"/proc/{pid}/exe").readlink()):
                    status = Path(f"/proc/{pid}/status").read_text()
                    held.add(int(status.partition("VmHWM:")[2].split()[0]))
        time.sleep(0.05)
    assert held
    assert max(held) < 400  # KiB; here 64, and one in Python takes 10 MB


def test_a_setup_script(workshop: Workshop) -> None:
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("needs setuptools")
    (workshop.folder / "m.c").write_text("int f(void) { return 1; }\n")
    workshop.unit("a.cpp", 60)
    (workshop.folder / "setup.py").write_text(
        "from setuptools import Extension, setup\n"
        "heavy = Extension('heavy', ['m.c', 'a.cpp'], extra_compile_args=['-O0'])\n"
        "setup(name='heavy', version='1', ext_modules=[heavy])\n"
    )
    command = (sys.executable, "setup.py", "-q", "build_ext", "--build-lib")
    assert workshop.plain(*command, "plain", "--build-temp", "t").returncode == 0
    shutil.rmtree(workshop.folder / "t")
    done = workshop.build(*command, "ours", "--build-temp", "t")
    assert done.code == 0, done.err
    assert {"m.c", "a.cpp"} <= {s["unit"] for s in done.profile["stages"]}
    plain, ours = (next((workshop.folder / name).glob("heavy*.so")) for name in ("plain", "ours"))
    assert ours.read_bytes() == plain.read_bytes()


def test_listing_and_preprocessing_are_not_held_up(workshop: Workshop) -> None:
    (workshop.folder / "a.cpp").write_text("#include <cstddef>\nint f(){return 1;}\n")
    command = "g++ -M a.cpp > a.d && g++ -MM a.cpp >> a.d && g++ -E a.cpp > a.ii && g++ --version"
    done = workshop.build("sh", "-c", command)
    assert done.code == 0
    assert done.profile["stages"] == []
    assert "a.o: a.cpp" in (workshop.folder / "a.d").read_text()


def test_a_cleaned_environment_is_caught_too(workshop: Workshop) -> None:
    (workshop.folder / "a.cpp").write_text("int f(){return 1;}\n")
    done = workshop.build("sh", "-c", 'compiler=$(command -v g++); env -i "$compiler" -c a.cpp -o a.o')
    assert (done.code, len(done.profile["stages"])) == (0, 1)


def test_outside_of_a_build_the_launchers_are_the_tools(workshop: Workshop) -> None:
    (workshop.folder / "a.cpp").write_text("int f(){return 1;}\n")
    workshop.build("sh", "-c", "command -v g++ > where")
    found = (workshop.folder / "where").read_text().strip()
    assert "/tools/" in found
    assert (
        subprocess.run([found, "-c", "a.cpp", "-o", "b.o"], cwd=workshop.folder, check=False).returncode == 0
    )


def test_a_build_within_a_build(workshop: Workshop) -> None:
    (workshop.folder / "a.cpp").write_text("int f(){return 1;}\n")
    inner = shlex.join(workshop.command("g++", "-c", "a.cpp", "-o", "a.o"))
    done = workshop.build("sh", "-c", inner)
    assert (done.code, len(done.profile["stages"])) == (0, 1)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("how", ['"$@"', 'exec "$@"', 'sh -c \'"$@"; true\' sh "$@"'])
def test_a_compiler_that_starts_compilers_counts_once(workshop: Workshop, how: str, compiled: bool) -> None:
    # The inner one asks before the controller has heard of the outer one's process: with one slot, an inner
    # one that was taken for another stage would wait for its own parent for ever.
    (workshop.folder / "a.cpp").write_text("int f(){return 1;}\n")
    wrapper = script(workshop.home / "bin/ccache", f"#!/bin/sh\n{how}\n")
    line = f"{workshop.root}/tools/*/bin/fewbits-launch {wrapper} g++ -c a.cpp -o a.o"
    done = workshop.build("sh", "-c", line, jobs=1, compile_native=compiled)
    assert (done.code, [s["stage"] for s in done.profile["stages"]]) == (0, ["c++"])
    assert (workshop.folder / "a.o").exists()


def test_compilers_wait_until_they_fit(workshop: Workshop, ninja: str) -> None:
    units = [workshop.unit(f"u{size}.cpp", size) for size in (60, 70, 80, 90, 100)]
    write_ninja(workshop, units)
    workshop.build(ninja, "-j5", memory_bytes=400_000_000)  # to learn
    objects = {unit.stem: (workshop.folder / f"{unit.stem}.o").read_bytes() for unit in units}
    for unit in units:
        (workshop.folder / f"{unit.stem}.o").unlink()
    done = workshop.build(ninja, "-j5", memory_bytes=190_000_000, cache=False, jobs=4)
    assert done.code == 0, done.err
    # All at once would be 340 MB; the bound has room for a machine on which samples come late.
    assert done.profile["peak_bytes"] <= 220_000_000
    assert done.profile["counts"].get("killed by the kernel", 0) == 0
    assert objects == {unit.stem: (workshop.folder / f"{unit.stem}.o").read_bytes() for unit in units}


@pytest.mark.slow
def test_unknown_units_are_paused_rather_than_killed(workshop: Workshop, ninja: str) -> None:
    units = [workshop.unit(f"u{i}.cpp", 110) for i in range(4)]
    write_ninja(workshop, units)
    done = workshop.build(ninja, "-j4", memory_bytes=200_000_000, jobs=4)
    assert done.code == 0, done.err
    # Four grow by 30 MB between two samples; the scenarios hold a larger build to its budget exactly.
    assert done.profile["peak_bytes"] <= 0.75 * sum(s["peak_bytes"] for s in done.profile["stages"])
    assert set(done.profile["counts"]) & {"paused", "requeued", "paged"}


@pytest.mark.slow
def test_a_unit_larger_than_the_budget_goes_through_the_disk(workshop: Workshop) -> None:
    workshop.unit("big.cpp", 150)
    workshop.plain("g++", "-O0", "-c", "big.cpp", "-o", "plain.o")
    done = workshop.build("g++", "-O0", "-c", "big.cpp", "-o", "big.o", memory_bytes=100_000_000)
    assert done.code == 0, done.err
    assert done.profile["counts"]["paged"] >= 1
    assert done.profile["peak_bytes"] <= 135_000_000
    assert (workshop.folder / "big.o").read_bytes() == (workshop.folder / "plain.o").read_bytes()


def test_without_the_pager_it_says_what_it_needs(workshop: Workshop) -> None:
    workshop.unit("big.cpp", 150)
    done = workshop.build("g++", "-O0", "-c", "big.cpp", "-o", "b.o", memory_bytes=100_000_000, pager=False)
    assert done.code == 1
    assert "needs more than the budget of 95.4 MiB (--memory) even alone" in done.err
    assert "give it at least" in done.err
    assert [v["kind"] for v in done.profile["verdicts"]] == ["too large"]


def test_a_runaway_is_stopped_and_the_others_finish(workshop: Workshop, ninja: str) -> None:
    fake = script(workshop.home / "fake/bad-c++", GROWING.format(step=4_000_000, pause=0.02))
    units = [workshop.unit(f"u{i}.cpp", 40) for i in range(4)]
    write_ninja(workshop, units)
    lines = (workshop.folder / "build.ninja").read_text()
    lines += f"rule bad\n  command = {fake.name} -c $in -o $out\nbuild bad.o: bad u0.cpp\n"
    (workshop.folder / "build.ninja").write_text(lines)
    # The launcher's folder holds what is on the PATH and looks like a compiler's name.
    env = {"PATH": f"{fake.parent}:/usr/bin:/bin"}
    fake.rename(fake.parent / "x-clang++")
    (workshop.folder / "build.ninja").write_text(lines.replace("bad-c++", "x-clang++"))
    done = workshop.build(ninja, "-j3", env=env, memory_bytes=900_000_000, stage_limit_bytes=150_000_000)
    assert done.code == 1
    assert sorted(p.name for p in workshop.folder.glob("u*.o")) == [f"u{i}.o" for i in range(4)]
    verdict = done.profile["verdicts"][0]
    assert verdict["kind"] == "runaway"
    assert verdict["rate"] > 5e6
    # In memory, not in seconds: on a busy machine it grows more slowly, too.
    assert verdict["grown_bytes"] < 150_000_000 + 5 * 150_000_000
    assert "was stopped as a runaway" in done.out + done.err


def test_a_kill_from_outside_is_retried_alone(workshop: Workshop) -> None:
    flag = workshop.home / "flag"
    text = f'#!/bin/sh\nif [ ! -e {flag} ]; then touch {flag}; kill -9 $$; fi\nexec /usr/bin/g++ "$@"\n'
    fake = script(workshop.home / "fake/g++", text)
    (workshop.folder / "a.cpp").write_text("int f(){return 1;}\n")
    done = workshop.build(
        "sh", "-c", "g++ -c a.cpp -o a.o", env={"PATH": f"{fake.parent}:/usr/bin:/bin"}, cache=False
    )
    assert done.code == 0, done.err
    assert done.profile["counts"]["killed by the kernel"] == 1
    assert done.profile["stages"][0]["attempts"] == 2


def test_a_driver_that_reports_a_kill_is_retried(workshop: Workshop) -> None:
    flag = workshop.home / "flag"
    said = "g++: fatal error: Killed signal terminated program cc1plus"
    text = f'#!/bin/sh\nif [ ! -e {flag} ]; then touch {flag}; echo "{said}" >&2; exit 1; fi\n'
    text += 'exec /usr/bin/g++ "$@"\n'
    fake = script(workshop.home / "fake/g++", text)
    (workshop.folder / "a.cpp").write_text("int f(){return 1;}\n")
    done = workshop.build("sh", "-c", "g++ -c a.cpp -o a.o", env={"PATH": f"{fake.parent}:/usr/bin:/bin"})
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(workshop: Workshop, ninja: str, number: int) -> None:
    units = [workshop.unit(f"u{i}.cpp", 250) for i in range(3)]
    write_ninja(workshop, units)
    marker = f"MARK={workshop.home.parent.name}"
    name, value = marker.split("=")
    process = workshop.start(ninja, "-j3", env={name: value}, memory_bytes=300_000_000, jobs=3)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any("cc1plus" in c for c in descendants_of(marker)):
        time.sleep(0.05)
    time.sleep(0.4)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert descendants_of(marker) == []
    assert list((workshop.root / "runs").iterdir()) == []
    assert [p.name for p in workshop.root.rglob("page-*")] == []


@pytest.mark.parametrize("compiled", [True, False])
def test_what_nohup_ignores_stays_ignored(workshop: Workshop, compiled: bool) -> None:
    """Without us a build under nohup outlives its terminal; with us the hang-up ended it."""
    text = '#!/bin/sh\ntouch started\nwhile [ ! -e go ]; do sleep 0.05; done\nexec /usr/bin/g++ "$@"\n'
    fake = script(workshop.home / "fake/g++", text)
    (workshop.folder / "a.cpp").write_text("int f(){return 1;}\n")
    command = workshop.command("sh", "-c", "g++ -c a.cpp -o a.o", compile_native=compiled)
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" HUP INT; exec "$@"', "sh", *command],
        cwd=workshop.folder,
        env={**workshop.env, "PATH": f"{fake.parent}:/usr/bin:/bin"},
        start_new_session=True,
    )
    wait_for(workshop.folder / "started")
    for number in (signal.SIGHUP, signal.SIGINT):
        os.killpg(process.pid, number)
    time.sleep(0.5)
    (workshop.folder / "go").touch()
    assert process.wait(60) == 0 and (workshop.folder / "a.o").exists()
    assert [stage["code"] for stage in workshop.last_profile()["stages"]] == [0]


def test_after_a_kill_of_everything_only_the_missing_is_compiled(workshop: Workshop) -> None:
    units = [workshop.unit(f"u{i}.cpp", 75) for i in range(4)]
    line = " && ".join(f"g++ -O0 -c {u.name} -o {u.stem}.o" for u in units)
    marker = f"MARK={workshop.home.parent.name}"
    env = dict([marker.split("=")])
    process = workshop.start("sh", "-c", line, env=env, worth_keeping_s=0)
    while not (workshop.folder / "u2.o").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while descendants_of(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    for file in workshop.folder.glob("*.o"):  # as pip does with its temporary folder
        file.unlink()
    done = workshop.build("sh", "-c", line, worth_keeping_s=0)
    assert done.code == 0, done.err
    assert done.profile["counts"]["kept result"] >= 2
    assert len(done.profile["stages"]) + done.profile["counts"]["kept result"] == 4


def test_kept_objects_know_their_headers(workshop: Workshop) -> None:
    header = workshop.folder / "h.h"
    header.write_text("#define N 1\n")
    unit = workshop.unit("a.cpp", 75)
    unit.write_text('#include "h.h"\nint n = N;\n' + unit.read_text())
    os.utime(header, (1, 1))
    os.utime(unit, (1, 1))
    command = ("g++", "-O0", "-MMD", "-MF", "a.d", "-c", "a.cpp", "-o", "a.o")
    assert workshop.build(*command, worth_keeping_s=0).profile["counts"] == {}
    first = (workshop.folder / "a.o").read_bytes()
    (workshop.folder / "a.o").unlink()
    (workshop.folder / "a.d").unlink()
    assert workshop.build(*command).profile["counts"] == {"kept result": 1}
    assert (workshop.folder / "a.o").read_bytes() == first
    assert "h.h" in (workshop.folder / "a.d").read_text()
    header.write_text("#define N 2\n")
    assert workshop.build(*command).profile["counts"] == {}
    assert (workshop.folder / "a.o").read_bytes() != first


def test_launchers_in_python_do_the_same(workshop: Workshop) -> None:
    (workshop.folder / "bad.cpp").write_text("int f() { return x; }\n")
    (workshop.folder / "a b.cpp").write_text("int f() { return 1; }\n")
    command = "g++ -c 'a b.cpp' -o a.o; echo $?; g++ -c bad.cpp; echo $?; g++ --version > v; echo $?; exit 5"
    plain = workshop.plain("sh", "-c", command)
    ours = workshop.build("sh", "-c", command, compile_native=False)
    assert (ours.code, ours.out, ours.err) == (5, plain.stdout, plain.stderr)
    assert len(ours.profile["stages"]) == 2
    big = workshop.unit("big.cpp", 150)
    done = workshop.build("g++", "-O0", "-c", big.name, memory_bytes=100_000_000, compile_native=False)
    assert done.code == 1
    assert "it cannot be paged to the disk here" in done.err
