"""``fewbits bench tune``: which tiles are fastest on this GPU; the user's cache folder keeps the winners."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fewbits.bench.measure import CudaTimer, Quantiles, Timer, device_to_time, measure
from fewbits.bench.problem import Run, Variant
from fewbits.bench.sweeps import WIDTHS, Sweep, sweeps
from fewbits.device import describe
from fewbits.errors import Unsupported
from fewbits.kernels.launch.jit import triton
from fewbits.kernels.launch.tuning import keep, tiles_of
from fewbits.words import size

_GAIN = 0.97  # of the rule's time: what a tile must beat to be kept


def parser() -> argparse.ArgumentParser:
    """The options of ``fewbits bench tune``."""
    options = argparse.ArgumentParser(
        prog="fewbits bench tune",
        description="Measure with which tiles the kernels run fastest on this GPU, and keep the winners "
        "in the user's cache folder (Triton's), where every later process finds them. Takes minutes: "
        "every tile is compiled.",
    )
    options.add_argument("--widths", choices=WIDTHS, default="8b", help="of which model (default: 8b)")
    options.add_argument("--op", default="", help="only kernels whose name begins so, such as rmsnorm")
    options.add_argument("--device", default="auto", help="auto, cuda, cuda:1 (default: auto)")
    options.add_argument("--rounds", type=int, default=3, help="turns of five runs that each tile takes")
    options.add_argument("--dry-run", action="store_true", help="measure and print, keep nothing")
    return options


def main(argv: Sequence[str]) -> int:
    """Run ``fewbits bench tune``; returns the exit code.

    Raises:
        Unsupported: there is no GPU, or no Triton.
    """
    options = parser().parse_args(argv)
    device, console = device_to_time(options.device), Console(width=130)
    if device.type != "cuda" or triton is None:
        raise Unsupported("tiles are those of Triton's kernels on a GPU: run this where both are.")
    index = torch.cuda.current_device() if device.index is None else device.index
    timer, tiles = CudaTimer(device), {}
    table = Table(title=f"tiles on {describe(device).name}, widths of {options.widths}", box=None)
    for column in ("kernel", "rule", "us", "best", "us", "floor", "refused"):
        table.add_column(column, no_wrap=True)
    for sweep in sweeps(WIDTHS[options.widths], device):
        if not sweep.key.startswith(options.op):
            continue
        console.print(sweep.title, style="dim")
        times, refused = timed(sweep, timer, options.rounds)
        best = chosen(sweep, times)
        if best is not None:
            tiles[sweep.key] = best
        table.add_row(*_line(sweep, times, len(refused)))
        for sentence in refused:
            console.print(f"  {sentence}", style="dim", markup=False)
    console.print(table)
    if options.dry_run:
        return 0
    path = keep(index, tiles)
    console.print(
        f"{len(tiles)} tiles are kept in {path}; this GPU now has {len(tiles_of(index))} of its own."
        if path
        else "there is no cache folder that can be written: nothing is kept.",
        markup=False,
    )
    return 0 if path else 1


def timed(sweep: Sweep, timer: Timer, rounds: int) -> tuple[dict[tuple[int, ...], Quantiles], list[str]]:
    """Times of the tiles that compute the right thing, and why the others have none."""
    from triton.runtime.errors import TritonError

    right: dict[str, Variant] = {}
    tiles, refused, kind = {}, [], cast(Any, type(sweep.rule))
    for tile in dict.fromkeys((tuple(sweep.rule), *map(tuple, sweep.tiles))):
        numbers = kind(*tile)
        try:
            error = sweep.error(numbers)
        except (RuntimeError, ValueError, TritonError) as reason:  # it does not compile, or does not fit
            refused.append(f"{tile}: {str(reason).splitlines()[0][:90]}")
            continue
        if error > sweep.tolerance:
            refused.append(f"{tile}: wrong, by {error:.1e}")
            continue
        tiles[str(tile)] = tile
        right[str(tile)] = partial(_prepare, sweep, numbers)
    times = measure(right, timer, rounds=rounds, repeats=5) if right else {}
    return {tiles[name]: quantiles for name, quantiles in times.items()}, refused


def _prepare(sweep: Sweep, tile: tuple[int, ...]) -> Run:
    def run() -> Sequence[Tensor]:
        sweep.run(tile)
        return sweep.outputs

    return run


def chosen(sweep: Sweep, times: Mapping[tuple[int, ...], Quantiles]) -> tuple[int, ...] | None:
    """The fastest tile if it clearly beats the rule's, or if the rule's does not run; else None."""
    if not times:
        return None
    best, rule = min(times, key=lambda tile: times[tile].p50), tuple(sweep.rule)
    if rule not in times:
        return best
    gained = times[best].p50 < _GAIN * times[rule].p50 and times[best].p80 < times[rule].p50
    return best if gained else None


def _line(sweep: Sweep, times: Mapping[tuple[int, ...], Quantiles], refused: int) -> list[str]:
    rule = times.get(tuple(sweep.rule))
    best = min(times, key=lambda tile: times[tile].p50, default=None)
    return [
        sweep.title,
        str(tuple(sweep.rule)),
        f"{rule.p50:.1f}" if rule else "-",
        "-" if best is None else str(best),
        "-" if best is None else f"{times[best].p50:.1f}",
        size(sweep.bytes_moved),
        str(refused),
    ]
