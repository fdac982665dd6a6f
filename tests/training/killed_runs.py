"""Reads orders for runs in forked children, which may be killed by the clock or at a write.

The parent imports everything and computes nothing: a fork has no threads to lose, and a run costs no import.
A run of several ranks is several children with torchrun's variables, each with a configuration of its own.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

import jinja2
import transformers
from tqdm import tqdm

from fewbits import cli
from fewbits.training import run
from fewbits.training.checkpoints import folders
from fewbits.training.config import TrainConfig
from fewbits.training.ranks import watch
from fewbits.training.run_folder import lock
from fewbits.training.setup import callbacks, distribute
from fewbits.training.step import trainer


def child(order: dict, counter: int) -> None:
    gc.freeze()  # a run collects garbage now and then: not among all that the parent has imported
    original, count = folders.fsync, 0

    def counted(path: Path) -> None:
        nonlocal count
        count += 1
        os.pwrite(counter, str(count).encode(), 0)
        if count == order.get("at_fsync"):
            os.kill(os.getpid(), signal.SIGKILL)
        original(path)

    folders.fsync = counted
    if limit := order.get("file_limit"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails with EFBIG, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if step := order.get("at_step"):
        kill_at(step, order.get("signal") or signal.SIGKILL)
    if pace := order.get("pace"):
        run.Watch = functools.partial(watch.Watch, pace=watch.Pace(**pace))
    if order.get("by_slices"):  # as on GPUs
        distribute._comes_in_shares = lambda config: True
    if host := order.get("host"):
        pretend(host)
    config = TrainConfig.from_mapping(order["config"])
    if order.get("command"):
        by_command(config, resume=order["resume"])
        return
    run.train(config, resume=order["resume"], launch=order.get("launch"), attempt=order.get("attempt") or 0)


def by_command(config: TrainConfig, *, resume: bool) -> None:
    """The run as ``fewbits train`` makes it."""
    settings = Path(f"{config.output_dir}.yaml")
    settings.write_text(config.to_yaml())
    if code := cli.main(["train", str(settings), *(["--resume"] if resume else [])]):
        raise RuntimeError(f"fewbits train ended with {code}; its sentence is on standard error")


def pretend(host: str) -> None:
    """To be on another machine, which has another name and another kernel."""
    socket.gethostname = lambda: host
    kernel = os.memfd_create("kernel")
    os.write(kernel, host.encode())
    lock._BOOT_ID = Path(f"/proc/self/fd/{kernel}")


def kill_at(step: int, number: int) -> None:
    """Sends itself a signal in an optimizer step, before the others have its gradients.

    In our trainer, or, in a run of a preference method, in the host's, which TRL's trainers are.
    """

    def in_class(kind):
        original = kind.training_step

        def fatal(self, *arguments, **options):
            if self.state.global_step + 1 == step and self.accelerator.sync_gradients:
                os.kill(os.getpid(), number)
            return original(self, *arguments, **options)

        kind.training_step = fatal

    for kind in (transformers.Trainer, trainer.Trainer):
        in_class(kind)


class Run:
    """A child process, what it counts and says, and its end."""

    def __init__(self, order: dict, environment: dict[str, str]) -> None:
        self.counter, self.message = os.memfd_create("count"), os.memfd_create("message")
        self.start = time.perf_counter()
        self.pid = os.fork()
        if self.pid == 0:
            tqdm.set_lock(threading.RLock())  # as tests/forks.py says; this file is run by its path
            os.environ |= environment
            try:
                child(order, self.counter)
            except BaseException as error:  # noqa: BLE001 - told to the test
                traceback.print_exc()
                os.pwrite(self.message, f"{type(error).__name__}: {error}".encode(), 0)
                os._exit(1)
            os._exit(0)

    def kill_after(self, seconds: float, signal_number: int = signal.SIGKILL) -> None:
        deadline = self.start + seconds
        while (
            time.perf_counter() < deadline
            and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
        ):
            time.sleep(0.005)
        os.kill(self.pid, signal_number)

    def outcome(self) -> dict:
        _, status = os.waitpid(self.pid, 0)
        found = {
            "status": os.waitstatus_to_exitcode(status),
            "seconds": time.perf_counter() - self.start,
            "fsyncs": int(os.pread(self.counter, 20, 0) or b"0"),
            "error": os.pread(self.message, 10_000, 0).decode(),
        }
        os.close(self.counter)
        os.close(self.message)
        return found


def several(order: dict) -> list[dict]:
    """Ranks of one run: ``configs`` holds one for each; ``kill`` is [rank, at_fsync]."""
    store = socket.socket()
    store.bind(("127.0.0.1", 0))
    port = store.getsockname()[1]
    store.close()
    size = len(order["configs"])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    shared |= {"LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    rank_to_kill, at = order.get("kill") or (-1, 0)
    runs = []
    for rank, config in enumerate(order["configs"]):
        alone = {name: order.get(name) for name in ("resume", "pace", "by_slices")} | {"config": config}
        if rank == rank_to_kill:
            alone["signal"] = order.get("signal")
            alone["at_fsync" if at > 0 else "at_step"] = abs(at)
        runs.append(Run(alone, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
    return [run.outcome() for run in runs]


def remember() -> None:
    """What each child would work out again: former names of weights, the template of PEFT's model cards."""
    from huggingface_hub import ModelCard, ModelCardData
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    jinja2.Environment.compile = functools.cache(jinja2.Environment.compile)
    ModelCard.from_template(ModelCardData())
    get_checkpoint_conversion_mapping("llama")


def import_all() -> None:
    """What a run imports late, once and for every child."""
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    remember()


def main() -> None:
    import_all()
    assert callbacks
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        if "configs" in order:
            print(json.dumps(several(order)), file=out, flush=True)
            continue
        run = Run(order, {})
        if order.get("after") is not None:
            run.kill_after(order["after"])
        print(json.dumps(run.outcome()), file=out, flush=True)


if __name__ == "__main__":
    main()
