"""``fewbits bench train``: check, time, print, plot, and on request record."""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fewbits.bench.measure import device_to_time
from fewbits.bench.record import append, conditions
from fewbits.bench.train.configurations import Configuration, choose, missing
from fewbits.bench.train.kernels import table_of_kernels
from fewbits.bench.train.longest import POSITIONS, table_of_longest
from fewbits.bench.train.results import failure, plot, rows_of, table_of
from fewbits.bench.train.schedule import Outcome, Task, run
from fewbits.bench.train.shapes import Shape, batch_of, shape_of
from fewbits.device import describe
from fewbits.errors import BadInput

_QUIET = ("state", "times_ms", "losses", "packages", "failures", "top")  # in results.jsonl alone
_EXAMPLES = """examples:
  fewbits bench train                         ours and all installed peers, Llama-3.1-8B's shape
  fewbits bench train --configs ours:nf4-fp8 --peers unsloth --batch 4x2048,1x8192
  fewbits bench train --shape qwen3-1.7b --configs ours:full-fp8,torchao:full-fp8,hf:full-bf16 --peers none
  fewbits bench train --longest --configs ours:nf4@139 --peers unsloth
  fewbits bench train --shape tiny --device cpu --peers hf,bnb   a trial without a GPU
"""


def parser() -> argparse.ArgumentParser:
    """The options of ``fewbits bench train``."""
    options = argparse.ArgumentParser(
        prog="fewbits bench train",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Time training steps beside the installed peers: own processes, each checked first.",
    )
    add = options.add_argument
    add("--shape", default="llama-3.1-8b", help="names or config.json paths, with commas between")
    add("--batch", default="4x2048", help="sequences x tokens, several with commas between (default: 4x2048)")
    add("--configs", help="configurations with commas between (default: ours:nf4,ours:nf4-fp8)")
    add(
        "--also",
        action="append",
        default=[],
        metavar="'SHAPE BATCH CONFIGS'",
        help="one more group, repeatable",
    )
    add("--peers", default="all", help="all, none, or of hf,bnb,liger,unsloth,torchao (default: all)")
    add("--steps", type=int, default=8, help="timed steps")
    add("--warm-up", type=int, default=3, help="steps before")
    add("--layers", type=int, default=2, help="layers in the parity check")
    add("--device", default="auto", help="auto (a GPU), cpu or cuda (default: auto)")
    add("--out", type=Path, help="folder for the table, the plot, results and logs")
    add("--record", type=Path, metavar="CSV", help="append the rows to this file")
    add("--commit", help="the commit that runs, where there is no git checkout to ask")
    add("--scratch", type=Path, help="folder for checkpoints; one in memory is fastest")
    add(
        "--together", type=int, default=1, help="processes that may warm up side by side (timed alone always)"
    )
    add("--turn", type=float, default=900, help="seconds after which a process is stopped")
    add("--limit", type=float, default=86400, help="seconds after which all is stopped")
    add(
        "--profile",
        action="store_true",
        help="also where a step's time goes, kernel by kernel, after the clock",
    )
    add("--longest", action="store_true", help="search the longest sequence that trains at batch 1 instead")
    add("--grain", type=int, default=16384, help="with --longest: tokens to which the length is found")
    return options


def main(argv: Sequence[str]) -> int:
    """Run ``fewbits bench train``; returns the exit code, 1 if a configuration has no result.

    Raises:
        BadInput: an option does not fit.
        Unsupported: there is no such device here.
    """
    options = parser().parse_args(argv)
    on_cpu = device_to_time(options.device).type == "cpu"
    console = Console(width=170)
    shapes = [shape_of(name) for name in options.shape.split(",")]
    sizes = [batch_of(text) for text in options.batch.split(",")]
    if min(options.steps, options.warm_up, options.layers, options.together) < 1:
        raise BadInput(
            "--steps, --warm-up, --layers and --together must each be at least 1; one of them is less."
        )
    groups = [(s, b, choose(options.configs, options.peers, on_cpu=on_cpu)) for s in shapes for b in sizes]
    groups += [_group(text, on_cpu=on_cpu) for text in options.also]
    groups = [(shape, batch, _installed(chosen, console)) for shape, batch, chosen in groups]
    if not any(chosen for _, _, chosen in groups):
        raise BadInput("no configuration is left: name one that is installed and runs on this device.")
    with tempfile.TemporaryDirectory(prefix="fewbits-bench-", dir=options.scratch) as scratch:
        out = options.out or Path(scratch) / "out"
        out.mkdir(parents=True, exist_ok=True)
        tasks = _tasks(options, groups, Path(scratch), "cpu" if on_cpu else "cuda")
        memory = 1e9 if on_cpu else _memory_gib() - 8
        outcomes = run(
            tasks,
            out.resolve(),
            together=options.together,
            memory_gib=memory,
            limits=(options.turn, options.limit),
            heard=_say(console),
        )
        return _report(outcomes, options, console, out, torch.device("cpu" if on_cpu else "cuda"), argv)


Group = tuple[Shape, tuple[int, int], list[Configuration]]


def _group(text: str, *, on_cpu: bool) -> Group:
    """``--also``'s three words."""
    words = text.split()
    if len(words) != 3:
        raise BadInput(f"--also {text!r} has not three words: shape, batch, configurations.")
    return shape_of(words[0]), batch_of(words[1]), choose(words[2], "none", on_cpu=on_cpu)


def _installed(chosen: list[Configuration], console: Console) -> list[Configuration]:
    for config in chosen:
        lacking = missing(config)
        if lacking:
            console.print(f"{config.name} is left out: {', '.join(lacking)} is not installed.", style="dim")
    return [config for config in chosen if not missing(config)]


def _memory_gib() -> float:
    """The device's, asked without making a context on it that would stay."""
    import shutil
    import subprocess

    if shutil.which("nvidia-smi") is None:
        return 80.0
    answer = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    return int(answer[0]) / 1024 if answer else 80.0


def _tasks(options: argparse.Namespace, groups: list[Group], scratch: Path, device: str) -> list[Task]:
    tasks: list[Task] = []
    loaded: set[str] = set()
    for shape, batch, chosen in groups:
        if options.longest:
            shape = replace(shape, fields={**shape.fields, "max_position_embeddings": POSITIONS})
        facts = {
            "device": device,
            "checkpoint": str(scratch / shape.name),
            "warm_up": options.warm_up,
            "steps": options.steps,
            "layers": options.layers,
            "profiled": options.profile,
            "lengths": [options.grain, options.grain] if options.longest else None,
        }
        if any(c.side == "unsloth" for c in chosen) and shape.name not in loaded:
            loaded.add(shape.name)
            tasks.append(Task(configuration=None, shape=shape, batch=(0, 0), peak_gib=20, facts=facts))
        size = (1, options.grain) if options.longest else batch
        tasks += [
            Task(configuration=c, shape=shape, batch=size, peak_gib=_peak(c, shape, size), facts=facts)
            for c in chosen
        ]
    return tasks


def _peak(config: Configuration, shape: Shape, batch: tuple[int, int]) -> float:
    """A rough scale of the 8B figure, never below what the parity check takes."""
    if shape.name == "llama-3.1-8b":
        return config.peak_gib * max(batch[0] * batch[1] / 8192, 1)
    return max(config.peak_gib / 2, 25.0)


def _say(console: Console) -> Any:
    def heard(outcome: Outcome, line: dict[str, Any]) -> None:
        facts = {k: v for k, v in line.items() if k not in _QUIET}
        console.print(
            f"{outcome.task.name}: {line['state']} {json.dumps(facts)}"[:400], style="dim", markup=False
        )

    return heard


def _report(
    outcomes: list[Outcome],
    options: argparse.Namespace,
    console: Console,
    out: Path,
    device: torch.device,
    argv: Sequence[str],
) -> int:
    for outcome in outcomes:
        line = {
            "task": outcome.task.name,
            "said": outcome.said,
            "tries": outcome.tries,
            "error": outcome.error,
        }
        with (out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    if options.longest:
        table, rows = table_of_longest(outcomes)
    else:
        table, rows = table_of(outcomes, describe(device).name), rows_of(outcomes)
        plot(outcomes, out / "train.svg")
    tables = [table, *filter(None, [table_of_kernels(outcomes)])]
    console.print(*tables)
    with (out / "table.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=170).print(*tables)
    if options.record and rows:
        command = "fewbits bench train " + shlex.join(
            without_options(argv, ("--record", "--commit", "--out", "--scratch"))
        )
        here = conditions(device, command=command, commit=options.commit)
        append(options.record, rows, replace(here, packages=_packages(outcomes)))
    for outcome in outcomes:
        said = [outcome.said.get(state, {}).get("notes", []) for state in ("built", "timed")]
        for note in [*said[0], *said[1]]:
            console.print(f"{outcome.task.name}: {note}", style="yellow", markup=False)
    failed = {outcome.task.name: failure(outcome) for outcome in outcomes}
    for name, sentence in failed.items():
        if sentence:
            console.print(f"{name}: {sentence}", style="red", markup=False)
    return 1 if any(failed.values()) else 0


def without_options(argv: Sequence[str], dropped: Sequence[str]) -> list[str]:
    """The arguments less some options and their values: what makes the figures, not where they go."""
    words: list[str] = []
    skip = False
    for argument in argv:
        if not skip and argument.partition("=")[0] not in dropped:
            words.append(argument)
        skip = not skip and argument in dropped
    return words


def _packages(outcomes: Sequence[Outcome]) -> str:
    """Versions that the processes reported, without torch, which has its own column."""
    versions: dict[str, str] = {}
    for outcome in outcomes:
        versions |= outcome.said.get("timed", {}).get("packages", {})
    return "; ".join(f"{name} {version}" for name, version in versions.items() if name != "torch")
