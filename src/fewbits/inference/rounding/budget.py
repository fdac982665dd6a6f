"""Mixed precision: each linear's format chosen by what rounding it alone costs, within a budget of bits.

The loss of a linear in a format is measured, not modelled: KL of the whole model from the plain one with that
linear alone rounded. Losses of several linears are then taken to add up, and bits are bought where they save
most: every linear begins with its cheapest format, and the step to a better one that saves most loss for a
bit is taken as long as it stays within the budget. Steps that others beat on both sides are left out (a
linear's losses and bits lie on a convex line), so that what is bought on the way is the best for its bits.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fewbits.errors import BadCheckpoint, BadInput
from fewbits.formats import get_format
from fewbits.formats.base import Format
from fewbits.inference.rounding.quality import divergence, log_probabilities, rounded

if TYPE_CHECKING:
    from torch import nn

CANDIDATES = ("int2_g64_zp", "int3_g64_zp", "int4_g64_zp", "int6_g64", "int8_g64")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bits of a value on average over the decoder's linears, scales included, and what may be chosen from.

    Attributes:
        bits: such as 3.5.
        formats: names of the candidates; they must be ones that calibration can round to.
    """

    bits: float
    formats: tuple[str, ...] = CANDIDATES

    @property
    def text(self) -> str:
        """The value as text, for fingerprints and names."""
        return f"{self.bits:g} bits of {','.join(self.formats)}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One point of the line of best choices: bits of a value, and the sum of the measured losses there."""

    bits: float
    loss: float


def measure_losses(
    model: nn.Module,
    linears: Sequence[str],
    formats: Sequence[Format],
    windows: Tensor,
    *,
    cache_file: Path,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, dict[str, float]]:
    """KL in nats a token with one linear alone rounded, by linear and format.

    Args:
        model: the plain model.
        linears: full names; of experts those of their 3-D parameters.
        formats: the candidates.
        windows: (windows, length) of tokens.
        cache_file: a file in which what is measured is kept, so that the same call goes on where it stopped.
        progress: called as ``progress(linears done, linears in all)``.

    Raises:
        BadCheckpoint: that file is damaged.
    """
    by_linear: dict[str, dict[str, float]] = {}
    if cache_file.is_file():
        try:
            by_linear = json.loads(cache_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadCheckpoint(
                f"{cache_file} cannot be read; remove {cache_file.parent} and start again."
            ) from error
    plain = log_probabilities(model, windows)
    for number, name in enumerate(linears, 1):
        if name not in by_linear:
            losses = {}
            for format in formats:
                with rounded(model, {name: format}):
                    losses[format.name] = divergence(model, plain, windows)
            by_linear[name] = losses
            partial = cache_file.with_suffix(".partial")
            partial.write_text(json.dumps(by_linear), encoding="utf-8")
            partial.replace(cache_file)
        if progress is not None:
            progress(number, len(linears))
    return by_linear


def allocate(
    losses: Mapping[str, Mapping[str, float]], shapes: Mapping[str, tuple[int, ...]], budget: Budget
) -> tuple[dict[str, Format], list[Step]]:
    """A format for each linear within the budget, and the line of best choices up to the dearest.

    Args:
        losses: of each linear in each candidate, from `measure_losses`.
        shapes: of each, (N, K) or (E, N, K).
        budget: what may be spent.

    Raises:
        BadInput: the budget is below the cheapest choice, or there is nothing to choose from.
    """
    formats = [get_format(name) for name in budget.formats]
    lines = {name: _convex(of_formats, shapes[name], formats) for name, of_formats in losses.items()}
    values = sum(prod(shapes[name]) for name in losses)
    places = dict.fromkeys(lines, 0)
    spent = sum(line[0][0] for line in lines.values())
    loss = sum(line[0][1] for line in lines.values())
    if not values or spent > budget.bits * values * (1 + 1e-9):
        least = spent / max(values, 1)
        raise BadInput(
            f"{budget.bits:g} bits are fewer than the {least:.3f} of the cheapest candidates, scales "
            "included; raise --bits or name narrower ones with --format a,b,c."
        )
    chosen, num_bits, steps = dict(places), spent, [Step(bits=spent / values, loss=loss)]
    waiting = [(_price(line, 0), name) for name, line in lines.items() if len(line) > 1]
    heapq.heapify(waiting)
    while waiting:
        _, name = heapq.heappop(waiting)
        line, place = lines[name], places[name] + 1
        places[name] = place
        more = line[place][0] - line[place - 1][0]
        spent, loss = spent + more, loss + line[place][1] - line[place - 1][1]
        if chosen[name] == place - 1 and num_bits + more <= budget.bits * values * (1 + 1e-9):
            chosen[name], num_bits = place, num_bits + more
        steps.append(Step(bits=spent / values, loss=loss))
        if place + 1 < len(line):
            heapq.heappush(waiting, (_price(line, place), name))
    return {name: lines[name][place][2] for name, place in chosen.items()}, steps


def _price(line: Sequence[tuple[float, float, Format]], place: int) -> float:
    """Minus the loss that the next step saves for each bit."""
    return (line[place + 1][1] - line[place][1]) / (line[place + 1][0] - line[place][0])


def _convex(
    of_formats: Mapping[str, float], shape: tuple[int, ...], formats: Sequence[Format]
) -> list[tuple[float, float, Format]]:
    """(bits in all, loss, format) of the candidates that are best for some price of a bit, cheapest first."""
    points = sorted(
        ((8.0 * format.nbytes(shape), of_formats[format.name], format) for format in formats),
        key=lambda p: p[:2],
    )
    line: list[tuple[float, float, Format]] = []
    for point in points:
        if line and (point[1] >= line[-1][1] or point[0] == line[-1][0]):
            continue
        while len(line) > 1 and _price([line[-1], point], 0) <= _price(line, len(line) - 2):
            line.pop()
        line.append(point)
    return line
