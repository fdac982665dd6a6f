"""Where a step's time goes: its kernels by what they do, from torch's profiler, after the timed steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table

KINDS = (
    ("attention", r"sdpa|flash|fmha|attention"),
    ("head and loss", r"cross_entropy"),
    ("products", r"nvjet|gemm|cutlass|cublas|xmma|scaled_mm"),
    ("LoRA", r"lora|low_rank"),
    ("decode, quantise", r"dequant|decode|quantize|float8|amax|to_fp8"),
    ("activation", r"gated|silu|swiglu|gelu"),
    ("norms", r"norm"),
    ("heads, rotation", r"qkv|rope|rotary"),
    ("optimizer", r"adam|multi_tensor"),
    ("copies", r"memcpy|memset|copy"),
)
_TOP = 80


def kind_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    name = kernel.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def profile(step: Callable[[], None], device: torch.device, steps: int = 2) -> dict[str, Any]:
    """Milliseconds a step by kind of kernel, and the longest as [name, launches, milliseconds].

    On a CPU, for a trial, torch's operators stand for kernels.
    """
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    rows = []
    for event in profiler.key_averages():
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if us > 0:
            rows.append((event.key, event.count / steps, us / steps / 1e3))
    return summed(rows)


def summed(kernels: Any) -> dict[str, Any]:
    """Name, launches and milliseconds of each kernel, added up."""
    rows = sorted(kernels, key=lambda row: -row[2])
    kinds: dict[str, float] = {}
    for name, _, ms in rows:
        kinds[kind_of(name)] = kinds.get(kind_of(name), 0.0) + ms
    return {
        "total_ms": round(sum(ms for _, _, ms in rows), 2),
        "kinds": {kind: round(ms, 2) for kind, ms in sorted(kinds.items(), key=lambda x: -x[1])},
        "top": [[name[:160], count, round(ms, 3)] for name, count, ms in rows[:_TOP]],
    }


def table_of_kernels(outcomes: Sequence[Any]) -> Table | None:
    """Milliseconds of each kind, a column for each configuration; None if nothing was profiled."""
    profiled = [o for o in outcomes if "kernels" in o.said]
    if not profiled:
        return None
    table = Table(title="milliseconds a step, by what the kernels do", box=None)
    table.add_column("", no_wrap=True)
    for outcome in profiled:
        table.add_column(f"{outcome.task.configuration.name}\n{outcome.task.shape.name}", justify="right")
    for kind in (*(kind for kind, _ in KINDS), "other"):
        values = [o.said["kernels"]["kinds"].get(kind, 0.0) for o in profiled]
        table.add_row(kind, *(f"{value:.1f}" for value in values))
    table.add_row("all", *(f"{o.said['kernels']['total_ms']:.1f}" for o in profiled))
    return table
