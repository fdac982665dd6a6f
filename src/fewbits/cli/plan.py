"""``fewbits plan``: the memory plan of every recipe on a GPU that need not be there."""

from __future__ import annotations

import json
import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fewbits.cli.console import console
from fewbits.errors import BadInput
from fewbits.models.packing.model_shapes import numbers_of
from fewbits.recipes import get_recipe
from fewbits.training.ahead.gpu_plan import (
    Gpu,
    RecipePlan,
    fastest,
    gpu_named,
    is_planned,
    plan_recipe,
    trainable_recipes,
)
from fewbits.words import size

_USUAL_TOKENS = 2048


def plan(args: Namespace) -> int:
    """Read the question, ask the model of memory, show every recipe."""
    gpu = gpu_named(args.gpu)
    config = config_of(args.model)
    batch = _usual_batch(config) if args.batch is None else batch_of(args.batch)
    _check_length(config, batch)
    names = trainable_recipes()
    if args.recipe is not None and not is_planned(get_recipe(args.recipe)):
        raise BadInput(f"fewbits plan cannot predict recipe {args.recipe}; choose one of {', '.join(names)}.")
    plans = [
        plan_recipe(config, name, gpu, batch=batch, optimizer=args.optimizer)
        for name in (names if args.recipe is None else [args.recipe])
    ]
    best = fastest(plans)
    if args.json:
        facts = {
            "gpu": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "budget_bytes": gpu.budget_bytes,
            "batch": list(batch),
            "fastest": None if best is None else best.recipe,
            "recipes": [_facts(one) for one in plans],
        }
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return 0
    _show(args, batch, gpu, plans, best)
    return 0


def config_of(name: str) -> dict[str, Any]:
    """The mapping in a model's config.json: of a folder, of the file itself, or of a model on the hub.

    Raises:
        BadInput: there is none that can be read.
    """
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise BadInput(f"{name} has no config.json; give a model's folder, or its config.json.")
        try:
            config: Any = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadInput(f"{file} is no JSON ({error}); restore the file.") from error
        if not isinstance(config, dict):
            raise BadInput(f"{file} holds no object; restore the file.")
        return config
    from transformers import PreTrainedConfig

    try:
        plain: dict[str, Any] = PreTrainedConfig.get_config_dict(name)[0]
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{name} is no folder, and its config.json could not be had from the hub; check the name and the"
            " network, or give a folder."
        ) from error
    if not plain:
        raise BadInput(f"{name} has no config.json; give a model's folder, or its name on the hub.")
    return plain


def batch_of(text: str) -> tuple[int, int]:
    """Sequences and tokens of a batch written as 4x2048.

    Raises:
        BadInput: it is written otherwise.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,6})", text)
    if match is None:
        raise BadInput(f"--batch is {text!r}; write sequences x tokens, as in 4x2048.")
    return int(match[1]), int(match[2])


def _usual_batch(config: dict[str, Any]) -> tuple[int, int]:
    """One sequence of 2,048 tokens, or of as many as the model allows."""
    longest = numbers_of(config).get("max_position_embeddings")
    return 1, min(_USUAL_TOKENS, int(longest or _USUAL_TOKENS))


def _check_length(config: dict[str, Any], batch: tuple[int, int]) -> None:
    longest = numbers_of(config).get("max_position_embeddings")
    if longest and batch[1] > int(longest):
        raise BadInput(
            f"--batch asks for sequences of {batch[1]:,} tokens, but the model allows sequences of at most"
            f" {int(longest):,}; ask for shorter ones."
        )


def _facts(one: RecipePlan) -> dict[str, Any]:
    static, plan = one.plan.predicted.static, one.plan
    return {
        "recipe": one.recipe,
        "weights": static.weights,
        "lora": static.lora,
        "gradients": static.gradients,
        "optimizer": static.optimizer,
        "activations": plan.predicted.dynamic,
        "total": plan.predicted.total,
        "fits": one.fits,
        "why_not": one.why_not,
        "largest_batch": one.largest_batch,
        "longest_sequence": one.longest,
        "layers": str(plan).partition(";")[0],
    }


def _show(
    args: Namespace, batch: tuple[int, int], gpu: Gpu, plans: list[RecipePlan], best: RecipePlan | None
) -> None:
    screen = console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    table.add_column("recipe", no_wrap=True)
    for heading in ("weights", "adapters", "gradients", "optimizer", "activations", "total"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("fits", overflow="fold")
    for heading in ("largest batch", "longest row"):
        table.add_column(heading, justify="right")
    for one in plans:
        static = one.plan.predicted.static
        parts = (static.weights, static.lora, static.gradients, static.optimizer, one.plan.predicted.dynamic)
        table.add_row(
            Text(one.recipe, style="bold" if one is best else ""),
            *map(size, parts),
            Text(size(one.plan.predicted.total), style="green" if one.fits else "red"),
            one.why_not or ("yes" if one.fits else "no"),
            f"{one.largest_batch:,}",
            f"{one.longest:,}",
        )
    screen.print(table)
    memory, usable = size(gpu.memory_bytes), size(gpu.budget_bytes)
    screen.print(
        f"{gpu.name}: {memory}, of which a run may use {usable}; batch {batch[0]}x{batch[1]}; largest batch:"
        f" sequences of {batch[1]} tokens in one pass;\nactivations with values of weights that are kept"
        " beside them, where there is room; predicted from shapes",
        style="dim",
        highlight=False,
    )
    if best is None:
        screen.print("nothing fits; take a shorter sequence, a smaller model or a larger GPU", style="bold")
        return
    screen.print(f"fastest that fits: [bold]{best.recipe}[/]; {str(best.plan).partition(';')[0]}")
    flags = f"--model {shlex.quote(args.model)} --recipe {shlex.quote(best.recipe)}"
    screen.print(f"next: fewbits init {flags}", highlight=False, soft_wrap=True)
