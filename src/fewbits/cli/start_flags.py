"""Flags of the commands that one begins with: which look before anything trains."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def _json(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="print the answer as JSON")


def _init(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "config",
        nargs="?",
        default="fewbits.yaml",
        metavar="CONFIG",
        help="file to write, - for standard output (default: %(default)s)",
    )
    sub.add_argument("--model", metavar="PATH", help="folder or hub name of the base model")
    sub.add_argument("--train-data", metavar="FILE", help="training data: a file, or a name on the Hub")
    sub.add_argument(
        "--method",
        metavar="NAME",
        help="sft, dpo, kto, orpo, cpo, simpo, grpo, rloo, reward (default: sft)",
    )
    sub.add_argument(
        "--recipe", metavar="RECIPE", help="number formats; fewbits recipes lists them (default: qlora_nf4)"
    )
    sub.add_argument("--output-dir", metavar="DIR", help="the run folder (default: runs/mine)")
    sub.add_argument(
        "--rewards",
        metavar="A:B",
        help="for --method grpo, rloo: functions that score, as module:function",
    )
    sub.add_argument("--yes", action="store_true", help="ask nothing; take the defaults")
    sub.add_argument("--overwrite", action="store_true", help="replace the file")


def _models(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "families",
        nargs="*",
        metavar="FAMILY",
        help="a model_type of transformers, such as qwen3, or a model's folder",
    )
    sub.add_argument(
        "--all", action="store_true", help="try every causal language model of transformers (takes minutes)"
    )
    _json(sub)


def _plan(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "model", metavar="PATH", help="a model's folder, its config.json, or its name on the hub"
    )
    sub.add_argument(
        "--gpu", required=True, metavar="GPU", help="a name such as h200 or rtx4090, or its memory: 24GiB"
    )
    sub.add_argument(
        "--batch",
        metavar="NxM",
        help="sequences x tokens of a forward pass (default: 1x2048, or as long as the model allows)",
    )
    sub.add_argument(
        "--recipe", metavar="RECIPE", help="only this recipe (default: every recipe that trains)"
    )
    sub.add_argument(
        "--optimizer",
        default="adamw",
        choices=("adamw", "adamw_8bit", "adafactor", "sgd"),
        help="default: %(default)s",
    )
    _json(sub)


def _preview(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", metavar="CONFIG", help="YAML file of the run")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    sub.add_argument("--rows", type=int, default=3, metavar="N", help="rows to show (default: %(default)s)")
    sub.add_argument("--html", metavar="FILE", help="also write them as one HTML file")
    sub.add_argument("--open", action="store_true", help="show that file in the web browser")


def _compare(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "models",
        nargs="+",
        metavar="PATH",
        help="models, the reference first; PATH@RECIPE quantises one while loading",
    )
    sub.add_argument("--text", required=True, metavar="FILE", help="plain text, UTF-8; - is standard input")
    sub.add_argument("--window", type=int, metavar="N", help="tokens (default: the context, at most 2048)")
    sub.add_argument("--max-tokens", type=int, metavar="N", help="only the first N tokens of the text")
    sub.add_argument(
        "--batch-size", type=int, default=1, metavar="N", help="windows at once (default: %(default)s)"
    )
    sub.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of everything not quantised"
    )
    sub.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    sub.add_argument("--plot", metavar="FILE", help="plot of size against KL divergence, .svg or .png")
    _json(sub)


def _push(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("source", metavar="SRC", help="a training run, a model, an adapter or an export")
    sub.add_argument(
        "repository", metavar="OWNER/NAME", help="repository on the Hub; created if there is none"
    )
    sub.add_argument("--base", metavar="OWNER/NAME", help="an adapter's base by its name on the hub")
    sub.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    sub.add_argument("--branch", metavar="NAME", help="default: main")
    sub.add_argument("--pull-request", action="store_true", default=None, help="offer it as a pull request")
    sub.add_argument("--message", metavar="TEXT", help="title of the commit")
    sub.add_argument(
        "--dataset",
        action="append",
        metavar="OWNER/NAME",
        help="dataset that the model card names; repeatable",
    )


def _warm(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "model", metavar="PATH", help="a model's folder, its config.json, or its name on the hub"
    )
    sub.add_argument(
        "--recipe", metavar="RECIPE", help="number formats (default: a packed folder's own, else qlora_nf4)"
    )
    sub.add_argument("--batch", metavar="NxM", help="sequences x tokens of a step (default: 1x2048)")
    sub.add_argument(
        "--rank", type=int, default=16, metavar="N", help="of the adapters (default: %(default)s)"
    )
    _json(sub)


# command: (adds its flags, whether it loads models or their libraries, which are to be silent then)
START_FLAGS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], bool]] = {
    "init": (_init, False),
    "recipes": (_json, False),
    "models": (_models, True),
    "plan": (_plan, True),
    "warm": (_warm, True),
    "preview": (_preview, True),
    "compare": (_compare, True),
    "push": (_push, True),
}
