"""Run every example in this process, one after the other, on the tiny model that the package brings along.

python scripts/run_examples.py [NAME ...]

One process, so that torch and transformers are imported once. Exit code 1 if one fails.
"""

from __future__ import annotations

import runpy
import sys
import time
import traceback
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def main(names: list[str]) -> int:
    failed = []
    for path in sorted(EXAMPLES.glob("*.py")):
        if names and path.stem not in names:
            continue
        begun = time.perf_counter()
        sys.argv = [path.name]
        try:
            runpy.run_path(str(path), run_name="__main__")
        except BaseException:  # noqa: BLE001 an example that exits or fails is told, the others run
            traceback.print_exc()
            failed.append(path.stem)
        print(f"== {path.stem}: {time.perf_counter() - begun:.1f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
