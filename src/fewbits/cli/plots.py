"""The plot of ``fewbits compare``, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fewbits.cli.sc.plots import axes_for, save_plot
from fewbits.inference.compare import Compared


def check_plot(path: Path) -> None:
    """Refuse a name that no plot can have, or a missing matplotlib, before anything is measured.

    Raises:
        BadInput, Unsupported: one of the two.
    """
    axes_for(path)


def draw_sizes(results: Sequence[Compared], path: Path) -> None:
    """Bytes against the distance to the reference: KL where there is one for all, else perplexity."""
    figure, axes = axes_for(path)
    others = [one for one in results[1:] if one.kl is not None]
    by_kl = len(others) == len(results) - 1
    shown = others if by_kl else list(results)
    for one in shown:
        value = one.kl if by_kl else one.perplexity
        axes.scatter([one.num_bytes / 2**20], [value], s=30)
        axes.annotate(
            one.name, (one.num_bytes / 2**20, value), fontsize=8, xytext=(5, 4), textcoords="offset points"
        )
    axes.set_xlabel("MiB of weights")
    axes.set_ylabel(f"KL from {results[0].name}, nats a token" if by_kl else "perplexity")
    axes.grid(alpha=0.3)
    axes.margins(0.2)
    save_plot(figure, path)
