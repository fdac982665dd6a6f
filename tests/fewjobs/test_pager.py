"""The pager: memory goes to the disk and comes back, and the program does not notice."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fewjobs.native import Native
from fewjobs.sample import Sampler, children, has_pager

HOG = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

int main(int c, char **v) { /* megabytes, seconds, whether to fork */
    long n = atol(v[1]) * 131072 / 2, cap = 1 << 16, blocks = 2000;
    unsigned long *a = malloc(cap * 8), x = 88172645463325252UL;
    char **small = malloc(blocks * sizeof *small);
    double end = now() + atof(v[2]);
    for (long i = 0; i < n; i++) { /* grows by mremap */
        if (i == cap) a = realloc(a, (cap *= 2) * 8);
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        a[i] = x;
    }
    size_t size = atol(v[1]) * 1048576 / 2 / blocks, whole = 8 << 20;
    for (long i = 0; i < blocks; i++) memset(small[i] = malloc(size), (int)i, size);
    char *zero = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(zero, 7, whole);
    size_t have = 4 << 20; /* neighbours that grow by mremap, over the other's place in the file */
    char *low = malloc(have), *high = malloc(have), *other = malloc(have);
    memset(low, 1, have), memset(high, 2, have), memset(other, 3, have);
    puts("ready");
    fflush(stdout);
    pid_t child = c > 3 ? (usleep(300000), fork()) : 1;
    long round = 0;
    for (; round < 4 || now() < end; round++) {
        for (long i = 0; i < n; i++) a[i] += 3;
        usleep(20000);
        if (round < 8) {
            size_t more = 262144, at = have + round * more;
            high = realloc(high, at + more), low = realloc(low, at + more);
            memset(high + at, 2, more), memset(low + at, 1, more);
        }
        if (round == 3) madvise(zero, whole, MADV_DONTNEED);
    }
    for (size_t i = 0; i < whole; i++)
        if (zero[i]) return 9;
    size_t grown = have + (round < 8 ? round : 8) * 262144;
    for (size_t i = 0; i < grown; i++)
        if (low[i] != 1 || high[i] != 2 || (i < have && other[i] != 3)) return 5;
    x = 88172645463325252UL;
    for (long i = 0; i < n; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        if (a[i] != x + 3 * (unsigned long)round) return 8;
    }
    for (long i = 0; i < blocks; i++)
        for (size_t k = 0; k < size; k++)
            if (small[i][k] != (char)i) return 7;
    int status = 0;
    if (child > 0 && c > 3) waitpid(child, &status, 0);
    return status ? 6 : 0;
}
"""


@pytest.fixture(scope="module")
def hog(native: Native, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if native.pager is None:
        pytest.skip(native.reason)
    folder = tmp_path_factory.mktemp("hog")
    (folder / "hog.c").write_text(HOG)
    subprocess.run(["gcc", "-O1", "-w", "-o", "ptxas", "hog.c"], cwd=folder, check=True)
    shutil.copy(folder / "ptxas", folder / "other")
    return folder


def start(hog: Path, native: Native, *args: str, name: str = "ptxas") -> subprocess.Popen[str]:
    env = {"LD_PRELOAD": str(native.pager), "FEWBITS_PAGER": str(hog), "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen([hog / name, *args], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def lowest_during(
    process: subprocess.Popen[str], sampler: Sampler, below: float, signals: list[int]
) -> float:
    """The least memory that is seen after these signals, which are sent again until it is below a bound.

    The program touches all of its memory when the pager is through, so a busy machine may hide a moment.
    """
    lowest = 1e12
    while lowest >= below and process.poll() is None:
        for number in signals:
            os.kill(process.pid, number)
        end = time.monotonic() + 0.25
        while (
            lowest >= below and time.monotonic() < end and (memory := sampler.memory(process.pid)) is not None
        ):
            lowest = min(lowest, memory.rss or lowest)
    return lowest


def test_memory_leaves_and_comes_back(hog: Path, native: Native) -> None:
    process, sampler = start(hog, native, "64", "3"), Sampler()
    assert has_pager(process.pid)
    before = sampler.memory(process.pid)
    lowest = lowest_during(process, sampler, 0.6 * before.rss, [signal.SIGURG])
    assert process.wait(60) == 0
    assert before.rss > 60e6
    assert lowest < before.rss * 0.6
    assert [p for p in hog.iterdir() if p.name.startswith("page-")] == []


def test_a_stopped_one_wakes_into_the_pager(hog: Path, native: Native) -> None:
    process, sampler = start(hog, native, "64", "3"), Sampler()
    lowest = lowest_during(process, sampler, 12e6, [signal.SIGSTOP, signal.SIGURG, signal.SIGCONT])
    assert lowest < 12e6
    assert process.wait(60) == 0


def test_a_fork_in_between_keeps_both_intact(hog: Path, native: Native) -> None:
    process = start(hog, native, "32", "1.2", "fork")
    for _ in range(20):
        os.kill(process.pid, signal.SIGURG)
        for child in children(process.pid):
            os.kill(child, signal.SIGURG)
        time.sleep(0.05)
    assert process.wait(60) == 0


def test_other_programs_are_left_alone(hog: Path, native: Native) -> None:
    process = start(hog, native, "8", "0.2", name="other")
    assert not has_pager(process.pid)
    os.kill(process.pid, signal.SIGURG)
    assert process.wait(60) == 0
