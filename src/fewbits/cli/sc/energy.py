"""``fewbits sc energy``: joules a token beside perplexity, setting by setting."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from fewbits.cli.console import Progress, console
from fewbits.cli.sc.common import (
    cut_text,
    load_original,
    new_table,
    print_json,
    settings_of,
    windows_of,
)
from fewbits.text_files import read_text


def energy(args: Namespace) -> int:
    """Measure, price and show."""
    from fewbits.recipes.energy_prices import read_prices

    if args.batch_size < 1 or args.tokens_per_pass < 1:
        args.parser.error("--batch-size and --tokens-per-pass must be at least 1")
    prices = read_prices(args.prices[0])
    for name in args.prices[1:]:
        prices = prices.filled_from(read_prices(name))
    rows = _measured(args, prices)
    best = _mark_best(rows)
    if args.plot is not None:
        from fewbits.cli.sc.plots import draw_front

        draw_front([row for row in rows if row["perplexity"] is not None], best, Path(args.plot))
    if args.json:
        return print_json({"prices": prices.name, "source": prices.source, "settings": rows})
    table = new_table("setting", "nJ/token", "perplexity", "best", "cycles", *_PARTS)
    for row in rows:
        shown = "-" if row["perplexity"] is None else f"{row['perplexity']:.3f}"
        cycles = "-" if row["mean_cycles"] is None else f"{row['mean_cycles']:.1f}"
        parts = (f"{1e9 * row['parts'][name]:.4g}" for name in _PARTS)
        marked = "*" if row["best"] else ""
        table.add_row(escape(row["setting"]), f"{1e9 * row['joules']:.4g}", shown, marked, cycles, *parts)
    console().print(table)
    said = f"{prices.name}: {prices.source}. {args.tokens_per_pass} tokens in a pass; nJ/token, parts too."
    console().print(said, highlight=False, soft_wrap=True, markup=False)
    return 0


_PARTS = ("streams", "conversion", "integer", "float", "near", "far")


def _measured(args: Namespace, prices: Any) -> list[dict[str, Any]]:
    from fewbits.inference.stochastic.energy import energy_of
    from fewbits.inference.stochastic.evaluation import Ledger, evaluate_setting, under_setting
    from fewbits.inference.stochastic.work import count_work

    text, settings, ledger = read_text(args.text), settings_of(args), Ledger(args.output)
    model, tokenizer = load_original(args)
    cut = cut_text(model, tokenizer, text, args)
    one = windows_of(model, tokenizer, text, args)[0]
    facts = {"model": str(args.model), "text": str(args.text), "dtype": str(model.dtype)}
    energies = []
    for setting in settings:  # first of all of them: a missing price is said before an hour has passed
        with under_setting(model, setting):
            work = count_work(model, one)
        of_setting = energy_of(work, prices, tokens_per_pass=args.tokens_per_pass)
        energies.append({**of_setting.as_dict(), "mean_cycles": work.mean_cycles})
    rows = []
    with Progress("tokens of all settings") as advance:
        for done, setting in enumerate(settings):
            before = done * cut.num_tokens

            def show(scored: int, _: int, before: int = before) -> None:
                advance(before + scored, len(settings) * cut.num_tokens)

            row = evaluate_setting(
                model, cut, setting, ledger, facts=facts, batch_size=args.batch_size, progress=show
            )
            rows.append({**row, **energies[done]})
    return rows


def _mark_best(rows: Sequence[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """Note in every row whether no other beats it in both; those that none beats, by energy."""
    from fewbits.inference.stochastic.energy import best_points

    def perplexity(row: Mapping[str, Any]) -> float:
        return math.nan if row["perplexity"] is None else float(row["perplexity"])

    best = best_points(rows, (lambda row: float(row["joules"]), perplexity))
    for row in rows:
        row["best"] = any(row is one for one in best)
    return list(best)
