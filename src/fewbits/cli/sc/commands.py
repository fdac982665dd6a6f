"""``fewbits sc``: the arguments, the library's answer, tables and plots. No arithmetic here."""

from __future__ import annotations

import sys
from argparse import Namespace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.markup import escape

from fewbits.cli.console import Progress, console
from fewbits.cli.sc.common import (
    PLAIN,
    grid_of,
    load_original,
    new_table,
    print_json,
    stream_options,
    whole_numbers,
    windows_of,
    words_of,
)
from fewbits.errors import BadInput
from fewbits.text_files import read_text


def sc(args: Namespace) -> int:
    """Run the subcommand; without one, show the help."""
    if args.sc_command is None:
        args.parser.print_help(sys.stderr)
        return 2
    if args.sc_command == "eval":
        from fewbits.cli.sc.evaluation import evaluate

        return evaluate(args)
    if args.sc_command == "energy":
        from fewbits.cli.sc.energy import energy

        return energy(args)
    if args.sc_command == "bundle":
        from fewbits.cli.sc.bundle import bundle

        return bundle(args)
    if args.sc_command == "fold":
        from fewbits.cli.sc.fold import fold

        return fold(args)
    if args.sc_command == "tasks":
        from fewbits.cli.sc.tasks import tasks

        return tasks(args)
    if args.sc_command in ("screen", "swap", "allocate"):
        from fewbits.cli.sc import screen as sc_screen

        called = {"screen": sc_screen.screen, "swap": sc_screen.swap, "allocate": sc_screen.allocate}
        return called[args.sc_command](args)
    return {"error": _error, "sweep": _sweep, "calibrate": _calibrate}[args.sc_command](args)


def _error(args: Namespace) -> int:
    from fewbits.inference.stochastic.error import product_error

    options = stream_options(args, halve=not args.full, scramble=args.scramble, length=args.length)
    operands = _operands(args)
    rows = {}
    with Progress("operands") as advance:
        for done, (name, pair) in enumerate(operands.items()):
            rows[name] = product_error({name: pair}, options)
            advance(done + 1, len(operands) + 1)
        whole = product_error(operands, options)
        advance(len(operands) + 1, len(operands) + 1)
    if args.heatmap is not None:
        from fewbits.cli.sc.plots import draw_table_error

        widest = max(a.shape[-1] for a, _ in operands.values())
        draw_table_error(options, options.chunk_d or widest, Path(args.heatmap))
    if args.json:
        return print_json({"all": whole.as_dict(), **{name: e.as_dict() for name, e in rows.items()}})
    table = new_table("operands", "MSE", "rel. error", "bias", "worst")
    for name, figures in [*rows.items(), ("all", whole)]:
        table.add_row(
            escape(name),
            f"{figures.mse:.4g}",
            f"{figures.relative:.4f}",
            f"{figures.bias:+.2g}",
            f"{figures.worst:.4g}",
        )
    console().print(table)
    return 0


def _sweep(args: Namespace) -> int:
    from fewbits.inference.stochastic.error import product_error

    settings = list(grid_of(args))
    operands = _operands(args)
    rows = []
    with Progress("settings") as advance:
        for done, options in enumerate(settings):
            rows.append({**words_of(options), **product_error(operands, options).as_dict()})
            advance(done + 1, len(settings))
    if args.plot is not None:
        from fewbits.cli.sc.plots import draw_lines

        draw_lines(rows, "relative", "relative error", Path(args.plot))
    if args.json:
        return print_json(rows)
    several = any(row["arithmetic"] != PLAIN for row in rows)
    own = ["arithmetic"] if several else []
    table = new_table("cycles", "scramble", "streams", *own, "MSE", "rel. error", "bias", "worst")
    for row in rows:
        table.add_row(
            str(row["length"]),
            row["scramble"],
            "halved" if row["halve"] else "full",
            *([escape(row["arithmetic"])] if several else []),
            *(f"{row[k]:.4g}" for k in ("mse", "relative", "bias", "worst")),
        )
    console().print(table)
    return 0


def _calibrate(args: Namespace) -> int:
    from fewbits.recipes.stochastic_config import write_config
    from fewbits.training.calibration.stochastic import Calibration, calibrate_stochastic

    output = Path(args.output)
    if output.suffix not in (".yaml", ".yml", ".json"):
        raise BadInput(f"--output {output} is neither .yaml nor .json; name such a file.")
    settings = Calibration(
        budget=args.budget,
        levels=whole_numbers("--levels", args.levels),
        groups=args.groups,
        smoothing=args.smoothing,
        alpha=args.alpha,
        protected=args.protected,
        int8_share=args.int8_share,
        attention=args.attention,
        rows=args.rows,
        gradients=not args.no_gradients,
    )
    options = stream_options(args, halve=True, scramble="bitrev", length=None)
    text = read_text(args.text)
    model, tokenizer = load_original(args)
    batches = windows_of(model, tokenizer, text, args)
    with Progress("linears") as advance, Progress("windows") as screening:
        config = calibrate_stochastic(
            model, batches, settings, options=options, progress=advance, screening=screening
        )
    write_config(config, output)
    figures = config.calibration
    if args.json:
        return print_json({"output": str(output), **figures})
    console().print(
        f"[bold]{escape(str(output))}[/]   {figures['mean_cycles']:.2f} cycles a product, on "
        f"{figures['tokens']:,} tokens, {100 * figures['int8_macs_share']:.1f} % of MACs INT8",
        highlight=False,
        soft_wrap=True,
    )
    if (shares := figures.get("attention_shares")) is not None:
        console().print(words_of_shares(shares), highlight=False, soft_wrap=True)
    return 0


def words_of_shares(shares: dict[str, Any]) -> str:
    """What was chosen for attention, in a sentence."""
    head = (
        f"attention: QK^T {shares['scores']} cycles, PV {shares['values']}, of {shares['tried']} shares tried"
    )
    if shares["against_equal"] is None:
        return f"{head}; none was better than equal ones."
    mean, low, high = shares["against_equal"]
    sure = "one window says not how surely" if low is None else f"95 %: {low:+.4f} to {high:+.4f}"
    return f"{head}; {mean:+.4f} nats a token against equal ones ({sure}) on this text."


def _operands(args: Namespace) -> Any:
    from fewbits.inference.stochastic.error import capture_operands, read_operands

    if (args.operands is None) == (args.model is None):
        args.parser.error("give either --operands, or --model and --text")
    if args.operands is not None:
        return read_operands(args.operands)
    if args.text is None:
        args.parser.error("--model needs --text, which it is run over")
    if args.rows < 1:
        args.parser.error("--rows must be at least 1")
    from fewbits.formats.stochastic import STOCHASTIC
    from fewbits.models.packing.convert import linears_to_replace
    from fewbits.recipes.recipe import Recipe, Rule

    text = read_text(args.text)
    model, tokenizer = load_original(args)
    linears = linears_to_replace(model, Recipe(name="all", linear=Rule(weight=STOCHASTIC)))
    names = [name for name in linears if fnmatchcase(name, args.layers)]
    if not names:
        raise BadInput(f"--layers {args.layers!r} matches no linear; the first is {next(iter(linears))}.")
    return capture_operands(model, windows_of(model, tokenizer, text, args)[0], names, rows=args.rows)
