"""``fewbits init``: five questions, or as many flags, become a commented configuration that runs."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.prompt import Prompt

from fewbits.cli.console import console
from fewbits.errors import BadInput
from fewbits.recipes import CATALOG, get_recipe
from fewbits.training.config import METHODS, REWARDED, TrainConfig, help_of
from fewbits.training.config_values import coerce

# What people change next, written as comments with the value that holds without them.
_USUAL = (
    "max_seq_length", "packing", "batch_size", "gradient_accumulation", "epochs", "learning_rate", "lora_r",
    "eval_fraction", "memory_budget", "seed", "merge",
)  # fmt: skip


class Question(NamedTuple):
    """One setting that `init` asks for."""

    key: str
    text: str
    default: str | None
    choices: tuple[str, ...] = ()


def questions() -> tuple[Question, ...]:
    """The five, in the order in which they are asked."""
    trains = tuple(n for n, make in CATALOG.items() if make().lora is not None or make().qat is not None)
    return (
        Question("model", "Which model? (a folder, or a name on the hub)", None),
        Question(
            "train_data", "Which data? (a JSONL, JSON, CSV, Parquet or text file, or a name on the hub)", None
        ),
        Question("method", "What is learnt?", "sft", METHODS),
        Question("recipe", "In which bits?", "qlora_nf4", trains),
        Question("output_dir", "Where does the run go?", "runs/mine"),
    )


def init(args: Namespace) -> int:
    """Ask what the flags leave open, write the file, say what to do with it.

    To standard output goes the configuration alone, so that it can be sent on.
    """
    path = None if args.config == "-" else Path(args.config)  # - is standard output
    if path is not None and path.exists() and not args.overwrite:
        raise BadInput(f"{path} exists; give another name, or --overwrite to replace it.")
    told = {q.key: getattr(args, q.key) for q in questions() if getattr(args, q.key) is not None}
    answers = _answers(told, ask=_asker(args))
    if args.rewards is not None:
        answers["rewards"] = list(coerce("rewards", args.rewards, "tuple[str, ...]"))
    method = answers["method"]
    if method in REWARDED and "rewards" not in answers:
        raise BadInput(
            f"method {method} needs reward functions; name them, as in --rewards my_rewards:length."
        )
    if method not in REWARDED and "rewards" in answers:
        raise BadInput(f"rewards are for methods grpo and rloo, and the method is {method}; leave them out.")
    settings = {key: coerce(key, value, _type_of(key)) for key, value in answers.items()}
    config = TrainConfig.from_mapping(settings)
    get_recipe(config.recipe or "")  # one that nobody knows is refused now, and not by the run
    columns = _check_rows(config)
    text = written(config, settings, columns)
    if path is None:
        sys.stdout.write(text)
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    TrainConfig.from_yaml(path)  # what was written is what will be read
    console().print(f"[bold]{path}[/] is written. Next:", highlight=False)
    for line in next_steps(str(path)):
        console().print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    return 0


def next_steps(path: str) -> list[str]:
    """Commands to go on with, each of which works."""
    quoted = shlex.quote(path)
    return [
        f"fewbits {words}" for words in (f"preview {quoted}", f"train {quoted} --dry-run", f"train {quoted}")
    ]


def _asker(args: Namespace) -> Callable[[Question], str] | None:
    """Asks a person, if there is one."""
    if args.yes or not sys.stdin.isatty():
        return None
    screen = console(stderr=True)

    def ask(question: Question) -> str:
        choices = list(question.choices) or None
        answer: str | None = None
        while not answer:
            answer = Prompt.ask(
                question.text, console=screen, choices=choices, default=question.default or None
            )
        return answer

    return ask


def _answers(told: dict[str, Any], ask: Callable[[Question], str] | None) -> dict[str, Any]:
    """What the flags say; what they leave open is asked, or takes its default where nobody can be asked.

    Raises:
        BadInput: nobody can be asked, and there is no default.
    """
    answers = {}
    for question in questions():
        if question.key in told:
            answers[question.key] = told[question.key]
        elif ask is not None:
            answers[question.key] = ask(question)
        elif question.default is not None:
            answers[question.key] = question.default
        else:
            flag = f"--{question.key.replace('_', '-')}"
            raise BadInput(
                f"there is no terminal to ask in, and {flag} is missing; give it, as in {flag} PATH."
            )
    return answers


def _check_rows(config: TrainConfig) -> tuple[str, ...]:
    """The first row's columns, where the data is a file; data that the method cannot read is refused now."""
    from fewbits.training.data.rows import BadRows
    from fewbits.training.data.sources import check_sources, read_source, sources_of

    check_sources(config)
    (source,) = sources_of(config.train_data)
    row = next(iter(read_source(source, BadRows(skip=True))), None)
    if row is None:
        raise BadInput(f"{source} has no row that can be read; training needs at least one.")
    if config.method == "sft":
        from fewbits.training.data.examples import choose_format

        choose_format(config, row.values, str(source))
    else:
        from fewbits.training.preferences.rows import check_columns

        check_columns(config, row.values, str(source))
    return tuple(map(str, row.values))


def written(config: TrainConfig, settings: dict[str, Any], columns: tuple[str, ...]) -> str:
    """The configuration as YAML: what was chosen, then what people change next as comments."""
    lines = ["# Every setting: fewbits train --help. key=value on the command line wins over this file.", ""]
    for key, value in settings.items():
        lines += [*_comment(key), _line(key, value), ""]
    lines += [f"# The data's columns: {', '.join(columns)}.", ""]
    lines += ["# What people change next; without the # it holds. These are the values that hold now.", ""]
    for key in _USUAL:
        lines += [*_comment(key), f"# {_line(key, getattr(config, key))}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _comment(key: str) -> Iterator[str]:
    words, line = help_of(key).split(), "#"
    for word in words:
        if len(line) + 1 + len(word) > 100:
            yield line
            line = "#"
        line = f"{line} {word}"
    yield line


def _line(key: str, value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return str(yaml.safe_dump({key: plain}, sort_keys=False, allow_unicode=True, width=10_000)).rstrip("\n")


def _type_of(key: str) -> str:
    return next(str(item.type) for item in dataclasses.fields(TrainConfig) if item.name == key)
