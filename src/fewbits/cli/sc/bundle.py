"""``fewbits sc bundle``: configurations of scmp_llm, in and out."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.markup import escape

from fewbits.cli.console import console
from fewbits.cli.sc.common import load_original, print_json
from fewbits.errors import BadInput


def bundle(args: Namespace) -> int:
    """Read a bundle, or write one."""
    if (args.wrapper is None) == (args.settings is None):
        args.parser.error("give either --wrapper, to read, or --settings, to write")
    if args.settings is not None and args.model is None:
        args.parser.error("--settings needs --model, whose layers the bundle is for")
    files = _write(args) if args.settings is not None else _read(args)
    if args.json:
        return print_json({"written": files})
    for file in files:
        console().print(f"[bold]{escape(file)}[/]", highlight=False, soft_wrap=True)
    return 0


def _read(args: Namespace) -> list[str]:
    from fewbits.models.stochastic.in_model import check_config
    from fewbits.recipes.scmp_bundles import read_bundle
    from fewbits.recipes.stochastic_config import write_config

    output = Path(args.output)
    if output.suffix not in (".yaml", ".yml", ".json"):
        raise BadInput(f"--output {output} is neither .yaml nor .json; name such a file.")
    model = None if args.model is None else _model(args)
    layers = args.layers
    if layers is None and model is not None:
        layers = model.config.get_text_config().num_hidden_layers
    config = read_bundle(args.wrapper, hybrid=args.hybrid, num_layers=layers)
    if model is not None:
        check_config(model, config)
    write_config(config, output)
    return [str(output)]


def _write(args: Namespace) -> list[str]:
    from fewbits.host.attention import attention_modules
    from fewbits.models.stochastic.in_model import check_config
    from fewbits.models.stochastic.switch import linear_names
    from fewbits.recipes.scmp_bundles import write_bundle
    from fewbits.recipes.stochastic_config import read_config

    config, model = read_config(args.settings), _model(args)
    check_config(model, config)
    attentions = [name for name, _ in attention_modules(model)]
    written = write_bundle(config, args.output, linear_names(model, config.options), attentions)
    return [str(file) for file in written]


def _model(args: Namespace) -> Any:

    return load_original(args)[0]
