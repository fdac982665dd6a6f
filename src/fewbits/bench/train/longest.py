"""The longest sequence that trains at batch 1 in the device's memory.

A step of the 8B shape at 400,000 tokens takes minutes, nearly all of it attention, so not every try runs all
layers. The peak of the whole model is measured at a few lengths, which gives a line and a first guess. Then
the model is cut to one layer; what the others hold at a length (the difference of the two peaks, a line too;
their weights stay where they are) is put there as plain memory, and a step of the cut model says whether the
length fits. So the largest buffers, the head and the allocator's behaviour are real at the length, and what
grows layer by layer is a line through measured points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from rich.table import Table
from torch import nn

from fewbits.bench.record import Row
from fewbits.bench.train.builders import Job, build
from fewbits.bench.train.parity import check
from fewbits.bench.train.schedule import Outcome
from fewbits.bench.train.shapes import batches
from fewbits.bench.train.stepper import Stepper
from fewbits.errors import Unsupported
from fewbits.host.unwrap import unwrap

_MULTIPLES = (1, 3)
_MOST_TRIES = 6
POSITIONS = 2**19  # of the models that are searched: more than any of them fits


class Line(NamedTuple):
    """``bytes = fixed + slope * tokens``."""

    fixed: float
    slope: float

    def __call__(self, tokens: int) -> float:
        """Bytes at a length."""
        return self.fixed + self.slope * tokens


def line_through(points: Sequence[tuple[int, float]]) -> Line:
    """The line through the first and the last point."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope = (y1 - y0) / (x1 - x0)
    return Line(y0 - slope * x0, slope)


def bisect(fits: Callable[[int], bool], guess: int, grain: int, most: int = _MOST_TRIES) -> int:
    """The largest multiple of ``grain`` that fits, from a guess, in at most ``most`` tries; 0 if none did."""
    low, high, step = 0, None, 1
    at = max(guess // grain, 1)
    for _ in range(most):
        if fits(at * grain):
            low = at
            at, step = (at + step, step * 2) if high is None else ((low + high) // 2, step)
        else:
            high = at
            at, step = (max(at - step, (low + at) // 2), step * 2) if low == 0 else ((low + high) // 2, step)
        if at in (low, high) or at < 1:
            break
    return low * grain


def search(job: Job, tell: Callable[..., None], wait: Callable[[str], None]) -> None:
    """Do a job with ``lengths``; a line "try" for each length and one "longest"."""
    device = torch.device(job.device)
    if device.type != "cuda" or job.lengths is None:
        raise Unsupported(
            "the longest sequence is searched on a GPU, where memory can be measured: leave it out."
        )
    built = build(job)
    trainer = Stepper(job, built, device)
    grain, config = job.lengths[1], unwrap(built.model).config
    depth = config.num_hidden_layers
    ids = batches(config.vocab_size, (1, grain), 1, device)[0]
    parity = check(
        built.model, ids, trainer.forward_backward, rounding=job.configuration.rounding, layers=job.layers
    )
    tell("parity", **parity.plain())
    if parity.failures:
        return
    trainer.start()
    wait("warm")
    total = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    longest = find(_Trial(trainer, built.model, tell), grain, total)
    tell("longest", layers=depth, memory_gib=round(total / 2**30, 2), **longest)


class Trial(Protocol):
    """Steps of one model at many lengths."""

    def cut(self) -> None:
        """Run one layer from now on."""

    def peak(self, tokens: int, layers: int | str) -> int:
        """Peak of allocated bytes of a step."""

    def fits(self, tokens: int, rest: Line) -> bool:
        """Whether a step fits beside what the layers that are cut hold at this length."""


def find(trial: Trial, grain: int, total: int) -> dict[str, Any]:
    """The longest multiple of ``grain`` tokens whose step fits, and the lines that led to it."""
    whole = [(m * grain, float(trial.peak(m * grain, "all"))) for m in _MULTIPLES]
    trial.cut()
    part = [(m * grain, float(trial.peak(m * grain, 1))) for m in _MULTIPLES]
    rest = line_through([(x, y - z) for (x, y), (_, z) in zip(whole, part, strict=True)])
    line = line_through(whole)
    guess = int((total - line.fixed) / line.slope)
    return {
        "tokens": bisect(lambda tokens: trial.fits(tokens, rest), guess, grain),
        "predicted": guess,
        "fixed_gib": round(line.fixed / 2**30, 3),
        "bytes_per_token": round(line.slope),
        "points": [[x, round(y / 2**30, 3)] for x, y in whole],
    }


class _Trial:
    """Steps of one model at many lengths."""

    def __init__(self, trainer: Stepper, model: nn.Module, tell: Callable[..., None]) -> None:
        self._trainer, self._model, self._tell = trainer, model, tell
        self._vocab = unwrap(model).config.vocab_size

    def cut(self) -> None:
        """Run one layer from now on; all stay in memory."""
        base = unwrap(self._model)
        self._all = base.model.layers
        base.model.layers = nn.ModuleList(list(self._all)[:1])
        base.config.num_hidden_layers = 1

    def peak(self, tokens: int, layers: int | str) -> int:
        """Peak of allocated bytes of a step, the second of two."""
        device = self._trainer.device
        ids = batches(self._vocab, (1, tokens), 2, device)
        for i, row in enumerate(ids):
            if i:
                torch.cuda.reset_peak_memory_stats(device)
            self._trainer.step(row)
        self._trainer.sync()
        peak = torch.cuda.max_memory_allocated(device)
        self._tell("try", tokens=tokens, layers=layers, fits=True, peak_gib=round(peak / 2**30, 3))
        self._trainer.free()
        return peak

    def fits(self, tokens: int, rest: Line) -> bool:
        """Whether a step of the cut model fits beside what the other layers hold at this length."""
        device = self._trainer.device
        torch.cuda.reset_peak_memory_stats(device)
        try:
            self._step_beside(max(int(rest(tokens)), 1), tokens)
        except torch.OutOfMemoryError:
            fits = False
        else:
            fits = True
        for p in self._trainer.trained:
            p.grad = None
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        self._tell("try", tokens=tokens, layers=1, fits=fits, peak_gib=round(peak, 3))
        self._trainer.free()
        return fits

    def _step_beside(self, num_bytes: int, tokens: int) -> None:
        held = torch.empty(num_bytes, dtype=torch.uint8, device=self._trainer.device)
        self._trainer.step(batches(self._vocab, (1, tokens), 1, self._trainer.device)[0])
        self._trainer.sync()
        del held


def table_of_longest(outcomes: Sequence[Outcome]) -> tuple[Table, list[Row]]:
    """A line and a row for each configuration."""
    table = Table(title="the longest sequence that trains at batch 1", box=None)
    for column in ("shape", "configuration", "tokens", "GiB of the GPU", "fixed GiB", "bytes a token"):
        table.add_column(column, no_wrap=True)
    rows = []
    for outcome in outcomes:
        config, longest = outcome.task.configuration, outcome.said.get("longest")
        name = "" if config is None else config.name
        if longest is None or config is None:
            table.add_row(outcome.task.shape.name, name, "FAILED")
            continue
        cells = (longest["tokens"], longest["memory_gib"], longest["fixed_gib"], longest["bytes_per_token"])
        table.add_row(outcome.task.shape.name, name, *map(str, cells))
        tokens = float(longest["tokens"])
        rows.append(
            Row(
                op=f"train_{outcome.task.shape.name}",
                part="batch 1",
                variant=name,
                format=config.format,
                metric="longest sequence",
                unit="tokens",
                low=tokens,
                value=tokens,
                high=tokens,
            )
        )
    return table, rows
