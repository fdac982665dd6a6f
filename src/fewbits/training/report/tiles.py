"""The headline figures of a report. Each function gives one tile, or None where nothing was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from fewbits.training.report import figures as show
from fewbits.training.report.files import RunData, number
from fewbits.words import counted, size

Points = list[tuple[float, float]]


class Tile(NamedTuple):
    """One headline figure; the texts are HTML."""

    name: str
    value: str
    more: str = ""


def tiles(data: RunData) -> str:
    """All of them, as HTML."""
    shown = [tile for make in _TILES if (tile := make(data)) is not None]
    cells = "".join(
        f'<div class="card tile"><div class="name">{t.name}</div><div class="value">{t.value}</div>'
        f'<div class="more">{t.more}</div></div>'
        for t in shown
    )
    return f'<section class="tiles">{cells}</section>\n' if shown else ""


def _training_loss(data: RunData) -> Tile | None:
    points = data.curve("loss")
    if not points:
        return None
    span = min(10, len(points))
    value = sum(y for _, y in points[-span:]) / span
    more = f"mean of the last {span} logged" if span > 1 else f"at step {points[-1][0]:,.0f}"
    return Tile("Training loss", show.decimal(value), more)


def _evaluation_loss(data: RunData) -> Tile | None:
    points = data.curve("eval_loss")
    if not points:
        return None
    best = _best(points)
    return Tile("Evaluation loss", _from_to(points, show.decimal), f"best, at step {best[0]:,.0f}")


def _perplexity(data: RunData) -> Tile | None:
    points = data.curve("eval_loss")
    if data.first("method") not in (None, "sft"):  # whose loss is no likelihood
        return None
    if not points or max(y for _, y in points) > 100:
        return None
    return Tile(
        "Perplexity", _from_to(points, lambda loss: show.rate(math.exp(loss))), "exp(evaluation loss)"
    )


def _best(points: Points) -> tuple[float, float]:
    """The lowest point of the training, not of what was before it."""
    return min((p for p in points if p[0] > 0), key=lambda p: p[1], default=points[0])


def _from_to(points: Points, text: Callable[[float], str]) -> str:
    """The best value, behind the one before training where that was measured."""
    best = _best(points)
    start = f'<span class="from">{text(points[0][1])} \u2192</span> ' if points[0][0] == 0 < best[0] else ""
    return start + text(best[1])


def _tokens(data: RunData) -> Tile | None:
    points = data.curve("tokens")
    if not points:
        return None
    epochs = number(data.steps[-1].get("epoch"))
    more = counted(points[-1][0], "step") + (f", {counted(epochs, 'epoch')}" if epochs else "")
    return Tile("Tokens", show.count(points[-1][1]), more)


def _time(data: RunData) -> Tile | None:
    points = data.curve("seconds")
    seconds = number(data.first("seconds")) or (points[-1][1] if points else None)
    if not seconds:
        return None
    tokens = data.curve("tokens")
    more = f"{show.rate(tokens[-1][1] / seconds)} tokens/s overall" if tokens else ""
    return Tile("Training time", _units(show.duration(seconds)), more)


def _memory(data: RunData) -> Tile | None:
    points = data.curve("memory_bytes")
    if not points:
        return None
    return Tile("Peak memory", _units(size(max(y for _, y in points))), "highest that was logged")


def _trainable(data: RunData) -> Tile | None:
    trainable, total = (number(data.first(f"parameters.{k}")) for k in ("trainable", "total"))
    if trainable is None:
        return None
    more = f"{trainable / total:.2%} of {show.count(total)}" if total else ""
    return Tile("Trainable parameters", show.count(trainable), more)


def _model_size(data: RunData) -> Tile | None:
    """All that the model holds, adapters too; of its packed weights what they would take in 16 bits."""
    whole, packed, plain = (
        number(data.first(f"parameters.{k}")) for k in ("bytes", "packed_bytes", "packed_bytes_in_16_bits")
    )
    if whole is None:
        return None
    more = f"{size(packed)} of packed weights, {size(plain)} in 16 bits" if packed and plain else ""
    return Tile("Model size", _units(size(whole)), more or "adapters included")


_TILES = (
    _evaluation_loss,
    _perplexity,
    _training_loss,
    _tokens,
    _time,
    _memory,
    _trainable,
    _model_size,
)


def _units(text: str) -> str:
    """Units smaller than their numbers."""
    return " ".join(word if word[0].isdigit() else f"<small>{word}</small>" for word in text.split())
