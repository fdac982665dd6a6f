"""Draw what SC-QAT brings at several stream lengths, from the files of sc_qat_stories3m.py.

python benchmarks/plots/plot_sc_qat.py --text tinystories \\
    --to docs/pictures/stochastic-qat.svg qat_lora_tinystories_*.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

LINES = {
    "SC": ("under SC", "C3", "-"),
    "control: that one under SC": ("trained in float32, then under SC", "C1", "--"),
    "SC after SC-QAT, prepared": ("under SC after SC-QAT", "C0", "-"),
    "float32": ("float32", "0.4", ":"),
    "control: float32 trained": ("float32, trained", "0.4", "-."),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--to", required=True, type=Path)
    args = parser.parse_args()
    points: dict[str, list[tuple[int, float]]] = {name: [] for name in LINES}
    for file in args.files:
        figures = json.loads(file.read_text())
        for row in figures["rows"]:
            if row["text"] == args.text:
                points[row["row"]].append((figures["settings"]["cycles"], row["perplexity"]))
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, (label, color, style) in LINES.items():
        axes.plot(*zip(*sorted(points[name]), strict=True), style, color=color, marker="o", markersize=4)
        axes.lines[-1].set_label(label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    cycles = sorted(n for n, _ in points["SC"])
    axes.set_xticks(cycles, [str(n) for n in cycles])
    axes.set_xlabel("stream length (cycles)")
    axes.set_ylabel(f"perplexity, {args.text}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    with rc_context({"svg.hashsalt": "fewbits"}):
        figure.savefig(args.to, metadata={"Date": None})


if __name__ == "__main__":
    main()
