"""Units as large as Transformer Engine's (up to 4.3 GB one compiler) in a budget that holds one of them."""

from __future__ import annotations

import hashlib
import resource
import time
from collections.abc import Callable

import pytest

from fewjobs.budget import read_budget
from fewjobs.replay import items_of, lower_bound
from tests.fewjobs.conftest import QUIET, Workshop, write_unit

pytestmark = pytest.mark.nightly
# MB: cicc's 4.3 GB for fused_attn_fp8.cu, two that do not fit beside it, and small ones that do.
SIZES = (4300, 2200, 1500, 300, 250, 200)
BUDGET_BYTES = 5_000_000_000


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and by the processors of all processes that it started."""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - begun, used


@pytest.mark.timeout(3600)
def test_units_of_gigabytes_within_a_budget(
    workshop: Workshop, record_property: Callable[[str, object], None]
) -> None:
    """All objects of plain ``make -j1``, at most the budget at any moment, nobody killed; what it costs."""
    limit = read_budget().binding  # a container's too, which /proc/meminfo does not know
    if limit.available_bytes < BUDGET_BYTES + 2_000_000_000:
        free = f"{limit.available_bytes / 1e9:.1f} GB by {limit.where}"
        pytest.skip(f"needs 7 GB of free memory, and there are {free}")
    for i, size in enumerate(SIZES):
        write_unit(workshop.folder / f"u{i}.cpp", size, f"t{i}")
    names = " ".join(f"u{i}.o" for i in range(len(SIZES)))
    (workshop.folder / "Makefile").write_text(f"all: {names}\n%.o: %.cpp\n\tg++ -O0 -c $< -o $@\n")

    def plain() -> None:
        assert workshop.plain("make", "-j1").returncode == 0

    def objects() -> dict[str, str]:
        files = sorted(workshop.folder.glob("*.o"))
        found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        for file in files:
            file.unlink()
        return found

    one_s, one_cpu_s = timed(plain)
    want = objects()
    assert len(want) == len(SIZES)
    record_property("make -j1", f"{one_s:.0f} s, {one_cpu_s:.0f} s of processors")
    for name in ("first", "second"):  # without and with what the first one learned
        process = workshop.start("make", "-j4", memory_bytes=BUDGET_BYTES, worth_keeping_s=1e9)
        ours_s, ours_cpu_s = timed(lambda process=process: process.communicate(timeout=1700))
        found = workshop.last_profile()
        assert process.returncode == 0 and objects() == want
        assert found["counts"].get("killed by the kernel", 0) == 0
        assert found["peak_bytes"] <= BUDGET_BYTES
        bound = lower_bound(items_of(found), budget_bytes=BUDGET_BYTES, slots=found["slots"])
        told = f"{ours_s:.0f} s (no order is faster than {bound:.0f}), {ours_cpu_s:.0f} s of processors"
        record_property(
            f"{name} build", f"{told}, peak {found['peak_bytes'] / 1e9:.2f} GB, {found['counts']}"
        )
        record_property(f"{name} overhead", f"{ours_cpu_s / one_cpu_s - 1:+.1%} of processors' time")
        assert ours_cpu_s < 1.25 * one_cpu_s or not QUIET
