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
        self.graph = _graph_of(job, self)

    def start(self) -> None:
        """Make the optimizer, and note where memory and weights stand."""
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=True)
        self._before = [float(p.detach().float().abs().sum()) for p in self.trained]
        self.free()
        if self.device.type == "cuda":
            self.base_bytes = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def forward_backward(self, ids: Tensor) -> Tensor:
        """The loss of a batch; gradients are where they belong.

        ``ids`` are (B, S) int64; the loss is (), detached.
        """
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
        """One step of the optimizer.

        ``ids`` are (B, S) int64.
        """
        if self.memory is not None:
            self.memory.begin(ids.numel())
        if self.graph is None:
            self.losses.append(self.forward_backward(ids))
        else:
            self.losses.append(self.graph({"input_ids": ids}).detach())
        if self.memory is not None:
            self.memory.end_step()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def timed(self, data: list[Tensor]) -> tuple[list[float], int]:
        """Milliseconds of each step, by events on the device, and the peak of allocated bytes.

        ``data`` holds the tokens of each step, (B, S) int64.

        What a CUDA graph works on counts as allocated only while it is captured, so with one the peak is that
        of all steps.
        """
        cuda = self.device.type == "cuda"
        if cuda and self.graph is None:
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
        from fewbits.decoder.fuse import fusion_of

        fusion = fusion_of(self.model)
        fallbacks = {} if fusion is None else fusion.fallbacks
        unfused = [f"{count} layer calls ran unfused: {reason}" for reason, count in fallbacks.items()]
        graph = [] if self.graph is None else [str(self.graph)]
        return [*unfused, *graph, *([] if self.memory is None else self.memory.notes)]

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Give memory back to the device, for the processes beside this one."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _graph_of(job: Job, stepper: Stepper) -> Any:
    """Our trainer's whole pass as a CUDA graph, where the model is so narrow that it waits for the host."""
    from fewbits.training.step.graph import GraphedStep, wants_graph

    config = job.shape.config()
    narrow = wants_graph("auto", device=stepper.device, hidden_size=config.hidden_size, fixed_shapes=True)
    if (
        job.configuration.side != "ours"
        or job.lengths is not None
        or stepper.memory is not None
        or not narrow
    ):
        return None
    return GraphedStep(lambda batch, _: stepper.forward_backward(batch["input_ids"]), stepper.trained)
