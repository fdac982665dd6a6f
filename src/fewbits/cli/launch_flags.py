"""Flags of ``fewbits train`` that start several processes; settings of the run itself are `TrainConfig`'s."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """Add them, all without effect unless they are given."""
    group: Any = parser.add_argument_group("several processes")
    group.add_argument(
        "--nproc-per-node",
        metavar="N",
        help="start N processes on this machine, one for each GPU; gpu: one for every visible GPU",
    )
    group.add_argument("--nnodes", metavar="M", type=int, help="number of machines (default: 1)")
    group.add_argument(
        "--node-rank",
        metavar="R",
        type=int,
        help="number of this machine, from 0 (default: in order of arrival)",
    )
    group.add_argument(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="address where the machines meet: name of the first one, and a free port",
    )
    group.add_argument("--rdzv-id", metavar="TEXT", help="name of the job; the same on all of its machines")
    group.add_argument(
        "--max-restarts",
        metavar="N",
        type=int,
        help="when a process fails, restart all and resume, up to N times (default: 0)",
    )
    group.add_argument(
        "--threads",
        metavar="N",
        type=int,
        help="CPU threads of each process (default: an equal share of the machine's)",
    )
    group.add_argument("--launched", action="store_true", help=argparse.SUPPRESS)  # started by ourselves


def without_launch_flags(argv: Sequence[str]) -> list[str]:
    """The words of a command line that are left for each process."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_launch_flags(parser)
    return parser.parse_known_args(list(argv))[1]
