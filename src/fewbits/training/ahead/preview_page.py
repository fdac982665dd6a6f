"""A preview as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from fewbits.training.ahead.preview import Preview, Shown
from fewbits.training.report.style import STYLE

_OWN = """
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: 14px 16px; font-size: 13px; }
pre .trained { background: var(--good-bg); color: var(--good); border-radius: 3px; }
.row { margin: 0 0 14px; }
.row h3 { padding: 12px 16px 0; color: var(--soft); }
.bar { fill: var(--c1); }
.axis { fill: var(--soft); font-size: 11px; }
"""


def page(preview: Preview, title: str) -> str:
    """The whole page."""
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}{_OWN}</style></head><body><main>",
            f'<header><div class="mark">fewbits preview</div><h1>{escape(title)}</h1>',
            f'<p class="about">{escape(preview.report)}</p></header>',
            *_tiles(preview),
            *(f'<p class="message note">{escape(note)}</p>' for note in preview.notes),
            "<h2>Lengths</h2>",
            f'<div class="card panel">{_histogram(preview)}</div>',
            "<h2>Rows as the model sees them</h2>",
            '<p class="about">Tokens that the loss counts are coloured.</p>',
            *map(_row, preview.shown),
            "</main></body></html>",
            "",
        )
    )


def figures(preview: Preview) -> Iterator[tuple[str, str]]:
    """Names and values of what is counted."""
    yield "tokens", f"{preview.tokens:,}"
    yield "trained", f"{preview.trained / max(1, preview.tokens):.1%} of the tokens"
    for name, value in preview.quantiles.items():
        yield f"{name} row", f"{value:,} tokens"
    yield "max_seq_length", f"{preview.max_length:,}"
    yield "single rows", f"{preview.padded:.1%} of what is computed is no padding"
    if preview.packed is not None:
        yield "packed", f"{preview.packed:.1%} of what is computed is no padding"


def _tiles(preview: Preview) -> Iterator[str]:
    yield '<section class="tiles">'
    for name, value in figures(preview):
        number, _, more = value.partition(" ")
        yield (
            f'<div class="card tile"><div class="name">{escape(name)}</div>'
            f'<div class="value">{escape(number)}</div><div class="more">{escape(more)}</div></div>'
        )
    yield "</section>"


def _histogram(preview: Preview) -> str:
    bins = preview.bins
    most = max(count for _, _, count in bins)
    marks = []
    for i, (low, high, count) in enumerate(bins):
        height = 120 * count / most
        marks.append(
            f'<rect class="bar" x="{i * 96 + 4}" y="{140 - height:.1f}" width="88" height="{height:.1f}">'
            f"<title>{low:,} to {high:,} tokens: {count:,} rows</title></rect>"
            f'<text class="axis" x="{i * 96 + 48}" y="156" text-anchor="middle">{high:,}</text>'
        )
    return f'<svg viewBox="0 0 960 162" width="100%" role="img">{"".join(marks)}</svg>'


def _row(shown: Shown) -> str:
    name = f" {shown.name}" if shown.name else ""
    head = f"row {shown.row}{name}: {shown.tokens:,} tokens, {shown.trained:,} trained"
    text = "".join(
        f'<span class="trained">{escape(part)}</span>' if trained else escape(part)
        for part, trained in shown.parts
    )
    return f'<div class="card row"><h3>{escape(head)}</h3><pre>{text}</pre></div>'
