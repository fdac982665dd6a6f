"""One configuration in a process of its own: build, check, warm up, time; one JSON line for each.

Started by `fewbits.bench.train.schedule`, which sends a line when it is this process' turn. Lines that begin
with `MARK` are for it; what a peer prints besides goes to the log.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fewbits.bench.train.builders import Job, build, imports
from fewbits.bench.train.configurations import configuration
from fewbits.bench.train.kernels import profile
from fewbits.bench.train.parity import check
from fewbits.bench.train.shapes import Shape, batches, flops_per_token, random_model
from fewbits.bench.train.stepper import Stepper

MARK = "@fewbits "
_SETTLE = 2
_PACKAGES = ("transformers", "peft", "bitsandbytes", "liger_kernel", "unsloth", "unsloth_zoo", "torchao")


def main() -> int:
    """Do the job that stands in the file named by the one argument."""
    raw = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    shape = Shape(name=raw["shape"]["name"], fields=raw["shape"]["fields"])
    device = torch.device(raw["device"])
    if raw["configuration"] == "checkpoint":
        _wait("imported")
        return _write_checkpoint(shape, device, raw["checkpoint"])
    lengths = raw["lengths"]
    job = Job(
        configuration=configuration(raw["configuration"]),
        shape=shape,
        batch=tuple(raw["batch"]),
        device=raw["device"],
        checkpoint=raw["checkpoint"],
        warm_up=raw["warm_up"],
        steps=raw["steps"],
        layers=raw["layers"],
        lengths=None if lengths is None else tuple(lengths),
        profiled=raw["profiled"],
    )
    imports(job.configuration.side)
    _wait("imported")
    if job.lengths is not None:
        from fewbits.bench.train.longest import search

        search(job, tell, _wait)
    else:
        _train(job, device)
    return 0


def tell(state: str, **facts: Any) -> None:
    """A line for the parent."""
    sys.stdout.write(f"\n{MARK}{json.dumps({'state': state, **facts})}\n")
    sys.stdout.flush()


def _wait(state: str) -> None:
    tell(state)
    if not sys.stdin.readline():
        raise SystemExit("the process that would time this one is gone.")


def _write_checkpoint(shape: Shape, device: torch.device, folder: str) -> int:
    from fewbits.bench.train.tokenizer import write_tokenizer

    model = random_model(shape.config(), device, torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    write_tokenizer(folder)
    tell("done")
    return 0


def _train(job: Job, device: torch.device) -> None:
    began = time.perf_counter()
    built = build(job)
    trainer = Stepper(job, built, device)
    tell("built", seconds=_since(began), notes=built.notes)
    data = batches(job.shape.config().vocab_size, job.batch, job.warm_up + _SETTLE + job.steps, device)
    compare = partial(check, rounding=job.configuration.rounding, layers=job.layers)
    parity = compare(built.model, data[0], trainer.forward_backward)
    if job.configuration.delayed and not parity.failures:  # its scales come from the steps before
        parity = compare(built.model, data[0], trainer.forward_backward, history=data[1:3])
    tell("parity", **parity.plain())  # the parent prints no speed of one that fails; its file keeps it
    trainer.start()
    began = time.perf_counter()
    for ids in data[: job.warm_up]:
        trainer.step(ids)
        trainer.sync()
        tell("step", seconds=_since(began))
    trainer.free()
    _wait("warm")
    for ids in data[job.warm_up : job.warm_up + _SETTLE]:
        trainer.step(ids)
    trainer.sync()
    times, peak = trainer.timed(data[job.warm_up + _SETTLE :])
    losses = [round(float(loss), 5) for loss in trainer.losses]
    moved, notes = trainer.moved(), trainer.notes()
    if job.profiled:
        tell("kernels", **profile(lambda: trainer.step(data[0]), device))
    tokens, median = job.batch[0] * job.batch[1], statistics.median(times)
    flops = flops_per_token(job.shape.config(), job.batch[1], full=job.configuration.trains_all)
    tell(
        "timed",
        times_ms=[round(t, 3) for t in times],
        tokens_per_second=round(tokens / median * 1e3, 1),
        model_tflops=round(flops * tokens / median / 1e9, 1),
        peak_gib=round(peak / 2**30, 3),
        base_gib=round(trainer.base_bytes / 2**30, 3),
        trainable=sum(p.numel() for p in trainer.trained),
        moved=moved,
        losses=losses,
        packages=_versions(),
        notes=notes,
    )


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 2)


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {"torch": str(torch.__version__)}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name.replace("_kernel", "-kernel"))
    return versions


if __name__ == "__main__":
    sys.exit(main())
