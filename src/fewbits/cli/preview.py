"""``fewbits preview``: a run's rows in the terminal, trained tokens coloured, and as one HTML file."""

from __future__ import annotations

import webbrowser
from argparse import Namespace
from pathlib import Path

from rich.text import Text

from fewbits.cli.console import console
from fewbits.errors import BadInput
from fewbits.training.ahead.preview import Shown, preview
from fewbits.training.ahead.preview_page import figures, page
from fewbits.training.config import TrainConfig
from fewbits.training.config_values import parse_overrides

_BARS = 40  # characters of the longest bar


def run(args: Namespace) -> int:
    """Read the data as a run would, and show it."""
    if args.rows < 0:
        raise BadInput(f"--rows is {args.rows}; it must not be negative.")
    config = TrainConfig.from_yaml(args.config, parse_overrides(args.overrides))
    result = preview(config, args.rows)
    screen = console()
    for shown in result.shown:
        screen.print(_row(shown, coloured=screen.is_terminal), soft_wrap=True)
    screen.print(result.report, style="bold", highlight=False, soft_wrap=True, markup=False)
    for name, value in figures(result):
        screen.print(f"  {name:<16}{value}", highlight=False, markup=False)
    most = max(count for _, _, count in result.bins)
    for low, high, count in result.bins:
        bar = "#" * round(_BARS * count / most)
        screen.print(f"  {low:>8,} to {high:<8,} {bar} {count:,}", highlight=False, markup=False)
    for note in result.notes:
        screen.print(note, highlight=False, markup=False, soft_wrap=True)
    if args.html is not None:
        path = Path(args.html)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(result, f"Preview of {args.config}"), encoding="utf-8")
        screen.print(str(path), style="bold", highlight=False, markup=False, soft_wrap=True)
        if args.open:
            webbrowser.open(path.resolve().as_uri())
    return 0


def _row(shown: Shown, *, coloured: bool) -> Text:
    name = f" {shown.name}" if shown.name else ""
    text = Text(f"row {shown.row}{name}: {shown.tokens:,} tokens, {shown.trained:,} trained\n", style="dim")
    for part, trained in shown.parts:
        marks = ("", "") if coloured or not trained else ("[[", "]]")  # a file has no colours
        text.append(f"{marks[0]}{part}{marks[1]}", style="not dim green" if trained else "not dim")
    return text.append("\n")
