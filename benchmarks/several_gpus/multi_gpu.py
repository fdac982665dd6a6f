"""Several GPUs of one host: weak scaling of QLoRA, a sharded 70B model and its peer, gradients in INT8.

Checks come first, the table last.

    torchrun --nproc-per-node 2 benchmarks/several_gpus/multi_gpu.py [weak fsdp full sharded exchange peer]
    torchrun --nproc-per-node 2 benchmarks/several_gpus/multi_gpu.py --dry-run    # two CPU processes, tiny

weak: QLoRA of the Llama-3.1-8B shape as `fewbits bench train` has it (--configs), 4 x 2048 tokens on each
GPU. Steps of rank 0 alone while the others idle, before and after those of all with the same load each; the
figure is the mean of the first over the second. Gradients are averaged after the pass, as `fewbits train`
does with adapters.

fsdp: QLoRA of the Llama-3.1-70B shape, random weights made shard by shard, FSDP2 with packed weights: tokens
a second, the peak of memory, and of one profiled step how long the GPU computed, how long NCCL ran, and how
long it did neither or only that.

peer: the same by Hugging Face, PEFT and bitsandbytes (`multi_gpu_peer`), which must be installed.

full: all weights of a 1.2B shape (--large: 3.2B), float32 with bfloat16 autocast, fused, under DDP: gradients
as they are, in bfloat16 by torch's own hook, in INT8, and not exchanged at all (--ways). A batch of --batches
each. All of them are there at once and take turns, so that what changes with time changes all.

sharded: the same under FSDP2 in bfloat16: as it is, weights gathered in E4M3, gradients in INT8 (--shards).

exchange: the collective calls and the codec alone, for one bucket and for 1 GiB of float32 gradients: what
`fewbits.training.ranks.scaling` needs to know.

A step's time is by events on the device, --steps of them one behind the other after --warm-up; the median,
of the slowest rank. Results: a table on rank 0, multi_gpu.json in --out, with --record rows of
benchmarks/results.csv.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from multi_gpu_full import full, sharded
from multi_gpu_probes import adamw, exchange_calls, loss_range, profiled, trained, training_step
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig

from fewbits.bench.measure import quantiles
from fewbits.bench.record import Row, append, conditions
from fewbits.bench.train.builders import Job, build
from fewbits.bench.train.configurations import configuration
from fewbits.bench.train.shapes import SHAPES, batch_of, shape_of
from fewbits.formats import INT8
from fewbits.models.plan.memory_budget import budget_for
from fewbits.recipes import LoRA, get_recipe
from fewbits.training.config_values import parse_memory_budget
from fewbits.training.ranks.averaging import GradientMean
from fewbits.training.ranks.communication import Travel
from fewbits.training.ranks.ddp import quantize_gradients
from fewbits.training.ranks.fsdp import keep_gathered
from fewbits.training.ranks.sharded_loading import load_sharded_model

_ROPE = dict(SHAPES["llama-3.1-8b"])
LARGER: dict[str, dict[str, Any]] = {
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
           "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
           "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True},
}  # fmt: skip


class Bench:
    """The processes, their devices, what was measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.dry = options, options.dry_run
        self.device = torch.device("cpu" if self.dry else f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
        self.began = not dist.is_initialized()
        if not self.dry:
            torch.cuda.set_device(self.device)
        if self.began:
            named = {} if self.dry else {"device_id": self.device}
            dist.init_process_group("gloo" if self.dry else "nccl", **named)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.notes: list[dict[str, Any]] = []
        self.rows: list[Row] = []

    def config(self, name: str) -> Any:
        """The configuration of a larger or smaller sister of the 8B shape; tiny in a dry run."""
        fields = dict(SHAPES["tiny"]) if self.dry else {**_ROPE, **LARGER[name]}
        return AutoConfig.for_model(fields.pop("model_type"), **fields)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16

    def batch(self, rows: int, length: int) -> Tensor:
        rows, length = (2, 32) if self.dry else (rows, length)
        generator = torch.Generator(self.device).manual_seed(self.rank)
        return torch.randint(3, 500, (rows, length), device=self.device, generator=generator)

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        if self.dry:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def times_ms(
        self, step: Callable[[], Any], *, together: bool = True, warm_up: int | None = None
    ) -> list[float]:
        """Of steps one behind the other; where all take part, of the rank whose median is the largest."""
        for _ in range(self.options.warm_up if warm_up is None else warm_up):
            step()
        self.wait()
        if together:
            dist.barrier()
        marks = [self.mark()]
        for _ in range(self.options.steps):
            step()
            marks.append(self.mark())
        self.wait()
        times = [(b - a) * 1e3 if self.dry else a.elapsed_time(b) for a, b in pairwise(marks)]
        if not together:
            return times
        return max(self.everyones(times), key=statistics.median)

    def everyones(self, mine: Any) -> list[Any]:
        """By rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found

    def profiled(self, step: Callable[[], None]) -> dict[str, float]:
        """What the GPU did in one step."""
        return {} if self.dry else profiled(step)

    def held_gib(self) -> float:
        """What is allocated on this rank."""
        return 0.0 if self.dry else torch.cuda.memory_allocated() / 2**30

    def peak_gib(self, beside: float = 0.0) -> float:
        """Since `free`, of the rank with the most; without what was ``beside`` it."""
        peak = 0.0 if self.dry else torch.cuda.max_memory_allocated() / 2**30
        return max(self.everyones(peak - beside))

    def free(self) -> None:
        if not self.dry:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def note(
        self, part: str, what: str, times: Sequence[float] = (), *, tokens: int = 0, **more: Any
    ) -> None:
        """A line of the table; with times rows, too: ``format`` and ``variant`` name them."""
        variant, number = more.pop("variant", "fewbits"), more.pop("format", "")
        figures: dict[str, Any] = {}
        if times:
            p20, p50, p80 = (round(value, 3) for value in quantiles(list(times)))
            figures = {"ms": p50, "p20": p20, "p80": p80}
            if tokens:
                figures["tokens_s"] = round(tokens * self.size / p50 * 1e3)
            head = {"op": f"multi_gpu_{part}", "part": f"{what}, {self.size} GPUs", "variant": variant}
            self.rows.append(
                Row(**head, format=number, metric="time", unit="ms", low=p20, value=p50, high=p80)
            )
            for metric, unit in (("peak_gib", "GiB"), ("scaling", "share of linear"), ("idle_ms", "ms")):
                if metric in more:
                    value = {"low": more[metric], "value": more[metric], "high": more[metric]}
                    name = {"peak_gib": "peak memory", "idle_ms": "not computing"}.get(metric, metric)
                    self.rows.append(Row(**head, format=number, metric=name, unit=unit, **value))
        line = {"part": part, "what": what, "variant": variant, "format": number, "gpus": self.size}
        self.notes.append({**line, **figures, **more})
        if self.rank == 0:
            print(table(self.notes[-1:]), flush=True)
            self.save()

    def save(self) -> None:
        """What was measured so far: nothing of it is lost if the next row fails."""
        options = self.options
        facts = {"dry_run": self.dry, "torch": torch.__version__, "rows": self.notes}
        (Path(options.out) / "multi_gpu.json").write_text(json.dumps(facts, indent=1))
        if options.record is not None and self.rows:
            script = "benchmarks/several_gpus/multi_gpu.py"
            command = f"torchrun --nproc-per-node {self.size} {script} {options.command}"
            packages = ("transformers", "peft", *(("bitsandbytes",) if "peer" in options.parts else ()))
            run = conditions(self.device, command=command, commit=options.commit, packages=packages)
            append(options.record, self.rows, run)
            self.rows.clear()


def checks(bench: Bench) -> None:
    """What must hold before anything is measured."""
    assert bench.size >= 2, "start at least two processes: torchrun --nproc-per-node 2 ..."
    names = bench.everyones("CPU" if bench.dry else torch.cuda.get_device_name(bench.device))
    assert len(set(names)) == 1, f"the GPUs differ: {names}"
    p = torch.nn.Parameter(torch.zeros(1000, device=bench.device))
    p.grad = torch.full_like(p, float(bench.rank))
    GradientMean([p], bench.size)()
    mean = (bench.size - 1) / 2
    assert torch.equal(p.grad, torch.full_like(p, mean)), "the mean of the ranks' gradients is wrong"
    linear = torch.nn.Linear(256, 256, bias=False, device=bench.device)
    ddp = DistributedDataParallel(linear)
    quantize_gradients(ddp, INT8)
    torch.manual_seed(bench.rank)
    x = torch.randn(64, 256, device=bench.device)
    ddp(x).square().sum().backward()
    want = torch.autograd.grad(linear(x).square().sum(), linear.weight)[0]
    dist.all_reduce(want)
    want /= bench.size
    error = (linear.weight.grad - want).norm() / want.norm()
    assert error < 0.02, f"INT8 gradients are off by {error:.3f} of their norm"
    bench.note("check", names[0], mean="exact", int8_error=round(float(error), 5))


def weak(bench: Bench) -> None:
    """QLoRA of the 8B shape: one GPU alone against all of them."""
    names = ["ours:nf4"] if bench.dry else bench.options.configs.split(",")
    for name in names:
        shape = shape_of("tiny" if bench.dry else "llama-3.1-8b")
        config = configuration(name)
        job = Job(configuration=config, shape=shape, batch=(4, 2048), device=str(bench.device), checkpoint="")
        built = build(job)
        model, memory = built.model, built.memory
        ids, optimizer = bench.batch(4, 2048), adamw(model, 1e-4)
        mean = GradientMean(model.parameters(), bench.size)
        step = training_step(model, ids, optimizer, memory=memory)
        first = bench.times_ms(step, together=False) if bench.rank == 0 else []
        for p in trained(model):  # rank 0 has trained alone
            dist.broadcast(p.data, 0)
        times = bench.times_ms(training_step(model, ids, optimizer, mean=mean, memory=memory))
        second = bench.times_ms(step, together=False) if bench.rank == 0 else []
        alone: list[Any] = [None if bench.rank else statistics.median([*first, *second])]
        dist.broadcast_object_list(alone, 0)
        bench.note(
            "weak", "QLoRA 8B, 4 x 2048 a GPU", times, tokens=ids.numel(), variant=name, format=config.format,
            alone_ms=round(alone[0], 2), scaling=round(alone[0] / statistics.median(times), 4),
            peak_gib=round(bench.peak_gib(), 2), want="scaling >= 0.975 at four",
        )  # fmt: skip
        del built, model, memory, optimizer, mean, step
        bench.free()


def fsdp(bench: Bench) -> None:
    """QLoRA of the 70B shape, sharded."""
    for name in bench.options.recipes.split(","):
        began = time.perf_counter()
        recipe = get_recipe(name)
        model, receipt = load_sharded_model(
            bench.config("70b"), recipe=recipe, lora=LoRA(r=16, alpha=16), dtype=bench.dtype
        )
        bench.wait()
        more: dict[str, Any] = {"load_s": round(time.perf_counter() - began, 1)}
        optimizer = adamw(model.train(), 1e-4)
        for text in bench.options.batches.split(","):
            once = bench.options.keep and batch_of(text)[0] == 1
            for gathered in ("for each pass", "once a step") if once else ("for each pass",):
                keep_gathered(model, on=gathered == "once a step")
                ids = bench.batch(*batch_of(text))
                bench.free()
                budget = parse_memory_budget(bench.options.budget)
                memory = budget_for(
                    model, budget, recipe=recipe, lora=LoRA(r=16, alpha=16),
                    batch=batch_of(text), optimizer_bytes=4, agree=bench.everyones,
                )  # fmt: skip
                step = training_step(model, ids, optimizer, memory=memory)
                times = bench.times_ms(step)
                more |= {"peak_gib": round(bench.peak_gib(), 2), "loss": loss_range(step)}
                more |= bench.profiled(step)
                more["memory"] = "" if memory is None else memory.notes[-1]
                bench.note(
                    "fsdp", f"QLoRA 70B, {text} a GPU, gathered {gathered}", times, tokens=ids.numel(),
                    format=name, **more, receipt=str(receipt).splitlines()[-1], want="fits",
                )  # fmt: skip
        del model, optimizer, step
        bench.free()


def peer(bench: Bench) -> None:
    """The same by Hugging Face, PEFT and bitsandbytes; what does not fit is said."""
    other = importlib.import_module("multi_gpu_peer")
    for engine in bench.options.engines.split(","):
        began = time.perf_counter()
        model, recompute = other.sharded(bench.config("70b"), bench.device, engine)
        bench.wait()
        load_s = round(time.perf_counter() - began, 1)
        optimizer = adamw(model, 1e-4)
        for text in bench.options.batches.split(","):
            # more rows than one do not fit without, and ranks that run out of memory no longer agree
            for recomputes in (False, True) if batch_of(text)[0] == 1 else (True,):
                recompute(recomputes)
                ids = bench.batch(*batch_of(text))
                step = training_step(model, ids, optimizer)
                bench.free()
                what = f"QLoRA 70B, {text} a GPU{', layers recomputed' if recomputes else ''}"
                try:
                    times = bench.times_ms(step)
                except torch.cuda.OutOfMemoryError as error:
                    bench.note("peer", what, variant=engine, failed=str(error).split(". ")[0])
                    return  # the ranks no longer agree on where they are
                bench.note(
                    "peer", what, times, tokens=ids.numel(), variant=engine, format="nf4_dq",
                    peak_gib=round(bench.peak_gib(), 2), loss=loss_range(step), load_s=load_s,
                    **bench.profiled(step),
                )  # fmt: skip
        del model, optimizer, step, recompute
        bench.free()


def exchange(bench: Bench) -> None:
    """Each call of an exchange alone."""
    travel = Travel(None)
    for values in (2**10,) if bench.dry else (25 * 2**18, 2**28):
        gradient = torch.randn(values, device=bench.device)
        calls = exchange_calls(travel, gradient)
        for name, call in calls.items():
            times = bench.times_ms(call)
            bench.note("exchange", f"{name}, {values * 4 / 2**20:g} MiB of float32", times, format=name)
            gradient.normal_()
        del calls
        bench.free()


PARTS = {
    "weak": weak, "fsdp": fsdp, "full": full, "sharded": sharded, "exchange": exchange, "peer": peer,
}  # fmt: skip


def table(notes: list[dict[str, Any]]) -> str:
    lines = []
    for note in notes:
        head = f"{note['part']:<8} {note['what']:<52} {note['variant']:<16} {note['gpus']} GPUs"
        names = ("part", "what", "gpus", "variant", "format")
        rest = {k: v for k, v in note.items() if k not in names and v != ""}
        lines.append(f"{head}  {'  '.join(f'{k} {v}' for k, v in rest.items())}")
    return "\n".join(lines)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)} (default: all but peer)")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes over gloo; no figure of it counts"
    )
    parser.add_argument("--configs", default="ours:nf4@36,ours:nf4-fp8", help="weak: of fewbits bench train")
    parser.add_argument("--recipes", default="qlora_nf4", help="fsdp: with commas between")
    parser.add_argument("--engines", default="fsdp2,fsdp1", help="peer: torch's FSDP2, FSDP1")
    parser.add_argument("--ways", default="none,float32,bf16,int8", help="full: what gradients travel in")
    parser.add_argument(
        "--shards",
        default="bf16,float8 gather,int8 reduce,float8 gather + int8 reduce",
        help="sharded: of these",
    )
    parser.add_argument("--batches", default="1x2048", help="fsdp, peer, full: of a GPU, as 1x2048,4x2048")
    parser.add_argument("--budget", default="auto", help="fsdp: the memory plan's (default: auto)")
    parser.add_argument(
        "--keep", action="store_true", help="fsdp: one row also with layers gathered once a step"
    )
    parser.add_argument("--large", action="store_true", help="full, sharded: the 3.2B shape")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder (default: $OUT, or here)")
    parser.add_argument("--record", type=Path, help="append rows to this CSV file")
    parser.add_argument("--commit", help="for the rows, where there is no git checkout")
    options = parser.parse_args(argv)
    names = ("batches", "recipes", "ways", "shards", "engines", "configs", "steps", "warm_up")
    chosen = [name for name in names if getattr(options, name) != parser.get_default(name)]
    said = [*options.parts]
    said += [f"--{name.replace('_', '-')} {shlex.quote(str(getattr(options, name)))}" for name in chosen]
    options.command = " ".join(
        [*said, *(f"--{flag}" for flag in ("large", "keep") if getattr(options, flag))]
    )
    return options


def main(argv: list[str] | None = None) -> None:
    """Check, measure what was asked for, print."""
    options = arguments(argv)
    bench = Bench(options)
    checks(bench)
    for name in options.parts or [name for name in PARTS if name != "peer"]:
        PARTS[name](bench)
        bench.free()
    dist.barrier()
    if bench.began:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
