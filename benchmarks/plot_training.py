"""Draws results.jsonl of runs of `fewbits bench train`; a later run's figures replace an earlier one's.

python benchmarks/plot_training.py RESULTS.jsonl [...] --shape llama-3.1-8b --svg docs/training-speed-8b.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fewbits.bench.train.configurations import configuration
from fewbits.bench.train.results import plot
from fewbits.bench.train.schedule import Outcome, Task
from fewbits.bench.train.shapes import Shape, batch_of


def read(paths: list[Path]) -> list[Outcome]:
    """Outcomes by task, the last of each."""
    found = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            shape, batch, name = row["task"].split()
            task = Task(
                configuration=configuration(name), shape=Shape(name=shape, fields={}), batch=batch_of(batch),
                peak_gib=0, facts={},
            )  # fmt: skip
            found[row["task"]] = Outcome(task, said=row["said"], tries=row["tries"], error=row["error"])
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--shape", default="", help="only shapes whose name begins so")
    parser.add_argument("--svg", type=Path, required=True)
    args = parser.parse_args()
    plot([o for o in read(args.results) if o.task.shape.name.startswith(args.shape)], args.svg)


if __name__ == "__main__":
    main()
