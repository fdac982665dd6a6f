"""A training step, and what is measured around it."""

from __future__ import annotations

import contextlib
import gc
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fewbits.bench.train.builders import Built, Job


class Stepper:
    """A training step, and what is measured around it."""

    def __init__(self, job: Job, built: Built, device: torch.device) -> None:
        self.model, self.memory, self.device = built.model, built.memory, device
        self.autocast = job.configuration.autocast
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.losses: list[Tensor] = []
        self.base_bytes = 0

    def start(self) -> None:
        """Make the optimizer, and note where memory and weights stand."""
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=True)
        self._before = [float(p.detach().float().abs().sum()) for p in self.trained]
        self.free()
        if self.device.type == "cuda":
            self.base_bytes = torch.cuda.memory_allocated(self.device)

    def forward_backward(self, ids: Tensor) -> Tensor:
        """The loss of a batch; gradients are where they belong."""
        narrow = (
            torch.autocast(self.device.type, dtype=torch.bfloat16)
            if self.autocast
            else contextlib.nullcontext()
        )
        with narrow:
            loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def step(self, ids: Tensor) -> None:
        """One step of the optimizer."""
        if self.memory is not None:
            self.memory.begin(ids.numel())
        self.losses.append(self.forward_backward(ids))
        if self.memory is not None:
            self.memory.end_step()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def timed(self, data: list[Tensor]) -> tuple[list[float], int]:
        """Milliseconds of each step, by events on the device, and the peak of allocated bytes."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        marks = [self._mark()]
        for ids in data:
            self.step(ids)
            marks.append(self._mark())
        self.sync()
        if cuda:
            return [a.elapsed_time(b) for a, b in pairwise(marks)], torch.cuda.max_memory_allocated(
                self.device
            )
        return [(b - a) * 1e3 for a, b in pairwise(marks)], 0

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def moved(self) -> float:
        """The share of trained tensors that changed; one that did not got no gradient."""
        now = [float(p.detach().float().abs().sum()) for p in self.trained]
        return sum(a != b for a, b in zip(self._before, now, strict=True)) / len(now)

    def notes(self) -> list[str]:
        """What became of the memory plan, and layers that ran unfused, with the reason."""
        from fewbits.models.fused import fusion_of

        fusion = fusion_of(self.model)
        fallbacks = {} if fusion is None else fusion.fallbacks
        unfused = [f"{count} layer calls ran unfused: {reason}" for reason, count in fallbacks.items()]
        return [*unfused, *([] if self.memory is None else self.memory.notes)]

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Give memory back to the device, for the processes beside this one."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
