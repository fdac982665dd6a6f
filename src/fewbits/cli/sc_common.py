"""What the commands of ``fewbits sc`` share: options from flags, windows of text, tables."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from fewbits.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def stream_options(args: Namespace, *, halve: bool, scramble: str, length: int | None) -> Any:
    """The options of a product that the flags --prec, --chunk and --masks say."""
    from fewbits.formats.stochastic import Stochastic

    return Stochastic(
        sc_prec=args.prec,
        stoc_len=length,
        halve_bipolar_stoc_len=halve,
        chunk_d=args.chunk,
        scramble=scramble,
        n_masks=args.masks or None,
    )


def grid_of(args: Namespace) -> Iterator[Any]:
    """Every setting of --lengths, --scrambles and --halve."""
    from fewbits.inference.stochastic_error import settings_of

    base = stream_options(args, halve=False, scramble="bitrev", length=None)
    halves = {"both": (True, False), "yes": (True,), "no": (False,)}[args.halve]
    scrambles = tuple(word.strip() for word in args.scrambles.split(",") if word.strip())
    yield from settings_of(base, whole_numbers("--lengths", args.lengths), scrambles, halves)


def words_of(options: Any) -> dict[str, Any]:
    """What tells settings of a grid apart, for a row of a table."""
    return {
        "length": options.streams.length,
        "scramble": options.scramble,
        "halve": options.halve_bipolar_stoc_len,
    }


def name_of(options: Any) -> str:
    """A setting's name for readers."""
    grid = "halved" if options.halve_bipolar_stoc_len else "full"
    return f"{options.streams.length} cycles, {options.scramble}, {grid}"


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
    from fewbits.inference.stochastic_eval import EvalSetting
    from fewbits.recipes.stochastic_config import read_config

    settings = [] if args.no_baselines else [EvalSetting("as it is"), EvalSetting("int8", recipe="int8")]
    settings += [
        EvalSetting(name_of(options), config_of(options, args.attention)) for options in grid_of(args)
    ]
    return settings + [EvalSetting(path, read_config(path)) for path in args.settings]
