"""``fewbits generate --input rows.jsonl --output answers.jsonl``."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fewbits.cli.console import Progress, console
from fewbits.errors import BadInput, FewbitsError
from fewbits.inference.generate import Sampling, with_words
from fewbits.models.generation.adapters_by_row import BASE


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
        for name in ("output", "at_a_time", "row_adapter"):
            if getattr(args, name) is not None:
                raise BadInput(f"--{name.replace('_', '-')} belongs to --input; give a file of rows.")
        return
    if args.output is None:
        raise BadInput(
            "--input has no --output; name the file for the answers, as in --output answers.jsonl."
        )
    check_slots(args.at_a_time)
    _row_adapters(args)
    check_destination(args.output)
    read_rows(args.input)


def generate_words(args: Namespace) -> dict[str, Any]:
    """The words of transformers' ``generate`` that --stop, --min-p and --word say.

    Raises:
        BadInput: a --word without a value, unknown to transformers, with a flag of its own, or against one.
    """
    from transformers import GenerationConfig

    words: dict[str, Any] = {}
    if args.stop:
        words["stop_strings"] = [text.replace("\\n", "\n").replace("\\t", "\t") for text in args.stop]
    if args.min_p is not None:
        words["min_p"] = args.min_p
    for word in args.word or ():
        name, equals, text = word.partition("=")
        if name in vars(Sampling()):
            raise BadInput(f"--word {word} has a flag of its own; write --{name.replace('_', '-')} {text}.")
        if not equals or name not in vars(GenerationConfig()):
            raise BadInput(
                f"--word {word} is no word of transformers' generate; write NAME=VALUE, as in"
                " no_repeat_ngram_size=3."
            )
        try:
            words[name] = json.loads(text)
        except json.JSONDecodeError:
            words[name] = text
    if words.get("cache_implementation") is not None and args.cache is not None:
        raise BadInput(
            f"--cache {args.cache} and --word cache_implementation both say how keys and values are kept;"
            " give one of them."
        )
    with_words({"logits_processor": []}, None, dict(words))  # refused before a model is loaded
    return words


@contextmanager
def refusing(words: Mapping[str, Any]) -> Iterator[None]:
    """Turn what transformers says of these ``words`` into an error of the command line.

    Raises:
        BadInput: transformers refuses a word.
    """
    try:
        yield
    except FewbitsError:
        raise
    except (ValueError, TypeError) as error:
        if not words:
            raise
        raise BadInput(f"generate refuses {', '.join(words)}: {str(error).rstrip('.')}.") from error


def _row_adapters(args: Namespace) -> dict[str, str]:
    """The folders that --row-adapter names, by adapter.

    Raises:
        BadInput: one that is not NAME=PATH, or a name twice.
    """
    folders: dict[str, str] = {}
    for text in args.row_adapter or ():
        name, equals, folder = text.partition("=")
        if not equals or not name or not folder or "." in name:
            raise BadInput(
                f"--row-adapter {text} is not NAME=PATH; write it as in --row-adapter short=runs/short."
            )
        if name in folders or name in ("default", BASE):
            raise BadInput(f"--row-adapter {name} is there twice; give each adapter a name of its own.")
        folders[name] = folder
    return folders


def answer_rows(args: Namespace, sampling: Sampling, words: Mapping[str, Any] | None = None) -> int:
    """Answer all rows, with more ``words`` of transformers' ``generate``; 130 if the user stopped it."""
    from fewbits.cli.models import add_adapter, load, resolve
    from fewbits.inference.answer_file import answer_file

    model, tokenizer = load(args)
    by_row = _row_adapters(args)
    for name, folder in by_row.items():
        model = add_adapter(model, folder, name)
    words = {**(words or {}), **({"adapter_field": "adapter"} if by_row else {})}
    screen = console(stderr=True)
    of_model = {
        "model": resolve(args.model),
        "adapter": args.adapter,
        "recipe": args.recipe,
        "dtype": args.dtype,
        **({} if args.cache is None else {"cache": args.cache}),
        **({"row_adapters": by_row} if by_row else {}),
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
                **words,
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
