"""How it is timed: one protocol for every variant of a case.

1. Each variant is first compared with float64; one that fails is not timed.
2. Warm-up: compilation, handles and caches stay out of the numbers.
3. The device works on a backlog: the host queues a whole batch behind a sleep, so launch cost is hidden as
   it is in training, and events on the device's own clock stand around each run.
4. Before each run a buffer larger than the L2 cache is read, so that operands come from memory. (Read, not
   written: lines that a write leaves behind would be written back during the run.)
5. Variants take turns, so that a change of the card's clocks falls on all of them.
6. The median stands for the variant; the 20 % and 80 % quantiles show the spread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fewbits.bench.problem import Case, Problem, Variant
from fewbits.device import pick
from fewbits.errors import Unsupported

_FLUSH_BYTES = 256 * 2**20
_CYCLES_PER_SECOND = 2e9  # about what an SM runs at; only the length of a sleep depends on it
_LONG_SLEEP_S, _LONGEST_SLEEP_S = 0.1, 2.0
_COPY_BYTES = 4 * 2**30
_SIDE = 8192  # of the products that stand for the peak rate


class Quantiles(NamedTuple):
    """Microseconds."""

    p20: float
    p50: float
    p80: float


class Timer(Protocol):
    """Times one variant some number of times."""

    def __call__(self, variant: Variant, repeats: int) -> list[float]:
        """Microseconds of each run."""


def device_to_time(name: str) -> torch.device:
    """The device of this name; "auto" is a GPU, for a CPU is only timed where it is asked for.

    Raises:
        Unsupported: there is no such device here.
    """
    device = pick(name)
    if device.type == "cpu" and name == "auto":
        raise Unsupported(
            "no GPU is here, and these sizes would take a CPU hours: run this on a machine with one, or try "
            "it out with --device cpu and small sizes (see the examples of --help)."
        )
    return device


def relative_error(out: Tensor, exact: Tensor) -> float:
    """``|out - exact| / |exact|`` in the Frobenius norm; infinite for a NaN or another shape.

    ``out`` and ``exact``: tensors of the same shape and of any floating dtype.
    """
    if out.shape != exact.shape:
        return math.inf
    exact = exact.double()
    error = float((out.double() - exact).norm() / exact.norm().clamp_min(1e-300))
    return error if math.isfinite(error) else math.inf


def worst_errors(problem: Problem) -> dict[str, float]:
    """The largest `relative_error` over the outputs of every variant."""
    exact = problem.exact()
    return {
        name: max(relative_error(out, want) for out, want in zip(prepare()(), exact, strict=True))
        for name, prepare in problem.variants.items()
    }


def measure(
    variants: Mapping[str, Variant],
    timer: Timer,
    *,
    rounds: int = 10,
    repeats: int = 10,
    refused: dict[str, str] | None = None,
) -> dict[str, Quantiles]:
    """``rounds * repeats`` runs of every variant, taking turns.

    ``refused`` gets the variants that cannot be timed, such as one that waits for the device within a run,
    and why; without it the first of them is an error.
    """
    times: dict[str, list[float]] = {}
    for name, variant in variants.items():
        variant()()  # compiles, where there is something to compile
        try:
            timer(variant, 3)
        except Unsupported as reason:
            if refused is None:
                raise
            refused[name] = str(reason)
        else:
            times[name] = []
    for _ in range(rounds):
        for name in times:
            times[name] += timer(variants[name], repeats)
    return {name: quantiles(samples) for name, samples in times.items()}


def quantiles(samples: Sequence[float]) -> Quantiles:
    """The 20 %, 50 % and 80 % quantiles."""
    probabilities = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, p50, p80 = torch.tensor(samples, dtype=torch.float64).quantile(probabilities).tolist()
    return Quantiles(p20, p50, p80)


class HostTimer:
    """The host's clock, for a CPU; nothing is flushed."""

    def __call__(self, variant: Variant, repeats: int) -> list[float]:
        """Microseconds of each run."""
        times = []
        for _ in range(repeats):
            run = variant()
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e6)
        return times


@dataclass
class CudaTimer:
    """Events around a backlog with a cold L2 cache; see the top of this file."""

    device: torch.device

    def __post_init__(self) -> None:
        self._flush = torch.ones(_FLUSH_BYTES // 4, device=self.device, dtype=torch.float32)

    def __call__(self, variant: Variant, repeats: int) -> list[float]:
        """Microseconds of each run."""
        sleep_s = 0.001
        while sleep_s < _LONGEST_SLEEP_S:
            times = self._batch(variant, repeats, sleep_s)
            if times is not None:
                return times
            sleep_s *= 4
            if repeats > 1 and sleep_s > _LONG_SLEEP_S:  # its kernels may be more than the queue holds
                return [us for part in (repeats // 2, repeats - repeats // 2) for us in self(variant, part)]
        raise Unsupported(
            f"the host takes more than {_LONGEST_SLEEP_S} s to queue {repeats} runs, so the device would "
            "wait: measure on a machine that is less busy."
        )

    def _batch(self, variant: Variant, repeats: int, sleep_s: float) -> list[float] | None:
        """None if the device ran out of work before the host had queued the whole batch."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        torch.cuda.synchronize(self.device)
        torch.cuda._sleep(int(sleep_s * _CYCLES_PER_SECOND))
        slept = torch.cuda.Event()
        slept.record()
        for start, end in events:
            run = variant()
            self._flush.sum()
            start.record()
            run()
            end.record()
        kept_busy = not slept.query()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) * 1e3 for start, end in events] if kept_busy else None


class Peaks(NamedTuple):
    """What this device reached in this run: the ceilings under which kernels are measured.

    ``bytes_per_second`` of a copy within its memory, read plus written; ``flops`` a second of cuBLAS's square
    products of bfloat16, ``float8_flops`` of E4M3 (0 where there are none).
    """

    bytes_per_second: float
    flops: float
    float8_flops: float

    def floor_s(self, case: Case) -> float:
        """Seconds that a case takes at least: its bytes moved once, or its products at the library's rate."""
        rate = self.float8_flops if "float8" in case.format and self.float8_flops else self.flops
        return max(case.bytes_moved / self.bytes_per_second, case.flops / rate)


def peaks_of(device: torch.device) -> Peaks:
    """Measure the ceilings of a CUDA device."""
    a, b = (torch.randn(_SIDE, _SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    variants: dict[str, Variant] = {"bf16": lambda: lambda: (a @ b,)}
    if torch.cuda.get_device_capability(device) >= (8, 9):
        a8, b8 = (t.to(torch.float8_e4m3fn) for t in (a, b))
        one = torch.ones((), device=device, dtype=torch.float32)
        kinds: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        variants["float8"] = lambda: lambda: (torch._scaled_mm(a8, b8.t(), one, one, **kinds),)
    times = measure(variants, CudaTimer(device), rounds=3, repeats=5)
    rates = {name: 2 * _SIDE**3 / (timing.p50 * 1e-6) for name, timing in times.items()}
    return Peaks(copy_bytes_per_second(device), rates["bf16"], rates.get("float8", 0.0))


def copy_bytes_per_second(device: torch.device) -> float:
    """What a copy within the device's memory moves, read plus written: the ceiling of all that move bytes."""
    source = torch.randn(_COPY_BYTES // 4, device=device, dtype=torch.float32)
    target = torch.empty_like(source)

    def run() -> Sequence[Tensor]:
        return (target.copy_(source),)

    times = measure({"copy": lambda: run}, CudaTimer(device), rounds=3, repeats=5)
    return 2 * _COPY_BYTES / (times["copy"].p50 * 1e-6)
