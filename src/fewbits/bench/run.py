"""``fewbits bench``: kernels are checked, timed and recorded here; train and tune have their own rooms."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fewbits.bench.cases import cases
from fewbits.bench.measure import (
    CudaTimer,
    HostTimer,
    Peaks,
    Timer,
    device_to_time,
    measure,
    peaks_of,
    worst_errors,
)
from fewbits.bench.problem import Case
from fewbits.bench.record import Row, append, conditions, rows_of
from fewbits.device import describe
from fewbits.errors import BadInput

_EXAMPLES = """examples:
  fewbits bench kernels --op rmsnorm
  fewbits bench kernels --record benchmarks/results.csv
  fewbits bench kernels --device cpu --max-size 256
  fewbits bench train --help
  fewbits bench tune --help
"""


def parser() -> argparse.ArgumentParser:
    """The options of ``fewbits bench``."""
    options = argparse.ArgumentParser(
        prog="fewbits bench",
        description="Time kernels beside their peers, after checking both.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "what",
        choices=["kernels", "train", "tune"],
        help="train and tune have their own options",
    )
    options.add_argument("--op", help="only this op, such as rmsnorm; several with commas between")
    options.add_argument("--without", default="", help="peers to leave out, such as torch_compile")
    options.add_argument("--device", default="auto", help="auto (a GPU), cpu, cuda, cuda:1 (default: auto)")
    options.add_argument("--max-size", type=int, help="cut every dimension to this, for a quick look")
    options.add_argument("--rounds", type=int, default=10, help="turns of ten runs that each variant takes")
    options.add_argument("--record", type=Path, metavar="CSV", help="append the rows to this file")
    options.add_argument("--commit", help="the commit that runs, where there is no git checkout to ask")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fewbits bench``; returns the exit code, 1 if a result of fewbits was wrong.

    Raises:
        BadInput: an option does not fit.
        Unsupported: the device is not there.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["train"]:
        from fewbits.bench.train.command import main as train

        return train(arguments[1:])
    if arguments[:1] == ["tune"]:
        from fewbits.bench.tune import main as tune

        return tune(arguments[1:])
    options = parser().parse_args(arguments)
    device, console = device_to_time(options.device), Console(width=150)
    chosen = _chosen(options)
    peaks = peaks_of(device) if device.type == "cuda" else None
    timer: Timer = CudaTimer(device) if device.type == "cuda" else HostTimer()
    rows: list[Row] = []
    wrong: list[str] = []
    for case in chosen:
        console.print(case.name, style="dim")
        measured = _run_case(case, device, timer, options, peaks, wrong)
        if options.record:  # at once: a time limit loses the case under way
            command = f"fewbits bench kernels --op {case.op}"
            append(options.record, measured, conditions(device, command=command, commit=options.commit))
        rows += measured
    console.print(_table(rows, describe(device).name, peaks))
    for sentence in wrong:
        console.print(sentence, style="red")
    return 1 if any(sentence.startswith("fewbits is wrong") for sentence in wrong) else 0


def _chosen(options: argparse.Namespace) -> list[Case]:
    chosen: list[Case] = []
    for op in options.op.split(",") if options.op else [None]:
        matching = cases(op, max_size=options.max_size)
        if not matching:
            names = ", ".join(sorted({c.op for c in cases()}))
            raise BadInput(f"no case for op {op!r}: known are {names}.")
        chosen += matching
    return chosen


def _run_case(
    case: Case,
    device: torch.device,
    timer: Timer,
    options: argparse.Namespace,
    peaks: Peaks | None,
    wrong: list[str],
) -> list[Row]:
    """Rows of the variants that are right; a sentence in ``wrong`` for each that is not."""
    torch.manual_seed(0)
    torch.compiler.reset()  # a shape of its own is compiled, not one for all shapes
    problem = case.build(case, device)
    left_out = options.without.split(",")
    problem = problem._replace(variants={n: v for n, v in problem.variants.items() if n not in left_out})
    errors = worst_errors(problem)
    for name, error in errors.items():
        if error > case.tolerance:
            wrong.append(
                f"{name} is wrong in {case.name}: relative error {error:.2g} > {case.tolerance:.2g}."
            )
    right = {name: variant for name, variant in problem.variants.items() if errors[name] <= case.tolerance}
    refused: dict[str, str] = {}
    times = measure(right, timer, rounds=options.rounds, refused=refused)
    wrong += [f"{name} of {case.name} is not timed: {reason}" for name, reason in refused.items()]
    return rows_of(case, times, peaks)


def _table(rows: list[Row], device: str, peaks: Peaks | None) -> Table:
    """A line for each case: fewbits' time, what share of it the floor is, how many times slower a peer is."""
    title = device
    if peaks:
        title += f", copy {peaks.bytes_per_second / 1e12:.2f} TB/s, products {peaks.flops / 1e12:.0f}"
        title += f" and in float8 {peaks.float8_flops / 1e12:.0f} TFLOP/s"
    table = Table(title=title, caption="peers: their time over ours; above 1 is slower", box=None)
    for column in ("case", "shape", "us", "p20-p80", "floor", "peers"):
        table.add_column(column, justify="right" if column in ("us", "floor") else "left", no_wrap=True)
    by_case: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        by_case.setdefault((row.op, row.part, row.format, row.M, row.N, row.K), []).append(row)
    for same in by_case.values():
        ours = next((row for row in same if row.variant == "fewbits"), None)
        if ours is None:
            continue
        peers = "  ".join(f"{row.variant} {row.ratio:.2f}" for row in same if row is not ours)
        table.add_row(
            f"{ours.op}.{ours.part} {ours.format}",
            "x".join(str(n) for n in (ours.M, ours.N, ours.K) if n),
            f"{ours.value:.1f}",
            f"{ours.low:.1f}-{ours.high:.1f}",
            "" if ours.peak_share is None else f"{ours.peak_share:.0%}",
            peers,
        )
    return table
