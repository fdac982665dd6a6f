"""Flags of ``fewbits train``, one per field of `TrainConfig`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from fewbits.training.config import ALIASES, TrainConfig, help_of
from fewbits.training.config_values import parse_overrides

_PREFIX = "set_"
_METAVARS = {
    "model": "PATH",
    "recipe": "RECIPE",
    "train_data": "FILE",
    "eval_data": "FILE",
    "output_dir": "DIR",
}
_TYPES = {"int": "N", "float": "X", "tuple[str, ...]": "A,B", "dict[str, str]": "A=B"}


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--learning-rate`` for ``learning_rate``, and so on; what is not given leaves no trace."""
    groups: dict[str, Any] = {}
    for item in dataclasses.fields(TrainConfig):
        if item.name == "resume":  # the parser has it already
            continue
        name = item.metadata["group"]
        group = groups.setdefault(name) or parser.add_argument_group(name)
        groups[name] = group
        flag, dest = f"--{item.name.replace('_', '-')}", f"{_PREFIX}{item.name}"
        text = _help(item)
        if item.type == "bool":
            group.add_argument(
                flag, dest=dest, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
            continue
        choices = item.metadata["choices"] or None
        kind = str(item.type).removesuffix(" | None")
        metavar = None if choices else _METAVARS.get(item.name, _TYPES.get(kind, "TEXT"))
        group.add_argument(
            flag, dest=dest, default=argparse.SUPPRESS, choices=choices, metavar=metavar, help=text
        )


def train_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line sets, by field; flags win over ``key=value`` words."""
    words = parse_overrides(args.overrides)
    flags = {k.removeprefix(_PREFIX): v for k, v in vars(args).items() if k.startswith(_PREFIX)}
    return {k: v for k, v in words.items() if ALIASES.get(k, k) not in flags} | flags


def _help(item: dataclasses.Field[Any]) -> str:
    text = help_of(item.name).replace("%", "%%")
    if item.default in (None, dataclasses.MISSING, (), ""):
        return text
    return f"{text} (default: {str(item.default).lower() if item.type == 'bool' else item.default})"
