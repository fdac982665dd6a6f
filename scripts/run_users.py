"""Run users' scripts, each in a process of its own, two at a time; one line each, exit code 1 if one fails.

    python scripts/run_users.py FOLDER NAME ...

``FOLDER/NAME.py`` runs in a new, empty working folder, with the variables of ``FOLDER/run.sh``. The processes
are forked from one that has imported what such scripts import of other libraries (never fewbits, which each
imports for itself): imports take longer than most of the scripts, and are paid once. What depends on their
order is not shown here: ``.ci/nightly users`` starts each by ``run.sh`` in an interpreter of its own.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

VARIABLES = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
LIBRARIES = [
    "torch",
    "transformers.models.llama.modeling_llama",
    "peft",
    "datasets",
    "trl.trainer.sft_trainer",
]
AT_ONCE = 2
LIMIT_S = 300


def play(script: Path, folder: str) -> None:
    """The script as the main program of this process, which ends as Python would end with it.

    What it writes to its streams goes into ``folder/out`` and ``folder/err``; it works in ``folder/work``.
    """
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT, 0o600), number)
    work = Path(folder, "work")  # empty: scripts have names of their own for what they write
    work.mkdir()
    os.chdir(work)
    gc.freeze()  # the libraries are no garbage
    warnings.simplefilter("ignore")
    sys.argv, sys.path[0] = [str(script)], str(script.parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001 a script that fails is told by its exit code and its last words
        traceback.print_exc()
        sys.exit(1)


class Started:
    """A script that runs: its process, and the folder that it writes into."""

    def __init__(self, script: Path) -> None:
        self.name, self.began = script.stem, time.monotonic()
        self.folder = tempfile.TemporaryDirectory()
        self.process = get_context("forkserver").Process(target=play, args=(script, self.folder.name))
        self.process.start()

    def left(self) -> float:
        """Seconds that it still has."""
        return max(0.0, self.began + LIMIT_S - time.monotonic())

    def end(self) -> bool:
        """Whether it ended with 0; says how long it took and what it said last."""
        self.process.kill()  # one that is over its time
        self.process.join()
        passed = self.process.exitcode == 0
        written = [Path(self.folder.name, file).read_text(errors="replace") for file in ("out", "err")]
        lines = [line for text in written[: 1 if passed else 2] for line in text.splitlines() if line.strip()]
        shown = "\n".join(lines[-1:] if passed else lines[-12:])
        word = "ok" if passed else "FAILED"
        print(f"{self.name:28} {word:7} {time.monotonic() - self.began:4.0f} s  {shown}", flush=True)
        self.folder.cleanup()
        return passed


def main(folder: str, names: list[str]) -> int:
    os.environ.update(VARIABLES)
    get_context("forkserver").set_forkserver_preload(LIBRARIES)
    scripts = [Path(folder).resolve() / f"{name}.py" for name in names]
    absent = [script for script in scripts if not script.is_file()]
    for script in absent:
        print(f"{script.stem}: there is no {script}")
    waiting, running, failed = [s for s in scripts if s not in absent], list[Started](), len(absent)
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(Started(waiting.pop(0)))
        wait([one.process.sentinel for one in running], min(one.left() for one in running))
        over = [one for one in running if not one.left() or not one.process.is_alive()]
        running = [one for one in running if one not in over]
        failed += sum(not one.end() for one in over)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
