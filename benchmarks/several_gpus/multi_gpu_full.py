"""All weights of a 1B or 3B shape over several GPUs: the parts full (DDP) and sharded (FSDP2) of `multi_gpu`.

The ways are all there at once and take turns, a few steps each: a GPU's clock and the host's load change with
time, and the differences between the ways are as small as that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from multi_gpu_probes import adamw, training_step
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from fewbits.bench.train.shapes import batch_of
from fewbits.decoder.fuse import fuse
from fewbits.decoder.keep import KEEP_ACTIVATIONS
from fewbits.formats import INT8
from fewbits.training.ranks.ddp import bucket_mib, quantize_gradients
from fewbits.training.ranks.fsdp import shard
from fewbits.training.ranks.fsdp_communication import quantize_reduce_scatter

ROUNDS = 3


@dataclass
class Contestant:
    """One way: its model, its optimizer, what is told of it, and what it took, by batch."""

    name: str
    model: Any
    autocast: bool
    receipt: str = ""
    optimizer: Any = None
    peaks: dict[str, float] = field(default_factory=dict)
    steps: dict[str, Callable[[], None]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)


def full(bench: Any) -> None:
    """Ways for gradients to travel under DDP."""
    _contest(bench, "full", bench.options.ways.split(","), _ddp, "gradients in ")


def sharded(bench: Any) -> None:
    """Under FSDP2: as it is in bfloat16, gathered in E4M3, gradients in INT8."""
    _contest(bench, "sharded", bench.options.shards.split(","), _fsdp, "")


def _contest(bench: Any, part: str, ways: Sequence[str], make: Callable[..., Contestant], said: str) -> None:
    texts = bench.options.batches.split(",")
    there = []
    for way in ways:
        bench.free()
        beside = bench.held_gib()
        one = make(bench, way)
        one.optimizer = adamw(one.model, 1e-5)
        for text in texts:
            ids = bench.batch(*batch_of(text))
            one.steps[text] = training_step(one.model, ids, one.optimizer, autocast=one.autocast)
            bench.free()
            for _ in range(bench.options.warm_up):
                one.steps[text]()
            bench.wait()
            one.peaks[text] = round(bench.peak_gib(beside), 2)
        there.append(one)
    name = _shape(bench)
    for text in texts:
        bench.free()
        for _ in range(ROUNDS):
            for one in there:
                one.times.setdefault(text, []).extend(bench.times_ms(one.steps[text], warm_up=1))
        for one in there:
            bench.note(
                part, f"all weights, {name}, {text} a GPU, {said}{one.name}", one.times[text],
                tokens=bench.batch(*batch_of(text)).numel(), format=one.name, peak_gib=one.peaks[text],
                **bench.profiled(one.steps[text]), receipt=one.receipt,
            )  # fmt: skip
    there.clear()
    bench.free()


def _shape(bench: Any) -> str:
    return "3b" if bench.options.large else "1b"


def _model(bench: Any) -> Any:
    """All weights in float32, the same on every rank, made on its device; fused."""
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(
            bench.config(_shape(bench)), dtype=torch.float32, attn_implementation="sdpa"
        )
    fuse(model, keep=KEEP_ACTIVATIONS)
    return model.train()


def _ddp(bench: Any, way: str) -> Contestant:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

    model = _model(bench)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib(model))
    receipt = ""
    if way == "bf16":
        # torch has the one for bfloat16 on CUDA only
        ddp.register_comm_hook(None, hooks.fp16_compress_hook if bench.dry else hooks.bf16_compress_hook)
    elif way in ("int8", "int8 kept in float32"):
        kept = torch.float32 if way != "int8" else torch.bfloat16
        receipt = str(quantize_gradients(ddp, INT8, residual_dtype=kept)).splitlines()[0]
    elif way == "none":
        ddp.register_comm_hook(None, _keep)
    elif way != "float32":
        raise SystemExit(f"--ways has {way!r}; known: none, float32, bf16, int8, int8 kept in float32.")
    return Contestant(way, ddp, autocast=not bench.dry, receipt=receipt)


def _keep(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are texts
    """A hook that sends nothing: what the exchange costs is the difference to this."""
    future: Any = torch.futures.Future(devices=[bucket.buffer().device] if bucket.buffer().is_cuda else None)
    future.set_result(bucket.buffer())
    return future


def _fsdp(bench: Any, way: str) -> Contestant:
    model = _model(bench)
    shard(model, compute_dtype=bench.dtype, reduce_dtype=torch.float32, float8_all_gather="float8" in way)
    if "int8" in way:
        quantize_reduce_scatter(model, INT8, error_feedback=True)
    return Contestant(way, model, autocast=False)
