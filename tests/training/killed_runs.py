"""Reads orders from standard input; each is a run in a forked child, which may be killed by the clock or at a write.

The parent imports everything and computes nothing, so a fork has no threads to lose, and a run costs no import.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from fewbits.training import callbacks, checkpointing, run
from fewbits.training.config import TrainConfig


def child(order: dict, counter: int) -> None:
    original, count = checkpointing.fsync, 0

    def counted(path: Path) -> None:
        nonlocal count
        count += 1
        os.pwrite(counter, str(count).encode(), 0)
        if count == order["at_fsync"]:
            os.kill(os.getpid(), signal.SIGKILL)
        original(path)

    checkpointing.fsync = counted
    run.train(TrainConfig.from_mapping(order["config"]), resume=order["resume"])


def main() -> None:
    import datasets  # noqa: F401 - what a run imports late
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    assert callbacks
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        counter = os.memfd_create("count")
        start = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            try:
                child(order, counter)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if order["after"] is not None:
            deadline = start + order["after"]
            while (
                time.perf_counter() < deadline
                and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
            ):
                time.sleep(0.005)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        seconds = time.perf_counter() - start
        count = int(os.pread(counter, 20, 0) or b"0")
        os.close(counter)
        print(
            json.dumps({"status": os.waitstatus_to_exitcode(status), "seconds": seconds, "fsyncs": count}),
            file=out,
            flush=True,
        )


if __name__ == "__main__":
    main()
