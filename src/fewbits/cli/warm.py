"""``fewbits warm``: compile for this GPU what a model will run."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

from fewbits.cli.console import console
from fewbits.cli.plan import batch_of
from fewbits.errors import BadInput
from fewbits.training.ahead.warming import warm
from fewbits.words import size


def run(args: Namespace) -> int:
    """Compile, and say what came into which folder."""
    if args.rank < 1:
        raise BadInput(f"--rank is {args.rank}; adapters have a rank of at least 1.")
    batch = (1, 2048) if args.batch is None else batch_of(args.batch)
    warmed = warm(args.model, args.recipe, batch=batch, rank=args.rank)
    if args.json:
        facts = {
            "gpu": warmed.gpu,
            "folder": str(warmed.folder),
            "kernels": list(warmed.kernels),
            "bytes": warmed.nbytes,
            "seconds": round(warmed.seconds, 3),
        }
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return 0
    screen = console()
    if warmed.kernels:
        screen.print(f"{len(warmed.kernels)} kernels for {warmed.gpu}: {', '.join(warmed.kernels)}")
    else:
        screen.print(f"all kernels for {warmed.gpu} were compiled before")
    screen.print(f"{size(warmed.nbytes)} more in {warmed.folder}, in {warmed.seconds:.1f} s")
    return 0
