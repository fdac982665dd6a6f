"""What the parts of `multi_gpu` share: a step, the same under the profiler, the calls of an exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fewbits.formats import INT8
from fewbits.kernels.codec.gradient_codec import (
    dequantize_gradient,
    quantize_gradient,
    sum_gradients,
    wire_of,
)
from fewbits.training.ranks.communication import Travel, wait


def profiled(step: Callable[[], None]) -> dict[str, float]:
    """Of one step on this GPU: milliseconds in which kernels computed, NCCL ran, nothing computed."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    spans = [
        (e.time_range.start, e.time_range.end, "nccl" in e.name.lower())
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    whole = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
    busy = covered([(a, b) for a, b, nccl in spans if not nccl])
    travel = covered([(a, b) for a, b, nccl in spans if nccl])
    figures = {"profiled_ms": whole, "computing_ms": busy, "nccl_ms": travel, "idle_ms": whole - busy}
    return {name: round(value / 1e3, 2) for name, value in figures.items()}


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def exchange_calls(travel: Travel, gradient: Tensor) -> dict[str, Callable[[], Any]]:
    """What an exchange does to a bucket of float32 gradients."""
    residual, narrow = torch.zeros_like(gradient), gradient.bfloat16()
    wire = wire_of(INT8, gradient.numel(), travel.size)
    messages, mean = wire.empty(travel.size, gradient.device), wire.empty(1, gradient.device)
    received, shard_residual = torch.empty_like(messages), residual[: wire.row].clone()
    factor = 1 / travel.size
    return {
        "all_reduce float32": lambda: wait(travel.all_reduce(gradient)),
        "all_reduce bfloat16": lambda: wait(travel.all_reduce(narrow)),
        "all_to_all int8": lambda: wait(travel.all_to_all(received, messages)),
        "all_gather int8": lambda: wait(travel.all_gather(received, mean)),
        "quantize": lambda: quantize_gradient(gradient, residual, messages, wire),
        "sum, quantize": lambda: sum_gradients(received, shard_residual, mean, wire, factor=factor),
        "dequantize": lambda: dequantize_gradient(messages, gradient, wire),
        "copy": lambda: residual.copy_(gradient),
    }


def training_step(
    model: Any, ids: Tensor, optimizer: Any, *, mean: Any = None, memory: Any = None, autocast: bool = False
) -> Callable[[], None]:
    """Forward, backward, the mean, the update; ``step.losses`` has the losses so far."""
    losses: list[Tensor] = []

    def step() -> None:
        if memory is not None:
            memory.begin(ids.numel())
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if memory is not None:
            memory.end_step()
        losses.append(loss.detach())
        if mean is not None:
            mean()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step.losses = losses  # type: ignore[attr-defined]
    return step


def loss_range(step: Any) -> str:
    """The first loss and the last."""
    return f"{float(step.losses[0]):.4f} -> {float(step.losses[-1]):.4f}"


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def adamw(model: Any, rate: float) -> Any:
    return torch.optim.AdamW(trained(model), lr=rate, fused=True)
