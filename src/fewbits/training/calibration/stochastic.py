"""From a model and text to a `StochasticConfig`: smoothing, protected channels, INT8 mask, stream lengths.

The steps: capture what the linears see; find ``smooth_scales``; protect channels; measure the error of every
(linear, group of rows, chunk) at every length; give the linears that gain most from it to INT8, up to a share
of all MACs; spend the budget of cycles on the others (`fewbits.training.calibration.stochastic_lengths`).
With ``attention="auto"`` the budget is attention's too, and its share is screened (`.stochastic_shares`).

Experts are linears of their own for that (`fewbits.models.packing.split_experts`). What a linear costs and
loses counts as often as rows came to it; one to which none came keeps the options' length, unsmoothed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.host.conversion import conversion_of
from fewbits.inference.paired import Interval
from fewbits.models.packing.convert import linears_to_replace
from fewbits.models.packing.split_experts import experts_split
from fewbits.models.stochastic.in_model import facts_of
from fewbits.recipes.recipe import Recipe, Rule
from fewbits.recipes.stochastic_config import AttentionSetting, LinearSetting, StochasticConfig
from fewbits.training.calibration.calibrate import (
    Captured,
    awq_scales,
    capture,
    protected_channels,
    smoothquant_scales,
)
from fewbits.training.calibration.stochastic_lengths import (
    ErrorTable,
    choose_lengths,
    chunk_errors,
    error_table,
)
from fewbits.training.calibration.stochastic_shares import choose_shares

SMOOTHING = ("smoothquant", "awq", "none")
AUTO = "auto"  # attention's lengths
DEFAULT_LEVELS = (16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What to calibrate, and how.

    Attributes:
        budget: cycles for each product, on average over the linears that run stochastically; with
            attention="auto" over attention's products too.
        levels: stream lengths to choose from, ascending.
        groups: groups of input rows of each linear, by their largest magnitude; 1: no such groups.
        smoothing: "smoothquant", "awq" or "none".
        alpha: of SmoothQuant.
        protected: input channels of each linear whose products are exact.
        int8_share: share of the linears' MACs that may run INT8.
        attention: stream length of both attention products; "auto": one each, chosen by the loss on the
            text; None: they stay exact.
        rows: captured rows of each linear.
        gradients: weigh errors by the gradient of the loss (one backward pass for each batch).
    """

    budget: float = 64.0
    levels: tuple[int, ...] = DEFAULT_LEVELS
    groups: int = 1
    smoothing: str = "awq"
    alpha: float = 0.5
    protected: int = 0
    int8_share: float = 0.0
    attention: int | str | None = None
    rows: int = 256
    gradients: bool = True

    def __post_init__(self) -> None:
        if self.smoothing not in SMOOTHING:
            raise BadInput(f"smoothing {self.smoothing!r} is unknown; choose one of {', '.join(SMOOTHING)}.")
        if not 0 <= self.alpha <= 1:
            raise BadInput(f"alpha={self.alpha:g} is refused: give a number from 0 to 1.")
        if not 0 <= self.int8_share < 1:
            raise BadInput(f"int8_share={self.int8_share} is refused: give a share from 0 to below 1.")
        if isinstance(self.attention, str) and self.attention != AUTO:
            raise BadInput(f"attention={self.attention!r} is refused; give a length, {AUTO!r} or None.")
        for name in ("groups", "rows"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} is refused: give at least 1.")


@dataclass
class _Linear:
    """What calibration knows of one linear."""

    captured: Captured
    weight: Tensor
    smooth_scales: Tensor | None
    protected: tuple[int, ...]
    table: ErrorTable
    int8_error: float

    @property
    def macs(self) -> float:
        return float(self.table.macs.sum())

    def weighed(self, share: float) -> _Linear:
        """The same with errors and MACs of that share of the rows."""
        table = replace(self.table, errors=self.table.errors * share, macs=self.table.macs * share)
        return replace(self, table=table, int8_error=self.int8_error * share)


def calibrate_stochastic(
    model: Any,
    batches: Iterable[Tensor],
    settings: Calibration,
    *,
    options: Stochastic = STOCHASTIC,
    progress: Callable[[int, int], None] | None = None,
    screening: Callable[[int, int], None] | None = None,
) -> StochasticConfig:
    """The configuration that these batches of tokens suggest.

    Args:
        model: a Hugging Face model of a known family, in its original form.
        batches: token ids (B, T).
        settings: what to calibrate.
        options: of every product; its stoc_len is where no linear says another.
        progress: called as ``progress(linears done, linears in all)``.
        screening: called as ``screening(windows done, windows in all)`` where attention is "auto".

    Raises:
        Unsupported: the model is converted already.
        BadInput: settings that do not fit, or no tokens.
    """
    if conversion_of(model) is not None:
        raise Unsupported("this model is converted already; calibrate its original form.")
    _check_levels(settings, options)
    batches = list(batches)
    with experts_split(model):
        measured = _measured(model, batches, settings, options, progress)
    if settings.attention != AUTO:
        return measured.config(settings.budget)
    shares = choose_shares(
        model,
        batches,
        settings.budget,
        sum(linear.macs for linear in measured.running().values()),
        _longest(options),
        measured.config,
        shortest=settings.levels[0],
        progress=screening,
    )
    interval = shares.against_equal
    facts = {
        "scores": shares.scores,
        "values": shares.values,
        "tried": shares.tried,
        "against_equal": None if interval is None else _numbers(interval),
    }
    whole = {"mean_cycles": round(shares.mean_cycles, 3), "attention_shares": facts}
    return replace(shares.config, calibration={**shares.config.calibration, **whole})


def _numbers(interval: Interval) -> list[float | None]:
    """Mean and ends; None for those at infinity, of one window alone, which JSON has no word for."""
    return [x if math.isfinite(x) else None for x in (interval.mean, interval.low, interval.high)]


@dataclass(frozen=True)
class _Measured:
    """What a model's linears lose at every length, before a budget is spent."""

    settings: Calibration
    options: Stochastic
    captured: Mapping[str, Captured]
    linears: Mapping[str, _Linear]
    masked: set[str]
    model: Mapping[str, Any]

    def running(self) -> dict[str, _Linear]:
        """The linears that run in streams."""
        return {name: linear for name, linear in self.linears.items() if name not in self.masked}

    def config(self, budget: float) -> StochasticConfig:
        """The configuration whose linears spend this budget."""
        settings, running = self.settings, self.running()
        lengths, mean = choose_lengths([x.table for x in running.values()], settings.levels, budget)
        length_of = dict(zip(running, lengths, strict=True))
        plan = {n: _setting(x, length_of.get(n)) for n, x in self.linears.items()}
        length = settings.attention
        attention = None if isinstance(length, str) else AttentionSetting(scores=length, values=length)
        return StochasticConfig(
            options=self.options.with_length(_nearest(settings.levels, settings.budget)),
            linears=tuple(plan.items()),
            attention=() if length is None or attention is None else (("*", attention),),
            model=self.model,
            calibration=_provenance(settings, self.captured, mean, self.masked, self.linears),
        )


def _measured(
    model: Any,
    batches: Iterable[Tensor],
    settings: Calibration,
    options: Stochastic,
    progress: Callable[[int, int], None] | None,
) -> _Measured:
    names = list(linears_to_replace(model, Recipe(name="all", linear=Rule(weight=options))))
    captured = capture(model, batches, names, rows=settings.rows, gradients=settings.gradients)
    most = max(one.num_rows for one in captured.values())
    linears = {}
    for done, name in enumerate(names):
        weight = model.get_submodule(name).weight.detach()
        if captured[name].num_rows:
            linear = _measure(captured[name], weight, settings, options)
            linears[name] = linear.weighed(captured[name].num_rows / most)
        if progress is not None:
            progress(done + 1, len(names))
    return _Measured(settings, options, captured, linears, _int8_mask(linears, settings), facts_of(model))


def _check_levels(settings: Calibration, options: Stochastic) -> None:
    longest = _longest(options)
    lengths = [*settings.levels, *([settings.attention] if isinstance(settings.attention, int) else [])]
    wrong = [level for level in lengths if not 1 <= level <= longest]
    if wrong:
        raise BadInput(f"a stream length of {wrong[0]} is out of range; choose from 1 to {longest}.")


def _longest(options: Stochastic) -> int:
    return options.streams.levels if options.halve_bipolar_stoc_len else int(2**options.sc_prec)


def _nearest(levels: tuple[int, ...], budget: float) -> int:
    return min(levels, key=lambda level: abs(level - budget))


def _measure(captured: Captured, weight: Tensor, settings: Calibration, options: Stochastic) -> _Linear:
    x, importance = captured.rows.to(weight.device), captured.importance.to(weight.device)
    protected = protected_channels(captured, weight, settings.protected) if settings.protected else ()
    x_left, weight_left = x.clone(), weight.float().clone()
    x_left[:, list(protected)] = 0  # what remains for the streams
    weight_left[:, list(protected)] = 0
    scales = _smoothing(captured, x_left, weight_left, settings, options)
    table = error_table(
        x_left,
        weight_left,
        importance,
        options,
        settings.levels,
        smooth_scales=scales,
        groups=settings.groups,
    )
    f = torch.ones(x.shape[1], device=x.device, dtype=torch.float32) if scales is None else scales
    rounded = options.fake_quantize(x_left / f) @ options.fake_quantize(weight_left * f).mT
    int8_error = float(((rounded - x_left @ weight_left.mT).square() * importance).sum(-1).mean())
    return _Linear(captured, weight, scales, protected, table, int8_error)


def _smoothing(
    captured: Captured, x: Tensor, weight: Tensor, settings: Calibration, options: Stochastic
) -> Tensor | None:
    if settings.smoothing == "none":
        return None
    if settings.smoothing == "smoothquant":
        return _rounded(smoothquant_scales(captured.absmax, weight, settings.alpha)).to(weight.device)
    level = _nearest(settings.levels, settings.budget)
    importance = captured.importance.to(weight.device)

    def error(scales: Tensor | None) -> float:
        scales = None if scales is None else _rounded(scales).to(weight.device)
        return float(chunk_errors(x, weight, importance, options, (level,), scales).sum())

    return _rounded(awq_scales(captured, error)[0]).to(weight.device)


def _rounded(scales: Tensor) -> Tensor:
    """Six digits, as the configuration file has them."""
    return torch.tensor([float(f"{value:.6g}") for value in scales.tolist()], dtype=torch.float32)


def _int8_mask(linears: Mapping[str, _Linear], settings: Calibration) -> set[str]:
    """The linears whose error falls most for each MAC when they run INT8, within the share of all MACs."""
    left = settings.int8_share * sum(linear.macs for linear in linears.values())
    level = settings.levels.index(_nearest(settings.levels, settings.budget))

    def gain(linear: _Linear) -> float:
        return (float(linear.table.errors[..., level].sum()) - linear.int8_error) / linear.macs

    masked: set[str] = set()
    for name, linear in sorted(linears.items(), key=lambda item: gain(item[1]), reverse=True):
        if linear.macs <= left and gain(linear) > 0 and len(masked) < len(linears) - 1:
            masked.add(name)
            left -= linear.macs
    return masked


def _setting(linear: _Linear, lengths: Tensor | None) -> LinearSetting:
    scales = linear.smooth_scales
    of_operands = LinearSetting(
        smooth_scales=None if scales is None else tuple(float(f"{v:.6g}") for v in scales.tolist()),
        protected=linear.protected,
    )
    if lengths is None:
        return replace(of_operands, runs="int8")
    table = tuple(tuple(row) for row in lengths.tolist())
    return replace(of_operands, lengths=table, thresholds=linear.table.thresholds)


def _provenance(
    settings: Calibration,
    captured: Mapping[str, Captured],
    mean: float,
    masked: set[str],
    linears: Mapping[str, _Linear],
) -> dict[str, Any]:
    total = sum(linear.macs for linear in linears.values())
    return {
        **{k: list(v) if isinstance(v, tuple) else v for k, v in asdict(settings).items()},
        "tokens": max(one.num_rows for one in captured.values()),
        "mean_cycles": round(mean, 3),
        "int8_macs_share": round(sum(linears[name].macs for name in masked) / total, 4),
    }
