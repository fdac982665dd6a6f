"""Results as rows, a table and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fewbits.bench.measure import quantiles
from fewbits.bench.record import Row
from fewbits.bench.train.schedule import Outcome

_OURS, _PEER, _INK = "#3b6fd4", "#c76a2b", "#7f7f7f"


def failure(outcome: Outcome) -> str | None:
    """Why there is no speed of this configuration; None if there is one."""
    parity = outcome.said.get("parity", {})
    if parity.get("failures"):
        return "FAILS THE PARITY CHECK: " + "; ".join(parity["failures"][:2]) + "."
    if "timed" in outcome.said or "longest" in outcome.said:
        return None
    return outcome.error or "it ended without a result"


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """Time, memory and the parity check's errors of each configuration that has a speed."""
    rows: list[Row] = []
    ours = {_key(o): o for o in reversed(outcomes) if _timed(o) and _side(o) == "ours"}
    for outcome in outcomes:
        if not _timed(outcome):
            continue
        timed, parity = outcome.said["timed"], outcome.said["parity"]
        p20, p50, p80 = quantiles(timed["times_ms"])
        first = ours.get(_key(outcome))
        values: list[tuple[str, str, float, float, float]] = [
            ("time", "ms", p20, p50, p80),
            ("peak memory", "GiB", *(3 * (timed["peak_gib"],))),
            ("loss error", "nats", *(3 * (parity["loss_error"],))),
            ("worst gradient error", "relative", *(3 * (parity["gradient_error"],))),
        ]
        for metric, unit, low, value, high in values:
            compared = metric in ("time", "peak memory") and first is not None
            rows.append(
                Row(
                    op=f"train_{outcome.task.shape.name}",
                    part=f"step {_batch(outcome)}",
                    variant=_name(outcome),
                    format=_configuration(outcome).format,
                    metric=metric,
                    unit=unit,
                    low=_short(low),
                    value=_short(value),
                    high=_short(high),
                    ratio=_ratio(outcome, first, metric) if compared else None,
                )
            )
    return rows


def _ratio(outcome: Outcome, ours: Any, metric: str) -> float | None:
    def figure(o: Outcome) -> float:
        timed = o.said["timed"]
        return quantiles(timed["times_ms"]).p50 if metric == "time" else float(timed["peak_gib"])

    return round(figure(outcome) / figure(ours), 3) if figure(ours) else None


def table_of(outcomes: Sequence[Outcome], device: str) -> Table:
    """A line for each configuration: its figures, or why it has none."""
    table = Table(
        title=f"training steps on {device}",
        caption="error: worst gradient beside float32, of what it may be; ratio: tokens/s over our first",
        box=None,
    )
    for column in ("shape", "configuration", "weights", "recompute"):
        table.add_column(column, no_wrap=True)
    for column in ("tokens/s", "ms", "p20-p80", "GiB", "TF/s", "ratio", "loss 1", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    ours = {_key(o): o for o in reversed(outcomes) if _timed(o) and _side(o) == "ours"}
    for outcome in outcomes:
        config = _configuration(outcome)
        head = (f"{outcome.task.shape.name} {_batch(outcome)}", config.name, config.format, config.recompute)
        if not _timed(outcome):
            table.add_row(*head, "-", "-", "-", "-", "-", "-", "-", "FAILED")
            continue
        timed, parity = outcome.said["timed"], outcome.said["parity"]
        p20, p50, p80 = quantiles(timed["times_ms"])
        first = ours.get(_key(outcome))
        speed = timed["tokens_per_second"]
        table.add_row(
            *head,
            f"{speed:.0f}",
            f"{p50:.1f}",
            f"{p20:.1f}-{p80:.1f}",
            f"{timed['peak_gib']:.2f}",
            f"{timed['model_tflops']:.0f}",
            "" if first is None else f"{speed / first.said['timed']['tokens_per_second']:.2f}",
            f"{timed['losses'][0]:.4f}",
            f"{parity['gradient_error']:.2g} of {parity['gradient_tolerance']:.2g}",
        )
    return table


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Tokens a second, a panel of bars for each shape and batch, peak memory beside; light and dark pages."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in outcomes:
        if _timed(outcome):
            groups.setdefault(_key(outcome), []).append(outcome)
    if not groups:
        return
    settings = {
        "svg.fonttype": "none",
        "text.color": _INK,
        "axes.edgecolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "font.size": 9,
    }
    heights = [0.28 * len(group) + 0.75 for group in groups.values()]
    with plt.rc_context(settings):
        figure, axes = plt.subplots(
            len(groups), 1, figsize=(7.2, sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for (key, group), panel in zip(groups.items(), axes[:, 0], strict=True):
            _panel(panel, sorted(group, key=lambda o: float(o.said["timed"]["tokens_per_second"])))
            panel.set_title(f"{', '.join(key)}: tokens a second", fontsize=10, loc="left")
        figure.tight_layout()
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def _panel(panel: Any, outcomes: Sequence[Outcome]) -> None:
    """Slowest below."""
    speeds = [o.said["timed"]["tokens_per_second"] for o in outcomes]
    colours = [_OURS if _side(o) == "ours" else _PEER for o in outcomes]
    panel.barh([_name(o) for o in outcomes], speeds, color=colours, height=0.68)
    for i, (outcome, speed) in enumerate(zip(outcomes, speeds, strict=True)):
        text = f" {speed:,.0f}, {outcome.said['timed']['peak_gib']:.1f} GiB"
        panel.text(speed, i, text, va="center", fontsize=8)
    panel.set_xlim(0, max(speeds) * 1.25)
    panel.xaxis.set_visible(False)
    panel.tick_params(axis="y", length=0)
    for side in ("top", "right", "bottom"):
        panel.spines[side].set_visible(False)


def _configuration(outcome: Outcome) -> Any:
    return outcome.task.configuration


def _name(outcome: Outcome) -> str:
    return str(_configuration(outcome).name)


def _side(outcome: Outcome) -> str:
    return str(_configuration(outcome).side)


def _batch(outcome: Outcome) -> str:
    return "x".join(map(str, outcome.task.batch))


def _key(outcome: Outcome) -> tuple[str, ...]:
    """What may be compared: one shape, one batch, adapters or all weights."""
    key = (outcome.task.shape.name, _batch(outcome))
    return (*key, "all weights") if _configuration(outcome).trains_all else key


def _timed(outcome: Outcome) -> bool:
    return "timed" in outcome.said and failure(outcome) is None


def _short(value: float) -> float:
    return float(f"{value:.5g}")
