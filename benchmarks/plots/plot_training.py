"""Tables and plots of docs/notebook/training-speed.md, from the rows of `fewbits bench train`.

python benchmarks/plots/plot_training.py --commits 25576cb --shape llama-3.1-8b \\
    --svg docs/pictures/training-speed-8b.svg

Prints the tables, fastest first; of several commits the later one's figures replace the earlier one's.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import NamedTuple

from fewbits.bench.train.configurations import configuration
from fewbits.bench.train.results import plot
from fewbits.bench.train.schedule import Outcome, Task
from fewbits.bench.train.shapes import Shape, batch_of

HEAD = (
    "| configuration | tokens/s | ms a step (quintiles) | peak GiB | worst gradient error | commit |\n"
    "| --- | ---: | ---: | ---: | ---: | --- |"
)


class Measured(NamedTuple):
    """One configuration's step."""

    outcome: Outcome
    low: float
    milliseconds: float
    high: float
    gradient_error: float
    commit: str

    @property
    def tokens(self) -> float:
        """A second."""
        return float(self.outcome.said["timed"]["tokens_per_second"])

    @property
    def panel(self) -> str:
        """What it may be compared with."""
        rows, length = self.outcome.task.batch
        trains_all = ", all weights" if configuration(self.name).trains_all else ""
        return f"{self.outcome.task.shape.name}, {rows}x{length}{trains_all}"

    @property
    def name(self) -> str:
        """Of the configuration."""
        made = self.outcome.task.configuration
        assert made is not None
        return made.name


def read(path: Path, commits: list[str], shape: str) -> list[Measured]:
    """The steps of these commits, a later commit's in place of an earlier one's."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["op"].startswith(f"train_{shape}")]
    found: dict[tuple[str, ...], Measured] = {}
    for commit in commits:
        runs: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
        for row in rows:
            if row["commit"] == commit and row["part"].startswith("step "):
                runs.setdefault((row["op"], row["part"], row["variant"]), {})[row["metric"]] = row
        found |= {key: measured(key, by_metric, commit) for key, by_metric in runs.items()}
    return list(found.values())


def measured(key: tuple[str, ...], by_metric: dict[str, dict[str, str]], commit: str) -> Measured:
    """One step from its rows."""
    op, part, variant = key
    batch = batch_of(part.removeprefix("step "))
    time = by_metric["time"]
    task = Task(
        configuration=configuration(variant), shape=Shape(name=op.removeprefix("train_"), fields={}),
        batch=batch, peak_gib=0, facts={},
    )  # fmt: skip
    timed = {
        "tokens_per_second": batch[0] * batch[1] / float(time["value"]) * 1e3,
        "peak_gib": float(by_metric["peak memory"]["value"]),
    }
    error = float(by_metric["worst gradient error"]["value"])
    low, value, high = (float(time[column]) for column in ("low", "value", "high"))
    return Measured(Outcome(task, said={"timed": timed}), low, value, high, error, commit)


def tables(steps: list[Measured]) -> str:
    """A table for each shape, batch and kind of training; ours are bold."""
    made = []
    for panel in dict.fromkeys(step.panel for step in steps):
        lines = [f"**{panel}**\n", HEAD]
        for step in sorted((s for s in steps if s.panel == panel), key=lambda s: s.milliseconds):
            name = f"**{step.name}**" if step.name.startswith("ours:") else step.name
            peak = step.outcome.said["timed"]["peak_gib"]
            span = f"{step.milliseconds:.1f} ({step.low:.1f} to {step.high:.1f})"
            error = f"{step.gradient_error:.2g}"
            lines.append(f"| {name} | {step.tokens:,.0f} | {span} | {peak:.2f} | {error} | {step.commit} |")
        made.append("\n".join(lines))
    return "\n\n".join(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=Path, default=Path("benchmarks/results.csv"))
    parser.add_argument("--commits", required=True, help="with commas between, the last one's figures count")
    parser.add_argument("--shape", default="", help="only shapes whose name begins so")
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    steps = read(args.rows, args.commits.split(","), args.shape)
    print(tables(steps))
    if args.svg:
        plot([step.outcome for step in steps], args.svg)


if __name__ == "__main__":
    main()
