"""``fewbits recipes`` and ``fewbits models``: what there is, read from registries, or tried."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fewbits.cli.console import Progress, console
from fewbits.errors import BadInput
from fewbits.formats.base import Format
from fewbits.recipes import CATALOG, Recipe

_SHAPE = (4096, 4096)  # of the weight whose bits are counted: a large one, so that scales weigh as they do
_STYLES = {"fused": "green", "unfused": "cyan", "refused": "red", "untried": "dim"}


@dataclass(frozen=True)
class RecipeFacts:
    """One row of ``fewbits recipes``.

    Attributes:
        name: in the catalog.
        what: the first sentence of its definition.
        bits: stored bits of a weight of the decoder's linears, scales included; 16 where it stays plain.
        trains: what a training run changes.
        products: what the matrix products multiply.
        runs_on: the lowest GPU whose units do that; a CPU always computes the reference.
    """

    name: str
    what: str
    bits: float
    trains: str
    products: str
    runs_on: str


def recipe_facts() -> list[RecipeFacts]:
    """Of every recipe in the catalog, in its order."""
    return [_facts(name, make(), make.__doc__ or "") for name, make in CATALOG.items()]


def _facts(name: str, recipe: Recipe, text: str) -> RecipeFacts:
    stored = recipe.linear.weight or (recipe.qat.weight if recipe.qat is not None else None)
    bits = 16.0 if stored is None else stored.bits_per_value(_SHAPE)
    what = " ".join(text.split()).partition(". ")[0].removesuffix(".")
    return RecipeFacts(name, what, bits, _trains(recipe), _products(recipe), _runs_on(recipe))


def _trains(recipe: Recipe) -> str:
    if recipe.lora is not None:
        through = ", through rounding" if recipe.qat is not None else ""
        return f"adapters r={recipe.lora.r}{through}"
    if recipe.qat is not None:
        return "all weights, through rounding"
    return "nothing" if recipe.linear.weight is not None else "all weights"


def _operands(recipe: Recipe) -> tuple[Format | None, ...]:
    rules = (recipe.linear, recipe.head)
    return tuple(f for rule in rules for f in (rule.weight_operand, rule.activation, rule.gradient))


def _products(recipe: Recipe) -> str:
    formats = dict.fromkeys(f.name for f in _operands(recipe) if f is not None)
    if formats:
        return ", ".join(formats)
    weight = recipe.linear.weight or (recipe.qat.weight if recipe.qat is not None else None)
    return "stochastic" if weight is not None and weight.contract.product == "stochastic" else "16 or 32 bits"


def _runs_on(recipe: Recipe) -> str:
    from fewbits.device import lowest_capability

    codings = [f.contract.coding for f in _operands(recipe) if f is not None]
    dtypes = ["float8" if coding is not None and coding.is_float8 else "bfloat16" for coding in codings]
    major, minor = max(map(lowest_capability, dtypes or ["bfloat16"]))
    return f"GPU from {major}.{minor}; CPU"


def recipes(args: Namespace) -> int:
    """``fewbits recipes``."""
    facts = recipe_facts()
    if args.json:
        sys.stdout.write(json.dumps([asdict(one) for one in facts], indent=2) + "\n")
        return 0
    table = _table("recipe", "bits", "trains", "products", "runs on", "what it is")
    for one in facts:
        table.add_row(one.name, f"{one.bits:.2f}", one.trains, one.products, one.runs_on, Text(one.what))
    console().print(table)
    console().print("[dim]bits: stored for each weight of a 4096 x 4096 linear, scales included[/]")
    return 0


def models(args: Namespace) -> int:
    """``fewbits models``: try families, those with a spec if none is named."""
    from fewbits.families.registry import known_families
    from fewbits.models.packing.trial import decoder_types, try_family

    named = [_model_type(name) for name in args.families]
    names = decoder_types() if args.all else named or known_families()
    trials = []
    with Progress("families") as advance:
        for name in names:
            trials.append(try_family(name))
            advance(len(trials), len(names))
    if args.json:
        sys.stdout.write(json.dumps([asdict(trial) for trial in trials], indent=2) + "\n")
        return 0
    table = _table("family", "outcome", "spec", "linears", "why")
    for trial in trials:
        outcome = Text(trial.outcome, style=_STYLES[trial.outcome])
        table.add_row(
            trial.model_type,
            outcome,
            "yes" if trial.has_spec else "no",
            " ".join(trial.linears),
            Text(trial.reason),
        )
    console().print(table)
    console().print(
        "[dim]each was tried here as a tiny model. fused: works, through fewbits' fast decoder layers;\n"
        "unfused: works, through transformers' layers; refused: does not work; untried: no tiny model could"
        " be built[/]"
    )
    return 0


def _model_type(name: str) -> str:
    """A family's name, or that of the model in a folder."""
    path = Path(name)
    if not path.is_dir():
        return name
    try:
        config: Any = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return str(config["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{path} has no config.json that names a model_type; give a model's folder."
        ) from error


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for heading in headings:
        folds = heading in ("what it is", "why", "linears", "trains")
        table.add_column(
            heading, no_wrap=not folds, overflow="fold", justify="right" if heading == "bits" else "left"
        )
    return table
