"""What the command line accepts. Building the parser imports argparse and nothing heavy.

The metavar of an argument also says what completes it: see `fewbits.cli.completion.COMPLETES`.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import fewbits
from fewbits.cli.start_flags import START_FLAGS
from fewbits.cli.texts import TEXTS, Text


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(shutil.get_terminal_size().columns - 2, 106))


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # what add_subparsers returns


class Parser(argparse.ArgumentParser):
    """argparse whose usage errors are one sentence, and whose examples keep their lines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Formatter)
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is; exit code 2."""
        self.exit(2, f"error: {message}; see {self.prog} --help.\n")


def command_of(argv: Sequence[str]) -> str | None:
    """The subcommand of a command line, seen before it is parsed."""
    words = [a for a in argv if not a.startswith("-")]
    return words[0] if words and words[0] in TEXTS else None


def build_parser(*, with_train_flags: bool = False) -> Parser:
    """The parser of the whole command line.

    Args:
        with_train_flags: make the flags of ``train`` from `TrainConfig`, which has to be imported for that.
    """
    parser = Parser(
        prog="fewbits",
        description="Fine-tune and run large language models in few bits.",
        epilog="First steps: fewbits demo, then fewbits init and fewbits train.\n"
        "Help on one command, with examples: fewbits COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"fewbits {fewbits.__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and all warnings")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    _demo(commands)
    for name, (add, loads_models) in START_FLAGS.items():
        add(_command(commands, name, loads_models=loads_models))
    _train(commands, with_train_flags)
    _generate(commands)
    _eval(commands)
    _quantize(commands)
    _merge(commands)
    _export(commands)
    report = _command(commands, "report")
    report.add_argument("run", metavar="RUN", help="folder of the run")
    report.add_argument("--open", action="store_true", help="show it in the web browser")
    _command(commands, "bench")
    _doctor(commands)
    _build(commands)
    _plan_gpus(commands)
    _sc(commands)
    _command(commands, "completion").add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")
    return parser


def _command(
    commands: Commands,
    name: str,
    *,
    loads_models: bool = False,
    usage: str | None = None,
    text: Text | None = None,
) -> Parser:
    text = text or TEXTS[name]
    examples = "\n".join(f"  {line}" for line in text.examples.strip().splitlines())
    sub: Parser = commands.add_parser(
        name, help=text.help, description=text.description, epilog=f"examples:\n{examples}", usage=usage
    )
    sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    sub.set_defaults(parser=sub, loads_models=loads_models)
    return sub


def _model_options(sub: Parser, *, required: bool = True, plain: bool = False) -> None:
    group = sub.add_argument_group("model")
    group.add_argument(
        "--model", required=required, metavar="PATH", help="folder of a model, an adapter or a training run"
    )
    if not plain:
        group.add_argument("--adapter", metavar="PATH", help="folder of a LoRA adapter to put on the model")
        group.add_argument(
            "--recipe",
            metavar="RECIPE",
            help="quantise while loading, such as qlora_nf4 (default: as stored)",
        )
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of everything that is not quantised (default: as stored)",
    )
    group.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: a GPU if there is one)"
    )


def _demo(commands: Commands) -> None:
    sub = _command(commands, "demo", loads_models=True)
    sub.add_argument(
        "--output", metavar="DIR", default="fewbits-demo", help="run folder (default: %(default)s)"
    )
    sub.add_argument("--seed", type=int, metavar="N", help="random seed (default: another one each time)")
    sub.add_argument("--quick", action="store_true", help="fewer steps and questions, and a lower bar")
    sub.add_argument("--open", action="store_true", help="show the report in the web browser at the end")


def _train(commands: Commands, with_flags: bool) -> None:
    usage = "fewbits train [CONFIG] [key=value ...] [--resume] [--nproc-per-node N] [settings]"
    sub = _command(commands, "train", loads_models=True, usage=usage)
    sub.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    sub.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last checkpoint of this run; starts it if there is none",
    )
    sub.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything that comes before the first step and predict memory; writes nothing",
    )
    sub.add_argument(
        "--basis",
        metavar="RUN",
        help="with --dry-run: folder of an earlier run whose speed predicts the time",
    )
    if with_flags:
        from fewbits.cli.launch_flags import add_launch_flags
        from fewbits.cli.train_flags import add_train_flags

        add_launch_flags(sub)
        add_train_flags(sub)


def _generate(commands: Commands) -> None:
    sub = _command(commands, "generate", loads_models=True)
    _model_options(sub)
    what = sub.add_argument_group("what to write").add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="text to continue; - reads it from standard input")
    what.add_argument("--messages", metavar="FILE", help='JSON list of {"role": ..., "content": ...}')
    what.add_argument(
        "--chat", action="store_true", help="chat with the model in the terminal; Ctrl-D ends it"
    )
    what.add_argument(
        "--input", metavar="FILE", help='rows to answer: JSON lines with "prompt" or "messages"'
    )
    rows = sub.add_argument_group("with --input")
    rows.add_argument(
        "--output",
        metavar="FILE",
        help="file for the answers, JSON lines; if it was interrupted, the same command continues it",
    )
    rows.add_argument(
        "--at-a-time",
        type=int,
        metavar="N",
        help="rows in a batch, 1 to 256 (default: as many as fit in memory)",
    )
    rows.add_argument(
        "--row-adapter",
        action="append",
        metavar="NAME=PATH",
        help='a LoRA adapter for rows with "adapter": "NAME"; may be given several times',
    )
    how = sub.add_argument_group("sampling and speed")
    how.add_argument("--system", metavar="TEXT", help="with --chat: the system prompt")
    how.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (default: %(default)s)"
    )
    how.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="T",
        help="0: greedy, always the likeliest token (default: %(default)s)",
    )
    how.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="nucleus sampling; 1: off (default: %(default)s)",
    )
    how.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample among the K likeliest tokens; 0: off (default: %(default)s)",
    )
    how.add_argument(
        "--min-p", type=float, metavar="P", help="drop tokens below P times the likeliest's share"
    )
    how.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="1: off (default: 1)")
    how.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text on one machine")
    how.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end an answer with this text, \\n being a line's end; may be given several times",
    )
    how.add_argument(
        "--word",
        action="append",
        metavar="NAME=VALUE",
        help="any other word of transformers' generate, such as no_repeat_ngram_size=3; may be given several"
        " times",
    )
    _guess_options(how)
    _cache_option(how)
    how.add_argument(
        "--quiet", action="store_true", help="print the text only, without speed and token counts"
    )


def _guess_options(how: Any) -> None:
    how.add_argument(
        "--lookup",
        type=int,
        default=0,
        metavar="N",
        help="prompt lookup: guess up to N tokens from the text so far (default: 0, off); greedy text stays"
        " the same",
    )
    how.add_argument(
        "--draft",
        metavar="PATH",
        help="speculative decoding: folder of a smaller model that guesses; greedy text stays the same",
    )


def _cache_option(group: Any) -> None:
    group.add_argument(
        "--cache",
        metavar="FORMAT",
        help="number format of the KV cache: int4, int8, fp8 or bfloat16; or KEYS/VALUES (default: the"
        " recipe's)",
    )


def _eval(commands: Commands) -> None:
    sub = _command(commands, "eval", loads_models=True)
    _model_options(sub)
    what = sub.add_argument_group("what to measure on").add_mutually_exclusive_group(required=True)
    what.add_argument("--text", metavar="FILE", help="perplexity on plain text, UTF-8; - is standard input")
    what.add_argument(
        "--rows", metavar="FILE", help="loss on rows, formatted as the run formatted its training rows"
    )
    what.add_argument(
        "--tasks", metavar="A,B", help="tasks of lm-evaluation-harness (pip install 'fewbits[eval]')"
    )
    rows = sub.add_argument_group("rows and tasks")
    rows.add_argument(
        "--answers",
        type=int,
        default=0,
        metavar="N",
        help="answer the first N rows: exact match (default: 0)",
    )
    rows.add_argument(
        "--answer-tokens", type=int, default=64, metavar="N", help="longest answer (default: %(default)s)"
    )
    rows.add_argument("--show", action="store_true", help="show the answers beside what was expected")
    rows.add_argument("--limit", type=int, metavar="N", help="with --tasks: only the first N documents")
    group = sub.add_argument_group("measurement")
    group.add_argument(
        "--window", type=int, metavar="N", help="tokens, BOS included (default: the context, at most 2048)"
    )
    group.add_argument("--stride", type=int, metavar="N", help="new tokens per window (default: no overlap)")
    group.add_argument("--max-tokens", type=int, metavar="N", help="only the first N tokens of the text")
    group.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="windows at once (default: %(default)s)"
    )
    _cache_option(group)
    group.add_argument("--json", action="store_true", help="print the result as JSON")


def _quantize(commands: Commands) -> None:
    sub = _command(commands, "quantize", loads_models=True)
    sub.add_argument("source", metavar="SRC", help="folder of the model, in safetensors")
    sub.add_argument("destination", metavar="DST", help="folder to write")
    what = sub.add_mutually_exclusive_group()
    what.add_argument("--recipe", metavar="RECIPE", help="recipe whose weight formats are used")
    what.add_argument(
        "--format",
        metavar="FORMAT",
        help="format of the decoder's linears, such as int4_g128; or a GGUF mix, gguf:q4_k_m",
    )
    sub.add_argument(
        "--calibrate",
        metavar="ROWS",
        help="JSON Lines with text or messages; weights are rounded so that outputs on them change little",
    )
    sub.add_argument(
        "--method",
        metavar="METHOD",
        help="with --calibrate: steps joined by +, of rotate, awq or smooth; nearest, gptq (default) or "
        "gptaq; learned",
    )
    sub.add_argument(
        "--bits",
        type=float,
        metavar="B",
        help="with --calibrate: bits of a value on average; each linear gets the format of --format a,b,c "
        "(default: INT2 to INT8 in groups of 64) that its measured loss asks for",
    )
    sub.add_argument(
        "--report", metavar="FILE", help="with --calibrate: a plot of losses and bits, .svg or .png"
    )
    sub.add_argument(
        "--recover",
        type=float,
        metavar="MINUTES",
        help="with --calibrate: then train scales and norms for so long to say what the plain model says",
    )
    sub.add_argument(
        "--recover-rank",
        type=int,
        metavar="R",
        help="with --recover: train an adapter of this rank too, in DST/recovery_adapter",
    )
    sub.add_argument(
        "--recover-text",
        type=int,
        metavar="TOKENS",
        help="with --recover: so much text that the plain model writes itself is trained on too",
    )
    sub.add_argument("--samples", type=int, metavar="N", help="windows of text (default: 128)")
    sub.add_argument("--length", type=int, metavar="N", help="tokens of a window (default: 512)")
    sub.add_argument("--overwrite", action="store_true", help="replace the model that is in DST")
    sub.add_argument("--json", action="store_true", help="print the table as JSON")


def _merge(commands: Commands) -> None:
    sub = _command(commands, "merge", loads_models=True)
    sub.add_argument("adapter", metavar="ADAPTER", help="folder of the adapter, or of the training run")
    sub.add_argument("destination", metavar="DST", help="folder to write")
    sub.add_argument(
        "--base", metavar="PATH", help="the base model (default: the one that the adapter names)"
    )
    sub.add_argument("--overwrite", action="store_true", help="replace the model that is in DST")


def _export(commands: Commands) -> None:
    sub = _command(commands, "export", loads_models=True)
    sub.add_argument("source", metavar="SRC", help="a model, an adapter, a training run or a GGUF file")
    sub.add_argument("destination", metavar="DST", help="folder to write")
    sub.add_argument(
        "--to", required=True, metavar="FORMAT", help="such as gguf:q4_k_m, gptq:int4_g128, awq, 16bit"
    )
    sub.add_argument(
        "--calibrate",
        metavar="ROWS",
        help="JSON Lines with text or messages, for gguf's importance matrix, fp8 and nvfp4",
    )
    sub.add_argument("--no-check", action="store_true", help="skip reading the result back and comparing it")
    sub.add_argument("--base", metavar="PATH", help="an adapter's base model (default: the one it names)")
    sub.add_argument("--overwrite", action="store_true", help="replace the export that is in DST")


def _doctor(commands: Commands) -> None:
    sub = _command(commands, "doctor")
    sub.add_argument(
        "packages",
        nargs="*",
        metavar="PACKAGE",
        help="also say whether this package has a wheel for this machine",
    )
    sub.add_argument("--json", action="store_true", help="print the findings as JSON")


def _build(commands: Commands) -> None:
    from fewjobs.flags import add_build_flags

    usage = "fewbits build [--memory SIZE] [--keep DIR] [options] -- COMMAND..."
    add_build_flags(_command(commands, "build", usage=usage))


def _plan_gpus(commands: Commands) -> None:
    sub = _command(commands, "plan-gpus")
    work = sub.add_argument_group("the step")
    work.add_argument(
        "--values", type=float, required=True, metavar="N", help="trained values: 8e9 for an 8B model"
    )
    work.add_argument(
        "--step-ms", type=float, required=True, metavar="MS", help="a step's time on one GPU, no exchange"
    )
    work.add_argument(
        "--gradient-bytes", type=int, choices=(4, 2), default=4, help="of a gradient in memory (default: 4)"
    )
    machines = sub.add_argument_group("the machines")
    machines.add_argument(
        "--network-gbit", type=float, required=True, metavar="G", help="all network cards of a node together"
    )
    machines.add_argument("--latency-us", type=float, default=15, metavar="US", help="default: %(default)s")
    machines.add_argument("--node-size", type=int, default=8, metavar="N", help="GPUs of a node (default: 8)")
    machines.add_argument(
        "--inside-gbyte", type=float, metavar="G", help="GB/s of a GPU within its node (default: 350)"
    )
    machines.add_argument(
        "--slowdown", type=float, metavar="S", help="of computing beside an exchange (default: 0.1, measured)"
    )
    machines.add_argument(
        "--gpus", default="8,64,128,256,512,1024", metavar="LIST", help="how many (default: %(default)s)"
    )
    sub.add_argument("--json", action="store_true", help="print the parts of every step as JSON")


def _sc(commands: Commands) -> None:
    from fewbits.cli.sc.flags import add_sc_flags

    def command(sub: Any, name: str, text: Text) -> Parser:
        return _command(sub, name, loads_models=True, text=text)

    def model_options(sub: Parser, required: bool) -> None:
        _model_options(sub, required=required, plain=True)
        sub.set_defaults(adapter=None, recipe=None)

    add_sc_flags(_command(commands, "sc", loads_models=True), command, model_options)
