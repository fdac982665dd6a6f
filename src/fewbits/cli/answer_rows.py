"""``fewbits generate --input rows.jsonl --output answers.jsonl``."""

from __future__ import annotations

from argparse import Namespace

from fewbits.cli.console import Progress, console
from fewbits.errors import BadInput
from fewbits.inference.generate import Sampling


def check(args: Namespace) -> None:
    """What can be said before a model is loaded.

    Raises:
        BadInput: options that do not go together, or files that will not do.
    """
    from fewbits.inference.answer_file import check_destination, read_rows
    from fewbits.models.generation.live.plan import check_slots

    if args.lookup < 0:
        raise BadInput(f"--lookup is {args.lookup}; give a number of tokens from 1 on, or leave it out.")
    if args.lookup and args.draft is not None:
        raise BadInput("--lookup and --draft both guess tokens; give one of them.")
    if args.input is not None and (args.lookup or args.draft is not None):
        raise BadInput("--lookup and --draft guess for one text at a time; leave them out with --input.")
    if args.input is None:
        for name in ("output", "at_a_time"):
            if getattr(args, name) is not None:
                raise BadInput(f"--{name.replace('_', '-')} belongs to --input; give a file of rows.")
        return
    if args.output is None:
        raise BadInput(
            "--input has no --output; name the file for the answers, as in --output answers.jsonl."
        )
    check_slots(args.at_a_time)
    check_destination(args.output)
    read_rows(args.input)


def answer_rows(args: Namespace, sampling: Sampling) -> int:
    """Answer all rows; 130 if the user stopped it."""
    from fewbits.cli.models import load, resolve
    from fewbits.inference.answer_file import answer_file

    model, tokenizer = load(args)
    screen = console(stderr=True)
    of_model = {
        "model": resolve(args.model),
        "adapter": args.adapter,
        "recipe": args.recipe,
        "dtype": args.dtype,
    }
    try:
        with Progress("answers") as advance:
            written = answer_file(
                model,
                tokenizer,
                args.input,
                args.output,
                sampling,
                at_a_time=args.at_a_time,
                of_model={name: None if value is None else str(value) for name, value in of_model.items()},
                progress=advance,
            )
    except KeyboardInterrupt:
        screen.print(
            f"stopped; the answers so far are in {args.output}.part, and the same command goes on.",
            highlight=False,
            markup=False,
        )
        return 130
    if not args.quiet:
        report = written.report
        parts = [f"{written.rows} answers in {written.path}"]
        if written.earlier:
            parts.append(f"{written.earlier} of an earlier run")
        if written.tokens:
            parts.append(
                f"{written.tokens:,} tokens, {written.tokens / max(written.seconds, 1e-9):,.1f} tokens/s"
            )
        if report.steps:
            parts.append(f"{report.mean_texts:.1f} texts at a time")
        screen.print(f"[dim]{', '.join(parts)}[/]", highlight=False)
    return 0
