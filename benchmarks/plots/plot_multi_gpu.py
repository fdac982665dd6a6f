"""Draws the rows `multi_gpu_fsdp` and `multi_gpu_peer` of results.csv: step and memory of the 70B shape.

Of the last run of both: rows of one commit and day.

python benchmarks/plots/plot_multi_gpu.py --svg docs/pictures/several-gpus-70b.svg
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

_OURS, _PEER, _INK = "#3b6fd4", "#c76a2b", "#7f7f7f"  # as in fewbits.bench.train.results
_NAMES = {"fewbits": "fewbits", "fsdp2": "bitsandbytes, FSDP2", "fsdp1": "bitsandbytes, FSDP1"}


def read(path: Path, batch: str) -> dict[tuple[str, str], dict[str, float]]:
    """By variant and what was done: milliseconds and GiB, of the last run that has both sides."""
    runs: dict[tuple[str, str], dict[tuple[str, str], dict[str, float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["op"] in ("multi_gpu_fsdp", "multi_gpu_peer") and f" {batch} " in row["part"]:
                how = row["part"].split(f"{batch} a GPU")[1].removeprefix(", ").removesuffix("2 GPUs")
                key = (row["variant"], how.removesuffix(", "))
                found = runs.setdefault((row["date"], row["commit"]), {})
                found.setdefault(key, {})[row["metric"]] = float(row["value"])
    return [found for found in runs.values() if len({variant for variant, _ in found}) > 1][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results.csv")
    parser.add_argument("--batch", default="1x2048")
    parser.add_argument("--svg", type=Path, required=True)
    options = parser.parse_args()
    rows = sorted(read(options.results, options.batch).items(), key=lambda item: -item[1]["time"])
    names = [f"{_NAMES[variant]}{', ' if how else ''}{how}" for (variant, how), _ in rows]
    colours = [_OURS if variant == "fewbits" else _PEER for (variant, _), _ in rows]
    settings = {"svg.fonttype": "none", "text.color": _INK, "axes.edgecolor": _INK, "font.size": 9}
    settings |= {"xtick.color": _INK, "ytick.color": _INK}
    with plt.rc_context(settings):
        figure, panels = plt.subplots(1, 2, figsize=(8.4, 0.3 * len(rows) + 0.9), sharey=True)
        for panel, metric, title in zip(
            panels, ("time", "peak memory"), ("ms a step", "GiB of a GPU"), strict=True
        ):
            values = [figures[metric] for _, figures in rows]
            panel.barh(names, values, color=colours, height=0.68)
            for i, value in enumerate(values):
                panel.text(value, i, f" {value:,.0f}", va="center", fontsize=8)
            panel.set_title(title, fontsize=9, loc="left")
            panel.set_xlim(0, max(values) * 1.2)
            panel.xaxis.set_visible(False)
            panel.tick_params(axis="y", length=0)
            for side in ("top", "right", "bottom"):
                panel.spines[side].set_visible(False)
        figure.tight_layout()
        figure.savefig(options.svg, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
