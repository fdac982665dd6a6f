"""What the commands of ``fewbits sc`` share: options from flags, windows of text, tables."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from fewbits.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = "plain"  # scmp_kernels' arithmetic, as a word of --arithmetic


def stream_options(args: Namespace, *, halve: bool, scramble: str, length: int | None) -> Any:
    """The options of a product that the flags --prec, --chunk, --masks and one --arithmetic say.

    Raises:
        BadInput: several --arithmetic, or one that is none.
    """
    if len(args.arithmetic) > 1:
        raise BadInput(
            "--arithmetic is given more than once; this command takes one, sweep and eval several."
        )
    text = args.arithmetic[0] if args.arithmetic else PLAIN
    return _stream_options(args, text, halve=halve, scramble=scramble, length=length)


def _stream_options(args: Namespace, text: str, *, halve: bool, scramble: str, length: int | None) -> Any:
    from fewbits.formats.stochastic import Stochastic

    options = {
        "sc_prec": args.prec,
        "stoc_len": length,
        "halve_bipolar_stoc_len": halve,
        "chunk_d": args.chunk,
        "scramble": scramble,
        "n_masks": args.masks or None,
    }
    return Stochastic(**options | arithmetic_of(text))


def arithmetic_of(text: str) -> dict[str, Any]:
    """Fields of `Stochastic` from a word of --arithmetic: "plain", or as in "gate=and,or_group=4".

    Raises:
        BadInput: another field, or a value of another kind.
    """
    from fewbits.formats.stochastic import ARITHMETIC

    fields: dict[str, Any] = {}
    for part in [] if text.strip() == PLAIN else text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in (*ARITHMETIC, "scramble"):
            raise BadInput(
                f"--arithmetic {text!r} is refused: {name!r} is no field of it; write {PLAIN!r}, or "
                f"NAME=VALUE with commas between, where NAME is {', '.join(ARITHMETIC)} or scramble."
            )
        fields[name] = _value_of(text, name, value)
    return fields


def _value_of(text: str, name: str, value: str) -> Any:
    try:
        if name == "flip_rate":
            return float(value)
        if name in ("seed_a", "seed_b") and "/" in value:
            return tuple(int(word) for word in value.split("/"))
        return value if name in ("gate", "signs", "sequence", "scramble") else int(value)
    except ValueError as error:
        raise BadInput(
            f"--arithmetic {text!r} is refused: {name} is {value!r}; give a number (seeds of Sobol sequences "
            "as in 1/3/7)."
        ) from error


def text_of_arithmetic(options: Any) -> str:
    """The inverse of `arithmetic_of`."""
    words = {
        name: "/".join(map(str, v)) if isinstance(v, tuple) else v for name, v in options.arithmetic.items()
    }
    return ",".join(f"{name}={value}" for name, value in words.items()) or PLAIN


def grid_of(args: Namespace) -> Iterator[Any]:
    """Every setting of --lengths, --scrambles, --halve and --arithmetic."""
    from fewbits.inference.stochastic.error import settings_of

    halves = {"both": (True, False), "yes": (True,), "no": (False,)}[args.halve]
    scrambles = tuple(word.strip() for word in args.scrambles.split(",") if word.strip())
    lengths = whole_numbers("--lengths", args.lengths)
    for text in args.arithmetic or [PLAIN]:
        # Halved where that is asked for alone, as cells need not fit both grids.
        base = _stream_options(args, text, halve=halves[0], scramble="bitrev", length=None)
        yield from settings_of(base, lengths, scrambles, halves)


def words_of(options: Any) -> dict[str, Any]:
    """What tells settings of a grid apart, for a row of a table."""
    return {
        "length": options.streams.length,
        "scramble": options.scramble,
        "halve": options.halve_bipolar_stoc_len,
        "arithmetic": text_of_arithmetic(options),
    }


def name_of(options: Any) -> str:
    """A setting's name for readers."""
    grid = "halved" if options.halve_bipolar_stoc_len else "full"
    own = text_of_arithmetic(options)
    return f"{options.streams.length} cycles, {options.scramble}, {grid}{'' if own == PLAIN else f', {own}'}"


def config_of(options: Any, attention: bool) -> Any:
    """A whole model at these options, with or without both attention products."""
    from fewbits.recipes.stochastic_config import AttentionSetting, StochasticConfig

    length = options.streams.length
    products = (("*", AttentionSetting(scores=length, values=length)),) if attention else ()
    return StochasticConfig(options=options, attention=products)


def whole_numbers(flag: str, text: str) -> tuple[int, ...]:
    """Numbers above zero, as in 16,32,64; ascending.

    Raises:
        BadInput: something else.
    """
    try:
        numbers = tuple(sorted({int(word) for word in text.split(",") if word.strip()}))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1:
        raise BadInput(f"{flag} {text!r} is refused: give whole numbers above zero, as in 16,32,64.")
    return numbers


def load_original(args: Namespace) -> tuple[Any, Any]:
    """The model and tokenizer of --model, whose weights are as they were trained.

    Raises:
        BadInput: the folder holds prepared or packed weights, which no other setting can be put on.
    """
    from fewbits.cli.models import load
    from fewbits.host.conversion import conversion_of

    model, tokenizer = load(args)
    if conversion_of(model) is not None:
        raise BadInput(
            f"{args.model} holds weights that are prepared or packed already; give the folder of the "
            "original model (the figures of this one as it is: fewbits eval, or fewbits sc tasks)."
        )
    return model, tokenizer


def cut_text(model: Any, tokenizer: PreTrainedTokenizerBase, text: str, args: Namespace) -> Any:
    """The text's windows, as --window, --max-tokens and --blocks say."""
    from fewbits.inference.evaluate import text_windows

    return text_windows(
        model,
        tokenizer,
        text,
        window=args.window,
        max_tokens=args.max_tokens or None,
        blocks=args.blocks,
    )


def windows_of(model: Any, tokenizer: PreTrainedTokenizerBase, text: str, args: Namespace) -> list[Any]:
    """Token ids in windows as `perplexity` cuts them, without a shorter last one if there are others."""
    import torch

    cut = cut_text(model, tokenizer, text, args)
    lead = [] if cut.bos is None else [cut.bos]
    rows = [torch.tensor([*lead, *cut.ids[w.begin : w.end].tolist()])[None] for w in cut.windows]
    return [row for row in rows if row.shape == rows[0].shape]


def new_table(*headings: str) -> Table:
    """An empty table, its first column to the left."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    return table


def print_json(plain: Any) -> int:
    """Write JSON to standard output."""
    sys.stdout.write(json.dumps(plain, indent=2) + "\n")
    return 0


def settings_of(args: Namespace) -> list[Any]:
    """The settings that ``fewbits sc eval`` and its kin compare: baselines, the grid, and files."""
    from fewbits.inference.stochastic.evaluation import EvalSetting
    from fewbits.recipes.stochastic_config import read_config

    settings = [] if args.no_baselines else [EvalSetting("as it is"), EvalSetting("int8", recipe="int8")]
    settings += [
        EvalSetting(name_of(options), config_of(options, args.attention)) for options in grid_of(args)
    ]
    for path in args.settings:
        if path.isdigit() and not Path(path).exists():
            raise BadInput(
                f"--settings takes files, and there is none called {path}; write --lengths {path}."
            )
        settings.append(EvalSetting(path, read_config(path)))
    return settings
