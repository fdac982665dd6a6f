"""The arguments of ``fewbits sc``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from fewbits.cli.sc.texts import SC_TEXTS

_ON_A_MODEL = (
    "eval",
    "tasks",
    "energy",
    "screen",
    "swap",
    "calibrate",
    "fold",
)  # the others may have operands from a file


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
        if name != "tasks":
            _text_options(command, required=name in _ON_A_MODEL and name != "fold")
        if name in ("error", "sweep"):
            command.add_argument(
                "--operands",
                metavar="FILE",
                help="a .npz or .safetensors file with the tensors a and b, or NAME.a and NAME.b",
            )
            command.add_argument(
                "--rows",
                type=int,
                default=64,
                metavar="N",
                help="how many input rows of each linear layer to capture (default: %(default)s)",
            )
            command.add_argument(
                "--layers", default="*", metavar="GLOB", help="which linear layers to capture (default: all)"
            )
        _FLAGS[name](command)
        _options(command)
        command.add_argument("--json", action="store_true", help="print the result as JSON")


def _text_options(command: argparse.ArgumentParser, *, required: bool) -> None:
    group = command.add_argument_group("text")
    group.add_argument(
        "--text", required=required, metavar="FILE", help="a text file in UTF-8; - reads standard input"
    )
    group.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="tokens of a window, with the BOS token (default: the model's context, at most 2048)",
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        default=4096,
        metavar="N",
        help="use the first N tokens of the text; 0 uses all (default: %(default)s)",
    )


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--blocks",
        action="store_true",
        help="cut the text into blocks of --window tokens whose first token is not scored, as scmp_llm does",
    )
    group = command.add_argument_group("streams")
    group.add_argument(
        "--prec", type=int, default=8, metavar="P", help="bits of each operand's codes (default: %(default)s)"
    )
    group.add_argument(
        "--chunk",
        type=int,
        default=128,
        metavar="N",
        help="how many inner dimensions share a scale; 0: all of them (default: %(default)s)",
    )
    group.add_argument(
        "--masks",
        type=int,
        default=64,
        metavar="N",
        help="number of different scramble masks; 0: no limit (default: %(default)s)",
    )
    _arithmetic_flag(group)


def _arithmetic_flag(group: Any) -> None:
    group.add_argument(
        "--arithmetic",
        action="append",
        default=[],
        metavar="A=B,...",
        help="another way to multiply and to count, as in gate=and,or_group=4 (default: plain); sweep and "
        "eval take it several times, to compare",
    )


def _error_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--length", type=int, metavar="N", help="stream length (default: the longest)")
    command.add_argument(
        "--scramble",
        default="bitrev",
        metavar="NAME",
        help="how streams are scrambled: bitrev, counter, random or off (default: %(default)s)",
    )
    command.add_argument("--full", action="store_true", help="use full streams, not halved ones")
    command.add_argument(
        "--heatmap",
        metavar="FILE",
        help="draw the error of every product of two codes into this .svg or .png file",
    )


def _sweep_flags(command: argparse.ArgumentParser) -> None:
    _grid(command, "16,32,64,128,256", "bitrev,counter,random,off")
    command.add_argument("--plot", metavar="FILE", help="draw the result into this .svg or .png file")


def _whole_eval_flags(command: argparse.ArgumentParser) -> None:
    _eval_flags(command)
    command.add_argument(
        "--share",
        default="1/1",
        metavar="I/N",
        help="the part of the windows that this process takes, such as 1/4 (default: all)",
    )
    command.add_argument(
        "--parts", action="store_true", help="also time the parts of each setting on a first batch"
    )


def _energy_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--prices",
        action="append",
        required=True,
        metavar="FILE",
        help="a file of prices, or the name of a published one; further ones fill in what the first lacks",
    )
    command.add_argument(
        "--tokens-per-pass",
        type=int,
        default=1,
        metavar="N",
        help="tokens for which the weights are read once (default: %(default)s, decoding for one user)",
    )
    _eval_flags(command)


def _tasks_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--tasks", required=True, metavar="A,B", help="tasks of lm-evaluation-harness, by their names there"
    )
    command.add_argument(
        "--settings",
        action="append",
        default=[],
        metavar="FILE",
        help="a configuration file, or one stream length for all products; may be repeated (default: the "
        "model as it is)",
    )
    command.add_argument(
        "--attention",
        action="store_true",
        help="with a stream length: use it for both attention products too",
    )
    command.add_argument("--task-folder", metavar="DIR", help="a folder with tasks of your own, as YAML")
    command.add_argument("--limit", type=int, metavar="N", help="only the first N documents of each task")
    command.add_argument(
        "--batch-size",
        type=int,
        default=8,
        metavar="N",
        help="documents per forward pass (default: %(default)s)",
    )


def _fold_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output", required=True, metavar="DIR", help="the model folder to write")
    command.add_argument("--overwrite", action="store_true", help="replace what is in the folder")
    command.add_argument(
        "--parts",
        default="values,residual",
        metavar="A,B",
        help="what to fold: scales (between queries and keys), values and residual (rotations) (default: "
        "%(default)s)",
    )
    command.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the rotation's signs (default: %(default)s)"
    )
    command.add_argument(
        "--length", type=int, metavar="N", help="stream length that scales are chosen for (default: 32)"
    )
    command.add_argument(
        "--powers-of-two",
        action="store_true",
        help="choose only scales that change no bit of the exact model",
    )


def _screen_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--candidates",
        required=True,
        nargs="+",
        metavar="FILE",
        help="the configurations to compare with the base",
    )
    _base_flags(command)
    command.add_argument(
        "--no-stop", action="store_true", help="evaluate every candidate to the end of the text"
    )
    command.add_argument(
        "--least",
        type=int,
        default=4,
        metavar="N",
        help="windows that every candidate gets before it may be dropped (default: %(default)s)",
    )
    command.add_argument("--board", metavar="FILE", help="a JSONL file that keeps every result")


def _swap_flags(command: argparse.ArgumentParser) -> None:
    _base_flags(command)
    command.add_argument(
        "--to",
        default="16,24,32,48,64,96,128",
        metavar="A,B",
        help="what to try: stream lengths; int4 to int8; x0.5 for half of the present lengths (default: "
        "%(default)s)",
    )
    command.add_argument(
        "--buckets",
        type=int,
        default=1,
        metavar="N",
        help="how many groups of consecutive layers are measured apart (default: %(default)s)",
    )
    command.add_argument(
        "--tied",
        action="store_true",
        help="change q, k and v together, and gate and up together, as they share an input",
    )
    command.add_argument("--board", metavar="FILE", help="a JSONL file that keeps every result")
    command.add_argument("--output", metavar="FILE", help="write the table as JSON, for fewbits sc allocate")


def _base_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--base",
        required=True,
        metavar="FILE",
        help="a configuration file, or one stream length for all products",
    )
    command.add_argument(
        "--attention",
        action="store_true",
        help="if --base is a length: use it for both attention products too",
    )
    command.add_argument(
        "--batch-size",
        type=int,
        default=1,
        metavar="N",
        help="windows per forward pass (default: %(default)s)",
    )
    command.add_argument(
        "--confidence",
        type=float,
        default=0.95,
        metavar="X",
        help="confidence level of intervals and of decisions to drop (default: %(default)s)",
    )


def _allocate_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--swaps", required=True, metavar="FILE", help="the table that fewbits sc swap --output wrote"
    )
    command.add_argument(
        "--budget", required=True, type=float, metavar="X", help="mean number of cycles of a product"
    )
    command.add_argument("--output", required=True, metavar="FILE", help="the .yaml or .json file to write")
    command.add_argument(
        "--over",
        choices=("stochastic", "all"),
        default="stochastic",
        help="take the mean over stochastic products alone, or over INT8 ones too (default: %(default)s)",
    )
    command.add_argument(
        "--int8-cycles",
        type=float,
        default=0.0,
        metavar="X",
        help="with --over all: the cycles that an INT8 product counts (default: %(default)s)",
    )
    command.add_argument(
        "--levels", metavar="A,B", help="the stream lengths that may be chosen (default: all in the table)"
    )
    command.add_argument("--int8", action="store_true", help="allow INT8 for operators whose table has it")
    command.add_argument(
        "--risk",
        type=float,
        default=0.0,
        metavar="X",
        help="standard errors to add to every loss, against settings measured badly (default: %(default)s)",
    )
    command.add_argument(
        "--folds",
        type=int,
        default=4,
        metavar="N",
        help="parts of the windows for cross-validation (default: %(default)s)",
    )
    command.add_argument(
        "--resamples",
        type=int,
        default=50,
        metavar="N",
        help="resamples of the windows (default: %(default)s)",
    )


def _bundle_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--wrapper", metavar="FILE", help="the wrapper to read; its table is expected beside it"
    )
    command.add_argument("--hybrid", metavar="FILE", help="the schedule of INT blocks that belongs to it")
    command.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="number of decoder layers (default: as in the schedule or in --model)",
    )
    command.add_argument(
        "--settings", metavar="FILE", help="the configuration to write as a bundle for --model"
    )
    command.add_argument(
        "--output",
        required=True,
        metavar="PATH",
        help="the configuration file, or the folder of the bundle, to write",
    )


def _eval_flags(command: argparse.ArgumentParser) -> None:
    _grid(command, "16,32,64,128,256", "bitrev")
    command.add_argument(
        "--attention",
        action="store_true",
        help="also compute both attention products stochastically, at the same length",
    )
    command.add_argument(
        "--settings",
        action="append",
        default=[],
        metavar="FILE",
        help="also evaluate this configuration; may be repeated",
    )
    command.add_argument(
        "--no-baselines", action="store_true", help="do not evaluate the model as it is and with INT8"
    )
    command.add_argument(
        "--batch-size",
        type=int,
        default=4,
        metavar="N",
        help="windows per forward pass (default: %(default)s)",
    )
    command.add_argument("--output", metavar="FILE", help="a JSONL file that keeps results and progress")
    command.add_argument("--plot", metavar="FILE", help="draw the result into this .svg or .png file")


def _grid(command: argparse.ArgumentParser, lengths: str, scrambles: str) -> None:
    command.add_argument(
        "--lengths", default=lengths, metavar="A,B", help="the stream lengths to try (default: %(default)s)"
    )
    command.add_argument(
        "--scrambles", default=scrambles, metavar="A,B", help="the scrambles to try (default: %(default)s)"
    )
    command.add_argument(
        "--halve",
        choices=("both", "yes", "no"),
        default="both",
        help="try halved streams, full ones or both (default: %(default)s)",
    )


def _length_or_auto(word: str) -> int | str:
    if word != "auto" and not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is neither a stream length nor auto")
    return word if word == "auto" else int(word)


def _calibrate_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output", required=True, metavar="FILE", help="the .yaml or .json file to write")
    command.add_argument(
        "--budget",
        type=float,
        default=64.0,
        metavar="X",
        help="mean number of cycles of a product (default: %(default)s)",
    )
    command.add_argument(
        "--levels",
        default="16,24,32,48,64,96,128",
        metavar="A,B",
        help="the stream lengths to choose from (default: %(default)s)",
    )
    command.add_argument(
        "--groups",
        type=int,
        default=1,
        metavar="N",
        help="into how many groups input rows are sorted by magnitude (default: %(default)s)",
    )
    command.add_argument(
        "--smoothing",
        choices=("smoothquant", "awq", "none"),
        default="awq",
        help="how the difficulty of large inputs is moved into the weights (default: %(default)s)",
    )
    command.add_argument(
        "--alpha",
        type=float,
        default=0.5,
        metavar="X",
        help="SmoothQuant's migration strength (default: %(default)s)",
    )
    command.add_argument(
        "--protected",
        type=int,
        default=0,
        metavar="N",
        help="input channels of each linear layer that stay exact (default: %(default)s)",
    )
    command.add_argument(
        "--int8-share",
        type=float,
        default=0.0,
        metavar="X",
        help="share of all multiply-accumulates that may run in INT8 (default: %(default)s)",
    )
    command.add_argument(
        "--attention",
        type=_length_or_auto,
        metavar="N",
        help="stream length of both attention products; auto: choose one for each, within the budget, by "
        "the loss on the text (default: exact)",
    )
    command.add_argument(
        "--rows",
        type=int,
        default=256,
        metavar="N",
        help="how many input rows to measure on (default: %(default)s)",
    )
    command.add_argument(
        "--no-gradients", action="store_true", help="weight all outputs alike, which needs no backward pass"
    )


_FLAGS = {
    "error": _error_flags,
    "sweep": _sweep_flags,
    "eval": _whole_eval_flags,
    "tasks": _tasks_flags,
    "fold": _fold_flags,
    "energy": _energy_flags,
    "screen": _screen_flags,
    "swap": _swap_flags,
    "calibrate": _calibrate_flags,
}
