"""``fewbits sc tasks``: tasks of lm-eval under stochastic settings, each with the receipt of what ran."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from rich.markup import escape

from fewbits.cli.console import console
from fewbits.cli.sc.common import config_of, load_original, print_json, stream_options
from fewbits.errors import BadInput


def tasks(args: Namespace) -> int:
    """Run the tasks under every setting, and show their figures."""
    from fewbits.inference.stochastic.evaluation import EvalSetting
    from fewbits.inference.stochastic.tasks import tasks_under

    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    settings = _settings(args)
    if settings:
        model, tokenizer = load_original(args)
    else:
        from fewbits.cli.models import load

        model, tokenizer = load(args)
        settings = [EvalSetting("as it is")]
    options = {"limit": args.limit, "batch_size": args.batch_size, "folder": args.task_folder}
    results = []
    for setting in settings:
        result = tasks_under(model, tokenizer, names, setting, **options)
        results.append(result)
        if not args.json:
            _show(result)
    if args.json:
        return print_json([vars(result) for result in results])
    return 0


def _settings(args: Namespace) -> list[Any]:
    from fewbits.inference.stochastic.evaluation import EvalSetting
    from fewbits.recipes.stochastic_config import read_config

    if args.attention and not any(word.isdigit() for word in args.settings):
        raise BadInput("--attention goes with a stream length as --settings; a file says it itself.")
    settings = []
    for word in args.settings:
        if word.isdigit():
            options = stream_options(args, halve=True, scramble="bitrev", length=int(word))
            settings.append(EvalSetting(f"{word} cycles", config_of(options, args.attention)))
        else:
            settings.append(EvalSetting(word, read_config(word)))
    return settings


def _show(result: Any) -> None:
    screen = console()
    screen.print(f"[bold]{escape(result.setting)}[/]", highlight=False, soft_wrap=True)
    for task, figures in result.figures.items():
        shown = "   ".join(f"{name} {value:.4f}" for name, value in figures.items())
        screen.print(f"  {escape(task)}   {escape(shown)}", highlight=False, soft_wrap=True)
    receipt = result.receipt or "nothing ran in streams or INT8 codes"
    screen.print(f"  {receipt}", style="dim", highlight=False, soft_wrap=True, markup=False)
