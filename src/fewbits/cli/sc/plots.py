"""Plots of ``fewbits sc``, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fewbits.cli.sc.common import text_of_arithmetic
from fewbits.errors import BadInput, Unsupported


def draw_lines(
    rows: Sequence[Mapping[str, Any]],
    key: str,
    label: str,
    path: Path,
    *,
    levels: Mapping[str, float] | None = None,
) -> None:
    """One line for each (scramble, arithmetic, halve) over the stream length, on logarithmic axes.

    Args:
        rows: with "length", "scramble", "halve" and ``key``; "arithmetic" where it is not the plain one.
        key: what is drawn.
        label: of the vertical axis.
        path: .svg or .png.
        levels: horizontal lines, by their names.
    """
    figure, axes = axes_for(path)
    lines = [_line_of(row) for row in rows]
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in lines))}
    for name, halve in dict.fromkeys(lines):
        points = sorted(
            (r["length"], r[key]) for r, line in zip(rows, lines, strict=True) if line == (name, halve)
        )
        axes.plot(
            *zip(*points, strict=True),
            color=colors[name],
            marker="o" if halve else "s",
            linestyle="-" if halve else "--",
            markersize=4,
            label=f"{name}, {'halved' if halve else 'full'}",
        )
    for (level_name, level), style in zip((levels or {}).items(), (":", "-."), strict=False):
        axes.axhline(level, color="0.4", linestyle=style, label=level_name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({r["length"] for r in rows})
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.set_xlabel("stream length (cycles)")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_plot(figure, path)


def _line_of(row: Mapping[str, Any]) -> tuple[str, bool]:
    """A line's name and whether its streams are halved."""
    own = row.get("arithmetic", "plain")
    name = row["scramble"] if own == "plain" else own if "scramble=" in own else f"{row['scramble']}, {own}"
    return name, row["halve"]


def draw_front(rows: Sequence[Mapping[str, Any]], best: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Perplexity over joules a token, a point for each setting, and the line of those that none beats.

    Args:
        rows: with "setting", "joules" and "perplexity".
        best: those on the line, by energy.
        path: .svg or .png.
    """
    figure, axes = axes_for(path)
    axes.scatter([r["joules"] for r in rows], [r["perplexity"] for r in rows], s=16, color="0.6")
    axes.plot([r["joules"] for r in best], [r["perplexity"] for r in best], "o-", markersize=4)
    for row in rows:
        axes.annotate(row["setting"], (row["joules"], row["perplexity"]), fontsize=6, alpha=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("joules a token")
    axes.set_ylabel("perplexity")
    axes.grid(alpha=0.3)
    save_plot(figure, path)


def draw_table_error(options: Any, dimensions: int, path: Path) -> None:
    """The heat map of `table_error`."""
    from fewbits.inference.stochastic.error import table_error

    figure, axes = axes_for(path)
    error = table_error(options, dimensions).numpy()
    limit = max(float(abs(error).max()), 1e-9)
    image = axes.imshow(error, origin="lower", cmap="RdBu_r", vmin=-limit, vmax=limit)
    first = -options.max_code if options.streams.signed else 0
    image.set_extent((first - 0.5, options.max_code + 0.5) * 2)
    axes.set_xlabel("code of b" if first else "magnitude of b")
    axes.set_ylabel("code of a" if first else "magnitude of a")
    axes.set_title(
        f"{options.streams.length} cycles, {text_of_arithmetic(options)}, {options.scramble}: "
        "product - exact, share of full scale"
    )
    axes.title.set_fontsize(9)
    figure.colorbar(image)
    save_plot(figure, path)


def axes_for(path: Path) -> tuple[Any, Any]:
    """An empty figure and its axes; a name that no plot can have is refused."""
    if path.suffix not in (".svg", ".png"):
        raise BadInput(f"a plot is written as .svg or .png, not {path.name!r}; name such a file.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported("plots need matplotlib, which is not installed: pip install matplotlib.") from error
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    return figure, figure.subplots()


def save_plot(figure: Any, path: Path) -> None:
    """Write a figure; the same drawing gives the same file."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "fewbits"}):  # the same drawing gives the same file
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
