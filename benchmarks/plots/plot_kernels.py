"""The table and the plot of docs/notebook/kernels.md, from the rows of `fewbits bench kernels`.

python benchmarks/plots/plot_kernels.py --commits 2cf8954,8c86704 --svg docs/pictures/kernels.svg

A line for each case: our time, what share of it the floor is, and the peers' times over ours. Of several
commits the later one's rows replace the earlier one's.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import NamedTuple

INK, OURS = "#7f7f7f", "#3b6fd4"


class Kernel(NamedTuple):
    """One case."""

    name: str
    shape: str
    row: dict[str, str]
    peers: tuple[tuple[str, float], ...]

    @property
    def share(self) -> float:
        """The floor over our time."""
        return float(self.row["peak_share"])


def read(path: Path, commits: list[str]) -> list[Kernel]:
    """The cases of these commits, in the order of their rows."""
    found: dict[tuple[str, str], Kernel] = {}
    for commit in commits:
        found |= {(k.name, k.shape): k for k in read_one(path, commit)}
    return list(found.values())


def read_one(path: Path, commit: str) -> list[Kernel]:
    """The cases of one commit."""
    cases: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["commit"] == commit and row["command"].startswith("fewbits bench kernels"):
                key = tuple(row[k] for k in ("op", "part", "format", "M", "N", "K"))
                cases.setdefault(key, {})[row["variant"]] = row
    made = []
    for (op, part, format_, *sizes), rows in cases.items():
        ours = rows.pop("fewbits", None)
        if ours is not None and ours["peak_share"]:
            name = f"{op}, {part.replace('_', ' ')}, {format_}" if part else f"{op}, {format_}"
            peers = tuple((peer, float(row["ratio"])) for peer, row in rows.items() if row["ratio"])
            made.append(Kernel(name, " x ".join(n for n in sizes if n and n != "0"), ours, peers))
    return made


def table(kernels: list[Kernel]) -> str:
    """Markdown."""
    lines = [
        "| kernel | shape | us (quintiles) | floor's share | peers, times ours |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for k in kernels:
        us = f"{float(k.row['value']):.1f} ({float(k.row['low']):.1f} to {float(k.row['high']):.1f})"
        peers = ", ".join(f"{name} {ratio:.2f}" for name, ratio in k.peers)
        lines.append(f"| {k.name} | {k.shape} | {us} | {k.share:.0%} | {peers} |")
    return "\n".join(lines)


def plot(kernels: list[Kernel], path: Path) -> None:
    """A bar for each case: the floor's share of our time."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    settings = {
        "svg.fonttype": "none", "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
        "xtick.color": INK, "ytick.color": INK, "font.size": 8,
    }  # fmt: skip
    with plt.rc_context(settings):
        figure, axes = plt.subplots(figsize=(7.5, 0.17 * len(kernels) + 0.8))
        names = [f"{k.name}, {k.shape}" for k in kernels]
        axes.barh(range(len(kernels)), [100 * k.share for k in kernels], color=OURS, height=0.7)
        axes.set_yticks(range(len(kernels)), names)
        axes.invert_yaxis()
        axes.axvline(100, color=INK, linewidth=0.8)
        axes.set_xlabel("the floor's share of our time, %")
        axes.margins(y=0.01)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.tight_layout()
        figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=Path, default=Path("benchmarks/results.csv"))
    parser.add_argument("--commits", required=True, help="with commas between")
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    kernels = read(args.rows, args.commits.split(","))
    print(table(kernels))
    if args.svg:
        plot(kernels, args.svg)


if __name__ == "__main__":
    main()
