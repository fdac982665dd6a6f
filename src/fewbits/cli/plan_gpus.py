"""``fewbits plan-gpus``: the cost model of `fewbits.training.ranks.scaling` as a table."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import asdict, replace

from rich import box
from rich.table import Table

from fewbits.cli.console import console
from fewbits.errors import BadInput
from fewbits.training.ranks.scaling import ETHERNET, NVLINK, SLOWDOWN, Cluster, Link, Step, Work, plan

FORMATS = ("float32", "bfloat16", "int8", "int4")


def plan_gpus(args: Namespace) -> int:
    """Read the arguments, ask the model, show every step."""
    try:
        gpus = [int(part) for part in args.gpus.split(",")]
    except ValueError as error:
        raise BadInput(f"--gpus is {args.gpus!r}; write whole numbers with commas, as in 8,64.") from error
    if min(args.values, args.step_ms) <= 0:
        raise BadInput(
            f"--values is {args.values:g} and --step-ms is {args.step_ms:g}; both must be above 0."
        )
    between = Link(rate=args.network_gbit / 8 * 1e9 * ETHERNET, latency=args.latency_us * 1e-6)
    inside = NVLINK if args.inside_gbyte is None else replace(NVLINK, rate=args.inside_gbyte * 1e9)
    slowdown = SLOWDOWN if args.slowdown is None else args.slowdown
    cluster = Cluster(gpus=1, node_size=args.node_size, inside=inside, between=between, slowdown=slowdown)
    work = Work(values=args.values, compute=args.step_ms / 1e3, gradient_bytes=args.gradient_bytes)
    steps = plan(work, cluster, gpus, FORMATS)
    if args.json:
        rows = [{**asdict(step), "seconds": step.seconds, "efficiency": step.efficiency} for step in steps]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        console().print(_table(steps))
    return 0


def _table(steps: list[Step]) -> Table:
    """One line a number of GPUs: step and efficiency by format."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 2),
        caption="ms a step (share of linear speed); on paper, see docs/guide/gradient-communication.md",
        caption_justify="left",
    )
    table.add_column("GPUs", justify="right")
    for name in FORMATS:
        table.add_column(name, justify="right", no_wrap=True)
    for count in dict.fromkeys(step.gpus for step in steps):
        same = [step for step in steps if step.gpus == count]
        table.add_row(f"{count:,}", *(f"{s.seconds * 1e3:,.0f} ({s.efficiency:.0%})" for s in same))
    return table
