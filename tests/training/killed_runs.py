"""Reads orders for runs in forked children, which may be killed by the clock or at a write.

The parent imports everything and computes nothing: a fork has no threads to lose, and a run costs no import.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

from fewbits.training import callbacks, checkpointing, run
from fewbits.training.config import TrainConfig


def child(order: dict, counter: int) -> None:
    original, count = checkpointing.fsync, 0

    def counted(path: Path) -> None:
        nonlocal count
        count += 1
        os.pwrite(counter, str(count).encode(), 0)
        if count == order.get("at_fsync"):
            os.kill(os.getpid(), signal.SIGKILL)
        original(path)

    checkpointing.fsync = counted
    if limit := order.get("file_limit"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails with EFBIG, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
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
        counter, message = os.memfd_create("count"), os.memfd_create("message")
        start = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            try:
                child(order, counter)
            except BaseException as error:  # noqa: BLE001 - told to the test
                traceback.print_exc()
                os.pwrite(message, f"{type(error).__name__}: {error}".encode(), 0)
                os._exit(1)
            os._exit(0)
        if order.get("after") is not None:
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
        error = os.pread(message, 10_000, 0).decode()
        os.close(counter)
        os.close(message)
        outcome = {
            "status": os.waitstatus_to_exitcode(status),
            "seconds": seconds,
            "fsyncs": count,
            "error": error,
        }
        print(json.dumps(outcome), file=out, flush=True)


if __name__ == "__main__":
    main()
