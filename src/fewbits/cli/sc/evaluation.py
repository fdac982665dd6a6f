"""``fewbits sc eval``: perplexity per setting, by one process or several, with the time that is left."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from fewbits.cli.console import Progress, console
from fewbits.cli.sc.common import (
    cut_text,
    grid_of,
    load_original,
    name_of,
    new_table,
    print_json,
    settings_of,
    words_of,
)
from fewbits.errors import BadInput
from fewbits.text_files import read_text

_BETWEEN_LINES = 30.0  # seconds, where no bar can be shown


def evaluate(args: Namespace) -> int:
    """Measure every setting and show the table."""
    if args.batch_size < 1:
        args.parser.error("--batch-size must be at least 1")
    settings = settings_of(args)
    rows = _rows(args, settings)
    if args.plot is not None:
        from fewbits.cli.sc.plots import draw_lines

        drawn = [r for r in rows if "length" in r and r["perplexity"] is not None]
        base = {r["setting"]: r["perplexity"] for r in rows if r["setting"] in ("as it is", "int8")}
        draw_lines(drawn, "perplexity", "perplexity", Path(args.plot), levels=base)
    if args.json:
        return print_json(rows)
    table = new_table("setting", "perplexity", "nats/token", "tokens")
    for row in rows:
        shown = "-" if row["perplexity"] is None else f"{row['perplexity']:.3f}"
        nll = "-" if row["nll"] is None else f"{row['nll']:.4f}"
        table.add_row(escape(row["setting"]), shown, nll, f"{row['tokens']:,}")
    console().print(table)
    if args.parts:
        _print_parts(rows)
    for said in _remarks(settings, rows, args.batch_size):
        console().print(said, highlight=False, soft_wrap=True, markup=False)
    if any(row["nll"] is None for row in rows):
        said = "other processes' windows are missing; when they are done, run the same without --share"
        console().print(said, highlight=False, soft_wrap=True)
    return 0


def _remarks(settings: Sequence[Any], rows: Sequence[dict[str, Any]], batch_size: int) -> Iterator[str]:
    """What a reader of the table should know of its settings."""
    for setting in settings:
        if batch_size > 1 and setting.config is not None and setting.config.is_by_call:
            yield (
                f"{setting.name}: rows' lengths depend on the other rows of a call, here {batch_size} windows"
                "; scmp_llm's evaluation has one at a time, --batch-size 1"
            )
    for row in rows:
        empty = row.get("empty_groups", [])
        if empty:
            more = f" nor into {len(empty) - 1} others" if len(empty) > 1 else ""
            yield f"{row['setting']}: no row came into {empty[0]}{more}; its thresholds do not fit this text"


def _rows(args: Namespace, settings: Sequence[Any]) -> list[dict[str, Any]]:
    from fewbits.inference.stochastic.evaluation import Ledger, evaluate_setting

    share = _share(args.share)
    text = read_text(args.text)
    ledger = Ledger(args.output, share)
    model, tokenizer = load_original(args)
    cut = cut_text(model, tokenizer, text, args)
    facts = {"model": str(args.model), "text": str(args.text), "dtype": str(model.dtype)}
    words = {name_of(options): words_of(options) for options in grid_of(args)}
    rows: list[dict[str, Any]] = []
    with Progress("tokens of all settings") as bar:
        said = _Lines(shown=not bar.shown)
        for done, setting in enumerate(settings):
            before = done * cut.num_tokens

            def show(scored: int, _: int, before: int = before, name: str = setting.name) -> None:
                bar(before + scored, len(settings) * cut.num_tokens)
                said(name, before + scored, len(settings) * cut.num_tokens)

            row = evaluate_setting(
                model, cut, setting, ledger, facts=facts, batch_size=args.batch_size, progress=show
            )
            parts = {"parts": _parts(model, cut, setting, args.batch_size)} if args.parts else {}
            rows.append({**words.get(setting.name, {}), **row, **parts})
    return rows


def _share(text: str) -> Any:
    from fewbits.inference.stochastic.evaluation import Share

    number, slash, of = text.partition("/")
    if not (slash and number.isdigit() and of.isdigit()):
        raise BadInput(f"--share is {text!r}; write the number of this process and of all, as in 1/4.")
    return Share(int(number), int(of))


def _parts(model: Any, cut: Any, setting: Any, batch_size: int) -> dict[str, float]:
    """Seconds of each part of the first batch; a first pass, in which tables are made, is not counted."""
    from fewbits.inference.evaluate import evaluating, window_nlls
    from fewbits.inference.part_times import part_times
    from fewbits.inference.stochastic.evaluation import under_setting

    batch = cut.windows[:batch_size]
    with under_setting(model, setting), evaluating(model):
        window_nlls(model, cut, batch)
        return part_times(model, lambda: window_nlls(model, cut, batch))


def _print_parts(rows: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(part for row in rows for part in row["parts"]))
    table = new_table("ms of a batch", "all", *names)
    for row in rows:
        parts = row["parts"]
        shown = (f"{1e3 * parts[name]:.1f}" if name in parts else "-" for name in names)
        table.add_row(escape(row["setting"]), f"{1e3 * sum(parts.values()):.1f}", *shown)
    console().print(table)


class _Lines:
    """Progress in lines on the error stream, for logs."""

    def __init__(self, *, shown: bool) -> None:
        self.shown, self.began, self.last = shown, time.monotonic(), time.monotonic()
        self.first: int | None = None

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if self.first is None:  # what a ledger held already took no time
            self.first, self.began = done, now
        if not self.shown or now - self.last < _BETWEEN_LINES or done <= self.first:
            return
        left = (total - done) * (now - self.began) / (done - self.first)
        self.last = now
        sys.stderr.write(f"{name}: {done:,} of {total:,} tokens of all settings, {left / 60:.1f} min left\n")
        sys.stderr.flush()
