"""When a GPU had nothing to do while a trainer's steps ran, and what the host did meanwhile.

`recorded` runs something under torch's profiler, `begin_recording` begins it; `gaps_of` gives how long the
device was busy and idle, the longest pauses with the kernels around them and the host's calls within, and the
time of each kernel by name.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_QUIET = ("cudaLaunchKernel", "cuLaunchKernel", "aten::empty", "aten::view", "aten::detach")


class Gaps(NamedTuple):
    """Milliseconds of what was recorded.

    Attributes:
        busy: some kernel or copy ran.
        idle: none did, between the first and the last.
        longest: pauses (milliseconds, at, the kernel before, the kernel after, the host's longest calls).
        kernels: milliseconds of each kernel by name.
    """

    busy: float
    idle: float
    longest: list[tuple[float, float, str, str, str]]
    kernels: collections.Counter[str]


def begin_recording() -> Any:
    """torch's profiler, running from now on, the device idle before; its ``__exit__`` ends it."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    profiler = profile(activities=activities)
    profiler.__enter__()
    return profiler


def recorded(run: Callable[[], Any]) -> Any:
    """The profiler's events of a call, the device idle behind it."""
    profiler = begin_recording()
    run()
    return end_recording(profiler)


def end_recording(profiler: Any) -> Any:
    """What `begin_recording` began: its events, once the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    profiler.__exit__(None, None, None)
    return profiler.profiler.kineto_results.events()


def gaps_of(events: Any, least_ms: float = 0.05, count: int = 14) -> Gaps:
    """Pauses of at least ``least_ms``, the longest first; events as `recorded` gives them."""
    device, host = [], []
    for event in events:
        begin, length = event.start_ns() / 1e6, event.duration_ns() / 1e6
        on_device = event.device_type() == torch.autograd.DeviceType.CUDA
        if on_device:
            device.append((begin, begin + length, event.name()))
        elif not event.name().startswith(_QUIET):
            host.append((begin, begin + length, event.name()))
    device = [entry for entry in device if not _is_a_range(entry[2])]
    device.sort()
    kernels: collections.Counter[str] = collections.Counter()
    pauses, busy, end, before = [], 0.0, None, ""
    for begin, until, name in device:
        kernels[name[:60]] += until - begin
        if end is None or begin > end:
            if end is not None and begin - end >= least_ms:
                pauses.append((end, begin, before, name))
            busy += until - begin
            end, before = until, name
        elif until > end:
            busy += until - end
            end, before = until, name
    first, whole = (device[0][0], end - device[0][0]) if device else (0.0, 0.0)
    longest = sorted(pauses, key=lambda pause: pause[0] - pause[1])[:count]
    told = [
        (
            round(until - begin, 3),
            round(begin - first, 1),
            before[:48],
            after[:48],
            _during(host, begin, until),
        )
        for begin, until, before, after in longest
    ]
    return Gaps(round(busy, 2), round(whole - busy, 2), told, kernels)


def _is_a_range(name: str) -> bool:
    """A user's annotation that the profiler repeats on the device's line."""
    return name.startswith(("Optimizer.", "enumerate(", "ProfilerStep", "## "))


def _during(host: list[tuple[float, float, str]], begin: float, until: float) -> str:
    """The host's calls with the most time within a pause."""
    share: collections.Counter[str] = collections.Counter()
    for start, end, name in host:
        inside = min(end, until) - max(start, begin)
        if inside > 0:
            share[name[:44]] += inside
    return ", ".join(f"{name} {ms:.2f}" for name, ms in share.most_common(6))


def tell(title: str, gaps: Gaps, steps: int) -> None:
    """Print what was found, by step."""
    print(f"{title}: busy {gaps.busy / steps:.1f} ms a step, idle {gaps.idle / steps:.1f}", flush=True)
    for ms, at, before, after, during in gaps.longest:
        print(f"  {ms:7.3f} ms at {at:7.1f} | {before} -> {after} | {during}", flush=True)


def tell_difference(first: Gaps, second: Gaps, steps: tuple[int, int], count: int = 14) -> None:
    """Print the kernels whose time a step differs most between two recordings."""
    a, b = first.kernels, second.kernels
    rows = [(b[name] / steps[1] - a[name] / steps[0], name) for name in a.keys() | b.keys()]
    for ms, name in sorted(rows, key=lambda row: -abs(row[0]))[:count]:
        print(f"  {ms:+7.3f} ms a step  {name}", flush=True)
