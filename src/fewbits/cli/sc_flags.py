"""The arguments of ``fewbits sc``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from fewbits.cli.texts import Text

SC_TEXTS = {
    "error": Text(
        "the error of one setting on given or captured operands",
        "Mean squared error, bias and worst case of stochastic products against exact ones, on the operands\n"
        "of a file or on what a model's linears multiply, and a heat map of the product table.",
        """
fewbits sc error --operands ab.safetensors --length 32
fewbits sc error --model models/stories3m --text story.txt --length 64 --heatmap table.svg
""",
    ),
    "sweep": Text(
        "the error over stream length, scramble and halving",
        "The error of every combination of stream length, scramble and halving, as a table and a plot.",
        """
fewbits sc sweep --model models/stories3m --text story.txt --plot sweep.svg
fewbits sc sweep --operands ab.npz --lengths 16,32,64 --scrambles bitrev,off --json
""",
    ),
    "eval": Text(
        "perplexity per setting, beside the original and INT8",
        "Perplexity of a model on a text under stochastic settings, beside the model as it is and INT8.\n"
        "With --output a run that was stopped goes on where it stopped; what is done is not done again.\n"
        "Several processes side by side take --share 1/4 ... 4/4 of the windows and meet in that file.",
        """
fewbits sc eval --model models/stories3m --text story.txt --lengths 16,32,64,128 --attention
fewbits sc eval --model models/llama --text wiki.txt --settings mixed.yaml --output eval.jsonl
""",
    ),
    "energy": Text(
        "joules a token against perplexity, at the prices of a hardware",
        "What a token costs under each setting, priced operation by operation (streams, conversion, INT and\n"
        "FP products, memory), beside its perplexity, and the settings that no other beats in both.",
        """
fewbits sc energy --model models/stories3m --text story.txt --prices horowitz-45nm --attention
fewbits sc energy --model models/llama --text wiki.txt --prices cell.yaml --prices jouppi-7nm
""",
    ),
    "screen": Text(
        "many configurations against a base: paired differences, the worse given up early",
        "Evaluate candidates on the same windows as a base; what comes before a candidate's first changed\n"
        "layer is computed once. With --board a screen that was stopped goes on where it stopped.",
        """
fewbits sc screen --model models/llama --text wiki.txt --base mixed.yaml --candidates a.yaml b.yaml c.yaml
fewbits sc screen --model models/stories3m --text story.txt --base 32 --candidates *.yaml --board b.jsonl
""",
    ),
    "swap": Text(
        "one operator at a time at other stream lengths: loss per freed cycle",
        "Measure what every operator (q_proj ... down_proj, scores, values) loses or gains at other stream\n"
        "lengths or in INT8, over all layers or buckets of them, with confidence intervals.",
        """
fewbits sc swap --model models/stories3m --text story.txt --base 32 --attention --to 16,24,48,64,int8
fewbits sc swap --model models/llama --text wiki.txt --base 32 --buckets 4 --tied --output swaps.json
""",
    ),
    "allocate": Text(
        "spend a budget of cycles by a swap table",
        "The best settings under a budget, by the measured losses of fewbits sc swap: a knapsack, with the\n"
        "loss estimated on windows that did not choose, and how often resamples of the windows agree.",
        """
fewbits sc allocate --swaps swaps.json --budget 32 --output mixed.yaml
fewbits sc allocate --swaps swaps.json --budget 32 --over all --int8 --int8-cycles 32 --output m.yaml
""",
    ),
    "bundle": Text(
        "read and write configurations of scmp_llm",
        "Turn a wrapper with its table, and a schedule of INT blocks, into a configuration, or the other\n"
        "way round. What either side cannot say is refused.",
        """
fewbits sc bundle --wrapper cell/wrapper.json --hybrid cell/hybrid.json --output c.yaml
fewbits sc bundle --settings mixed.yaml --model models/llama --output bundle
""",
    ),
    "calibrate": Text(
        "write a configuration: smoothing, stream lengths, INT8 mask",
        "Run a model over text and write the configuration of its stochastic products: SmoothQuant or AWQ\n"
        "scales, protected channels, an INT8 mask, and stream lengths under a budget of cycles.",
        """
fewbits sc calibrate --model models/stories3m --text story.txt --budget 48 --output mixed.yaml
fewbits sc calibrate --model models/llama --text wiki.txt --budget 32 --smoothing awq --output mixed.json
""",
    ),
}

_ON_A_MODEL = ("eval", "energy", "screen", "swap", "calibrate")  # the others may have operands from a file


def add_sc_flags(
    sub: Any, new_command: Callable[..., Any], model_options: Callable[[Any, bool], None]
) -> None:
    """Give ``sub`` its own subcommands.

    Args:
        sub: the parser of ``sc``.
        new_command: makes one, from (subparsers, name, text).
        model_options: adds --model and its kin; (parser, whether --model is required).
    """
    commands = sub.add_subparsers(title="commands", dest="sc_command", metavar="COMMAND")
    for name, text in SC_TEXTS.items():
        command = new_command(commands, name, text)
        if name in ("allocate", "bundle"):
            {"allocate": _allocate_flags, "bundle": _bundle_flags}[name](command)
            if name == "bundle":
                model_options(command, False)
            command.add_argument("--json", action="store_true", help="print the result as JSON")
            continue
        model_options(command, name in _ON_A_MODEL)
        _text_options(command, required=name in _ON_A_MODEL)
        if name in ("error", "sweep"):
            command.add_argument(
                "--operands", metavar="FILE", help=".npz or .safetensors with a and b, or NAME.a and NAME.b"
            )
            command.add_argument(
                "--rows",
                type=int,
                default=64,
                metavar="N",
                help="input rows to capture of each linear (default: %(default)s)",
            )
            command.add_argument(
                "--layers", default="*", metavar="GLOB", help="which linears to capture (default: all)"
            )
        _FLAGS[name](command)
        _options(command)
        command.add_argument("--json", action="store_true", help="print the result as JSON")


def _text_options(command: argparse.ArgumentParser, *, required: bool) -> None:
    group = command.add_argument_group("text")
    group.add_argument(
        "--text", required=required, metavar="FILE", help="plain text, UTF-8; - is standard input"
    )
    group.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="tokens in a window, BOS included (default: the context, at most 2048)",
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        default=4096,
        metavar="N",
        help="only the first N tokens; 0: all of them (default: %(default)s)",
    )


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--blocks",
        action="store_true",
        help="blocks of --window tokens side by side, the first of each not scored, as scmp_llm cuts a text",
    )
    group = command.add_argument_group("streams")
    group.add_argument(
        "--prec", type=int, default=8, metavar="P", help="bits of an operand (default: %(default)s)"
    )
    group.add_argument(
        "--chunk",
        type=int,
        default=128,
        metavar="N",
        help="inner dimensions that share a scale; 0: all (default: %(default)s)",
    )
    group.add_argument(
        "--masks",
        type=int,
        default=64,
        metavar="N",
        help="scramble masks; 0: no limit (default: %(default)s)",
    )


def _error_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--length", type=int, metavar="N", help="stream length (default: the full one)")
    command.add_argument(
        "--scramble",
        default="bitrev",
        metavar="NAME",
        help="bitrev, counter, random or off (default: %(default)s)",
    )
    command.add_argument("--full", action="store_true", help="streams on the full grid, not the halved one")
    command.add_argument("--heatmap", metavar="FILE", help="draw the product table's error (.svg or .png)")


def _sweep_flags(command: argparse.ArgumentParser) -> None:
    _grid(command, "16,32,64,128,256", "bitrev,counter,random,off")
    command.add_argument("--plot", metavar="FILE", help="draw it (.svg or .png)")


def _whole_eval_flags(command: argparse.ArgumentParser) -> None:
    _eval_flags(command)
    command.add_argument(
        "--share", default="1/1", metavar="I/N", help="what this one of N processes takes (default: all)"
    )
    command.add_argument(
        "--parts", action="store_true", help="where each setting's time goes, by a first batch"
    )


def _energy_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--prices",
        action="append",
        required=True,
        metavar="FILE",
        help="prices of a hardware, or a published cell's name; a second one fills in what the first lacks",
    )
    command.add_argument(
        "--tokens-per-pass",
        type=int,
        default=1,
        metavar="N",
        help="tokens that share one reading of the weights (default: %(default)s, decoding for one user)",
    )
    _eval_flags(command)


def _screen_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--candidates", required=True, nargs="+", metavar="FILE", help="configurations to compare"
    )
    _base_flags(command)
    command.add_argument("--no-stop", action="store_true", help="give none up before the text ends")
    command.add_argument(
        "--least",
        type=int,
        default=4,
        metavar="N",
        help="windows before one is given up (default: %(default)s)",
    )
    command.add_argument("--board", metavar="FILE", help="JSONL file that keeps every figure")


def _swap_flags(command: argparse.ArgumentParser) -> None:
    _base_flags(command)
    command.add_argument(
        "--to",
        default="16,24,32,48,64,96,128",
        metavar="A,B",
        help="stream lengths; int4 to int8; x0.5 and the like: its own lengths times so much (default: "
        "%(default)s)",
    )
    command.add_argument(
        "--buckets",
        type=int,
        default=1,
        metavar="N",
        help="parts of the decoder layers that are swapped apart (default: %(default)s)",
    )
    command.add_argument(
        "--tied", action="store_true", help="q, k and v together, gate and up together: they share an input"
    )
    command.add_argument("--board", metavar="FILE", help="JSONL file that keeps every figure")
    command.add_argument("--output", metavar="FILE", help="the table as JSON, for fewbits sc allocate")


def _base_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--base", required=True, metavar="FILE", help="a configuration, or a stream length for everything"
    )
    command.add_argument(
        "--attention", action="store_true", help="with a length: both attention products too"
    )
    command.add_argument(
        "--batch-size", type=int, default=1, metavar="N", help="windows at once (default: %(default)s)"
    )
    command.add_argument(
        "--confidence",
        type=float,
        default=0.95,
        metavar="X",
        help="of intervals and of giving up (default: %(default)s)",
    )


def _allocate_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--swaps", required=True, metavar="FILE", help="what fewbits sc swap wrote")
    command.add_argument("--budget", required=True, type=float, metavar="X", help="mean cycles of a product")
    command.add_argument("--output", required=True, metavar="FILE", help=".yaml or .json file to write")
    command.add_argument(
        "--over",
        choices=("stochastic", "all"),
        default="stochastic",
        help="products that the mean is over: without the INT8 mask, or with it (default: %(default)s)",
    )
    command.add_argument(
        "--int8-cycles",
        type=float,
        default=0.0,
        metavar="X",
        help="what an INT8 product counts over all (default: %(default)s)",
    )
    command.add_argument("--levels", metavar="A,B", help="stream lengths that may be chosen (default: all)")
    command.add_argument(
        "--int8", action="store_true", help="operators may be given to INT8 where the table measured it"
    )
    command.add_argument(
        "--risk",
        type=float,
        default=0.0,
        metavar="X",
        help="standard errors added to every loss (default: %(default)s)",
    )
    command.add_argument("--folds", type=int, default=4, metavar="N", help="default: %(default)s")
    command.add_argument("--resamples", type=int, default=50, metavar="N", help="default: %(default)s")


def _bundle_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--wrapper", metavar="FILE", help="a wrapper to read; its table is beside it")
    command.add_argument("--hybrid", metavar="FILE", help="a schedule of INT blocks that goes with it")
    command.add_argument(
        "--layers", type=int, metavar="N", help="of the model (default: the schedule's blocks, or --model's)"
    )
    command.add_argument(
        "--settings", metavar="FILE", help="a configuration to write as a bundle, for --model"
    )
    command.add_argument(
        "--output", required=True, metavar="PATH", help="the configuration, or the folder of the bundle"
    )


def _eval_flags(command: argparse.ArgumentParser) -> None:
    _grid(command, "16,32,64,128,256", "bitrev")
    command.add_argument(
        "--attention", action="store_true", help="both attention products too, at the same length"
    )
    command.add_argument(
        "--settings",
        action="append",
        default=[],
        metavar="FILE",
        help="a configuration to evaluate as well; may be repeated",
    )
    command.add_argument("--no-baselines", action="store_true", help="leave out the model as it is and INT8")
    command.add_argument(
        "--batch-size", type=int, default=4, metavar="N", help="windows at once (default: %(default)s)"
    )
    command.add_argument("--output", metavar="FILE", help="JSONL file that keeps results and progress")
    command.add_argument("--plot", metavar="FILE", help="draw it (.svg or .png)")


def _grid(command: argparse.ArgumentParser, lengths: str, scrambles: str) -> None:
    command.add_argument(
        "--lengths", default=lengths, metavar="A,B", help="stream lengths (default: %(default)s)"
    )
    command.add_argument(
        "--scrambles", default=scrambles, metavar="A,B", help="scrambles (default: %(default)s)"
    )
    command.add_argument(
        "--halve",
        choices=("both", "yes", "no"),
        default="both",
        help="halved streams, full ones (default: %(default)s)",
    )


def _calibrate_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output", required=True, metavar="FILE", help=".yaml or .json file to write")
    command.add_argument(
        "--budget",
        type=float,
        default=64.0,
        metavar="X",
        help="mean cycles of a product (default: %(default)s)",
    )
    command.add_argument(
        "--levels",
        default="16,24,32,48,64,96,128",
        metavar="A,B",
        help="stream lengths to choose from (default: %(default)s)",
    )
    command.add_argument(
        "--groups",
        type=int,
        default=1,
        metavar="N",
        help="groups of input rows by magnitude (default: %(default)s)",
    )
    command.add_argument(
        "--smoothing",
        choices=("smoothquant", "awq", "none"),
        default="smoothquant",
        help="default: %(default)s",
    )
    command.add_argument(
        "--alpha", type=float, default=0.5, metavar="X", help="of SmoothQuant (default: %(default)s)"
    )
    command.add_argument(
        "--protected",
        type=int,
        default=0,
        metavar="N",
        help="exact input channels of each linear (default: %(default)s)",
    )
    command.add_argument(
        "--int8-share",
        type=float,
        default=0.0,
        metavar="X",
        help="share of MACs that may run INT8 (default: %(default)s)",
    )
    command.add_argument(
        "--attention", type=int, metavar="N", help="stream length of both attention products (default: exact)"
    )
    command.add_argument(
        "--rows", type=int, default=256, metavar="N", help="input rows to measure on (default: %(default)s)"
    )
    command.add_argument(
        "--no-gradients", action="store_true", help="weigh all outputs alike; needs no backward pass"
    )


_FLAGS = {
    "error": _error_flags,
    "sweep": _sweep_flags,
    "eval": _whole_eval_flags,
    "energy": _energy_flags,
    "screen": _screen_flags,
    "swap": _swap_flags,
    "calibrate": _calibrate_flags,
}
