"""``fewbits eval``: perplexity on a text, loss and exact match on rows, or tasks of lm-eval."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from rich.markup import escape

from fewbits.cli.console import Progress, console
from fewbits.cli.models import load
from fewbits.text_files import read_text


def evaluate(args: Namespace) -> int:
    """Measure what was asked for."""
    for name in ("batch_size", "answers", "answer_tokens", "limit"):
        value = getattr(args, name)
        if value is not None and value < (0 if name == "answers" else 1):
            least = 0 if name == "answers" else 1
            args.parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    _refuse_what_is_not_read(args)
    if args.rows is not None:
        return _rows(args)
    if args.tasks is not None:
        return _tasks(args)
    return _text(args)


_READ_WITH = {
    "text": ("window", "stride", "max_tokens"),
    "rows": ("answers", "answer_tokens", "show"),
    "tasks": ("limit",),
}


def _refuse_what_is_not_read(args: Namespace) -> None:
    """A flag of another measurement would change nothing, and look as if it had."""
    for measurement, names in _READ_WITH.items():
        flags = [name for name in names if getattr(args, name) != args.parser.get_default(name)]
        if flags and getattr(args, measurement) is None:
            args.parser.error(f"--{flags[0].replace('_', '-')} goes with --{measurement}")
    if args.show and not args.answers:
        args.parser.error("--show shows answers: say how many rows are answered, as in --answers 10")


def _text(args: Namespace) -> int:
    from fewbits.inference.evaluate import perplexity

    text = read_text(args.text)
    model, tokenizer = load(args)
    with Progress("tokens") as advance:
        result = perplexity(
            model,
            tokenizer,
            text,
            window=args.window,
            stride=args.stride,
            max_tokens=args.max_tokens,
            batch_size=args.batch_size,
            progress=advance,
        )
    if args.json:
        return _print_json(
            {"model": args.model, "text": args.text, "recipe": args.recipe, **result.as_dict()}
        )
    cache = "" if result.kv_cache is None else f", keys and values in {result.kv_cache}"
    bits = "" if result.bits_per_character is None else f"   {result.bits_per_character:.3f} bits/character"
    screen = console()
    screen.print(
        f"[bold]perplexity {result.perplexity:.3f}[/]   {result.nll:.4f} nats/token{bits}", highlight=False
    )
    how = f"{result.tokens:,} tokens, window {result.window}, stride {result.stride}, {result.seconds:.1f} s"
    screen.print(f"[dim]{how}{cache}[/]", highlight=False)
    return 0


def _rows(args: Namespace) -> int:
    from fewbits.training.data.sources import check_sources
    from fewbits.training.setup.evaluate_rows import config_for, evaluate_rows

    settings: dict[str, Any] = {"batch_size": args.batch_size, "sample_tokens": args.answer_tokens}
    config = config_for(args.model, args.rows, settings)
    check_sources(config)  # a wrong file is told before a model is loaded
    model, tokenizer = load(args)
    with Progress("batches") as advance:
        result = evaluate_rows(model, tokenizer, config, answers=args.answers, progress=advance)
    if args.json:
        return _print_json({"model": args.model, "rows_of": args.rows, **asdict(result)})
    screen = console()
    match = "" if result.exact_match is None else f"   exact match {result.exact_match:.1%}"
    screen.print(
        f"[bold]loss {result.loss:.4f}[/]   perplexity {result.perplexity:.3f}{match}", highlight=False
    )
    how = f"{result.rows:,} rows, {result.tokens:,} trained tokens, {result.answered:,} answered"
    screen.print(f"[dim]{how}[/]", highlight=False)
    for one in result.answers if args.show else ():
        screen.print(escape(one["prompt"].strip()), style="dim", highlight=False, soft_wrap=True)
        screen.print(f"  expected  {escape(one['expected'])}", highlight=False, soft_wrap=True)
        screen.print(f"  answer    {escape(one['answer'])}", highlight=False, soft_wrap=True)
    return 0


def _tasks(args: Namespace) -> int:
    from fewbits.inference.harness import run_tasks

    model, tokenizer = load(args)
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    results = run_tasks(model, tokenizer, names, limit=args.limit, batch_size=args.batch_size)
    if args.json:
        return _print_json({"model": args.model, "tasks": results})
    for task, figures in results.items():
        shown = "   ".join(f"{name} {value:.4f}" for name, value in figures.items())
        console().print(f"[bold]{escape(task)}[/]   {escape(shown)}", highlight=False, soft_wrap=True)
    return 0


def _print_json(facts: dict[str, Any]) -> int:
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}
    sys.stdout.write(json.dumps(plain, indent=2) + "\n")
    return 0
