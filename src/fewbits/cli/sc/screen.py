"""``fewbits sc screen``, ``swap`` and ``allocate``: candidates compared, operators swapped, cycles spent."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.markup import escape

from fewbits.cli.console import Progress, console
from fewbits.cli.sc.common import (
    config_of,
    cut_text,
    load_original,
    new_table,
    print_json,
    stream_options,
    whole_numbers,
)
from fewbits.errors import BadInput
from fewbits.text_files import read_text


def screen(args: Namespace) -> int:
    """Compare candidates with a base."""
    from fewbits.inference.stochastic import screen as stochastic_screen
    from fewbits.recipes.stochastic_config import read_config

    settings = stochastic_screen.Screening(
        batch_size=args.batch_size, stop=not args.no_stop, confidence=args.confidence, least=args.least
    )
    base = _base(args)
    candidates = [stochastic_screen.Candidate(path, read_config(path)) for path in args.candidates]
    model, cut = _model_and_windows(args)
    with Progress("windows of all candidates") as advance:
        result = stochastic_screen.screen(
            model,
            cut,
            base,
            candidates,
            settings,
            board=args.board,
            progress=advance,
            facts={"folder": str(args.model)},
        )
    rows = [_row(row) for row in result.rows]
    base_cycles = result.base_steps / result.base_macs if result.base_macs else 0.0
    if args.json:
        return print_json({"base_nll": result.base_nll, "base_cycles": base_cycles, "candidates": rows})
    table = new_table("candidate", "nats/token against base", "interval", "windows", "cycles", "")
    for row in rows:
        table.add_row(
            escape(row["candidate"]),
            f"{row['difference']:+.5f}",
            f"{row['low']:+.5f} to {row['high']:+.5f}",
            str(row["windows"]),
            f"{row['cycles']:.2f}",
            "given up" if row["given_up"] else "",
        )
    console().print(table)
    said = f"base: {result.base_nll:.5f} nats/token at {base_cycles:.2f} cycles; "
    said += f"{100 * args.confidence:g} % intervals"
    console().print(said, highlight=False, soft_wrap=True)
    return 0


def _row(row: Any) -> dict[str, Any]:
    against = row.against_base
    return {
        "candidate": row.candidate.name,
        "difference": against.mean,
        "low": against.low,
        "high": against.high,
        "windows": against.windows,
        "cycles": row.cycles,
        "first_layer": row.first_layer,
        "given_up": row.given_up,
    }


def swap(args: Namespace) -> int:
    """Measure the swap table."""
    from fewbits.inference.stochastic import swap as stochastic_swap
    from fewbits.inference.stochastic.screen import Screening

    settings = Screening(batch_size=args.batch_size, stop=False, confidence=args.confidence)
    to = _settings_named(args.to)
    base = _base(args)
    model, cut = _model_and_windows(args)
    chosen = stochastic_swap.operators(model, base, buckets=args.buckets, tied=args.tied)
    with Progress("windows of all swaps") as advance:
        table = stochastic_swap.swap_table(
            model, cut, base, to, chosen, settings=settings, board=args.board, progress=advance
        )
    if args.output is not None:
        stochastic_swap.write_swaps(table, args.output)
    rows: list[dict[str, Any]] = []
    for one in table.swaps:
        loss, freed = table.loss(one, args.confidence), one.freed
        per_cycle = None if freed == 0 else loss.mean / freed
        rows.append(
            {
                "operator": one.operator.name,
                "to": one.to,
                "macs": table.macs[one.operator.name],
                "freed": freed,
                "loss": loss.mean,
                "low": loss.low,
                "high": loss.high,
                "per_cycle": per_cycle,
            }
        )
    if args.json:
        return print_json({"base_nll": table.base_nll, "swaps": rows})
    shown = new_table("operator", "to", "MACs", "freed", "loss", "interval", "loss/freed cycle")
    for row in rows:
        shown.add_row(
            escape(row["operator"]),
            str(row["to"]),
            f"{100 * row['macs']:.1f} %",
            f"{row['freed']:+.3f}",
            f"{row['loss']:+.5f}",
            f"{row['low']:+.5f} to {row['high']:+.5f}",
            "-" if row["per_cycle"] is None else f"{row['per_cycle']:.5f}",
        )
    console().print(shown)
    said = (
        f"base: {table.base_nll:.5f} nats/token; losses in nats/token, {100 * args.confidence:g} % intervals"
    )
    console().print(said, highlight=False, soft_wrap=True)
    return 0


def allocate(args: Namespace) -> int:
    """Spend a budget by a swap table."""
    from fewbits.inference.stochastic.swap import read_swaps
    from fewbits.recipes.stochastic_config import write_config
    from fewbits.training.calibration import stochastic_allocation

    output = Path(args.output)
    if output.suffix not in (".yaml", ".yml", ".json"):
        raise BadInput(f"--output {output} is neither .yaml nor .json; name such a file.")
    budget = stochastic_allocation.Budget(
        cycles=args.budget,
        over=args.over,
        int8_cycles=args.int8_cycles,
        levels=None if args.levels is None else whole_numbers("--levels", args.levels),
        int8=args.int8,
        risk=args.risk,
        folds=args.folds,
        resamples=args.resamples,
    )
    result = stochastic_allocation.allocate(read_swaps(args.swaps), budget)
    write_config(result.config, output)
    if args.json:
        plain = {
            "output": str(output),
            "cycles": result.cycles,
            "settings": dict(result.settings),
            "agreement": dict(result.agreement),
            "exact": result.exact,
            "predicted": vars(result.predicted),
            "held_out": vars(result.held_out),
        }
        return print_json(json.loads(json.dumps(plain)))
    table = new_table("operator", "setting", "resamples that agree")
    for name, setting in result.settings.items():
        agreed = "-" if name not in result.agreement else f"{100 * result.agreement[name]:.0f} %"
        table.add_row(escape(name), str(setting), agreed)
    console().print(table)
    held = result.held_out
    said = (
        f"[bold]{escape(str(output))}[/]   {result.cycles:.2f} cycles over {args.over} products; expected "
        f"{held.mean:+.5f} nats/token against the base ({held.low:+.5f} to {held.high:+.5f}, on windows that "
        f"did not choose; {result.predicted.mean:+.5f} on those that did)"
    )
    console().print(said, highlight=False, soft_wrap=True)
    if args.over == "stochastic" and result.cycles == 0:
        free = (
            "no product is left in streams: INT8 products count nothing over stochastic ones; give a price "
        )
        console().print(free + "to theirs with --over all --int8-cycles N", highlight=False, soft_wrap=True)
    return 0


def _settings_named(text: str) -> list[int | str]:
    from fewbits.inference.stochastic.swap import bits_of, times_of

    words = dict.fromkeys(word.strip() for word in text.split(",") if word.strip())
    others = [word for word in words if word[0] in "xi"]
    for word in others:
        times_of(word) or bits_of(word)  # raises for what is neither
    numbers = [word for word in words if word not in others]
    lengths: list[int | str] = list(whole_numbers("--to", ",".join(numbers))) if numbers or not others else []
    return [*lengths, *others]


def _base(args: Namespace) -> Any:
    from fewbits.recipes.stochastic_config import read_config

    if str(args.base).isdigit():
        options = stream_options(args, halve=True, scramble="bitrev", length=int(args.base))
        return config_of(options, args.attention)
    if args.attention:
        args.parser.error("--attention goes with a stream length as --base; a file says it itself")
    return read_config(args.base)


def _model_and_windows(args: Namespace) -> tuple[Any, Any]:

    text = read_text(args.text)
    model, tokenizer = load_original(args)
    return model, cut_text(model, tokenizer, text, args)
