"""``fewbits compare``: models side by side on one text, as a table, JSON and a plot."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from fewbits.cli.console import Progress, console
from fewbits.cli.models import load
from fewbits.errors import BadInput
from fewbits.inference.compare import Compared
from fewbits.text_files import read_text
from fewbits.words import size


def compare(args: Namespace) -> int:
    """Load the models, compare each with the first, show the figures."""
    from fewbits.inference.compare import compare as measure

    if len(args.models) < 2:
        raise BadInput(
            "only one model is given; name the reference first, then the models to compare with it."
        )
    if args.batch_size < 1:
        raise BadInput(f"--batch-size is {args.batch_size}; it must be at least 1.")
    text = read_text(args.text)
    if args.plot is not None:
        from fewbits.cli.plots import check_plot

        check_plot(Path(args.plot))
    with Progress("models") as advance:
        results = measure(
            lambda name: _load(name, args),
            args.models,
            text,
            window=args.window,
            max_tokens=args.max_tokens,
            batch_size=args.batch_size,
            progress=advance,
        )
    if args.plot is not None:
        from fewbits.cli.plots import draw_sizes

        draw_sizes(results, Path(args.plot))
    if args.json:
        sys.stdout.write(json.dumps([_plain(one) for one in results], indent=2) + "\n")
        return 0
    console().print(_table(results))
    first = results[0]
    console().print(
        f"{first.tokens:,} tokens; KL and top 1 beside {first.name}, where the vocabularies are the same",
        style="dim",
        highlight=False,
        markup=False,
    )
    return 0


def _load(name: str, args: Namespace) -> tuple[Any, Any]:
    """A model by ``PATH`` or, quantised while it is loaded, ``PATH@RECIPE``."""
    path, _, recipe = name.partition("@") if not Path(name).exists() else (name, "", "")
    options = Namespace(model=path, recipe=recipe or None, adapter=None, dtype=args.dtype, device=args.device)
    return load(options)


def _plain(one: Compared) -> dict[str, Any]:
    values = asdict(one)
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _table(results: list[Compared]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    table.add_column("model", overflow="fold")
    for heading in ("KL nats", "same top 1", "perplexity", "bytes", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for i, one in enumerate(results):
        apart = ("reference", "") if i == 0 else ("-", "-")
        kl, top1 = apart if one.kl is None or one.top1 is None else (f"{one.kl:.5f}", f"{one.top1:.2%}")
        table.add_row(
            one.name, kl, top1, f"{one.perplexity:.3f}", size(one.num_bytes), f"{one.tokens_per_second:,.0f}"
        )
    return table
