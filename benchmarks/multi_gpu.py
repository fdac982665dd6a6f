"""Several GPUs of one host: weak scaling of QLoRA, a sharded 70B model, gradients in INT8.

Checks come first, the table last.

    torchrun --nproc-per-node 2 benchmarks/multi_gpu.py [weak fsdp full]     # on two and on four H200s
    torchrun --nproc-per-node 2 benchmarks/multi_gpu.py --dry-run            # two CPU processes, tiny shapes

weak: QLoRA of the Llama-3.1-8B shape (random weights, NF4 with double quantisation, LoRA r=16, 4 x 2048
tokens on each GPU). A step of rank 0 alone while the others idle, then of all with the same load each; the
figure is the first over the second. Gradients are averaged after the pass, as `fewbits train` does with
adapters.

fsdp: QLoRA of the Llama-3.1-70B shape, random weights made shard by shard, FSDP2 with packed weights: whether
it fits, tokens a second, the peak of memory. No peer is run: Hugging Face + PEFT + bitsandbytes under FSDP is
not part of this script yet.

full: all weights of a 1.2B shape (--large: 3.2B), float32 with bfloat16 autocast, under DDP: gradients as
they are, in bfloat16 by torch's own hook, and in INT8.

A step is the median of --steps after --warm-up; all ranks begin together, and the slowest one counts. Nothing
of this had been run on GPUs when it was written. Results: a table on rank 0, and multi_gpu.json in --out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

from fewbits import convert, get_peft_model
from fewbits.formats import INT8, NF4_DQ
from fewbits.models.fused import fuse
from fewbits.recipes.recipe import LoRA, Recipe, Rule
from fewbits.training.averaging import GradientMean
from fewbits.training.ddp import quantize_gradients
from fewbits.training.sharded_loading import load_sharded_model

_VOCABULARY = {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 5e5}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, **_VOCABULARY},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8, **_VOCABULARY},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
           "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True, **_VOCABULARY},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
           "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True, **_VOCABULARY},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256},
}  # fmt: skip
RECIPE = Recipe(name="qlora_nf4", linear=Rule(weight=NF4_DQ), lora=LoRA(r=16))


class Bench:
    """The processes, their devices, what was measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.dry = options, options.dry_run
        self.began = not dist.is_initialized()
        if self.began:
            dist.init_process_group("gloo" if self.dry else "nccl")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu" if self.dry else f"cuda:{dist.get_node_local_rank(0)}")
        if not self.dry:
            torch.cuda.set_device(self.device)
        self.rows: list[dict[str, Any]] = []

    def shape(self, name: str) -> dict[str, Any]:
        return SHAPES["tiny" if self.dry else name]

    def batch(self) -> Tensor:
        rows, length = (2, 32) if self.dry else (4, 2048)
        generator = torch.Generator(self.device).manual_seed(self.rank)
        return torch.randint(3, 500, (rows, length), device=self.device, generator=generator)

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def step_ms(self, step: Callable[[], Any], *, together: bool = True) -> float:
        """The median of a step, of the slowest rank where all take part."""
        times = []
        for i in range(self.options.warm_up + self.options.steps):
            if together:
                dist.barrier()
            self.wait()
            began = time.perf_counter()
            step()
            self.wait()
            if i >= self.options.warm_up:
                times.append((time.perf_counter() - began) * 1e3)
        mine = torch.tensor(statistics.median(times), device=self.device)
        if together:
            dist.all_reduce(mine, dist.ReduceOp.MAX)
        return float(mine)

    def peak_gib(self) -> float:
        return 0.0 if self.dry else torch.cuda.max_memory_allocated(self.device) / 2**30

    def free(self) -> None:
        if not self.dry:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def note(self, part: str, what: str, **figures: Any) -> None:
        self.rows.append({"part": part, "what": what, "gpus": self.size, **figures})


def checks(bench: Bench) -> None:
    """What must hold before anything is measured."""
    assert bench.size >= 2, "start at least two processes: torchrun --nproc-per-node 2 ..."
    names = [None] * bench.size
    dist.all_gather_object(names, "CPU" if bench.dry else torch.cuda.get_device_name(bench.device))
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


def random_model(bench: Bench, name: str, dtype: torch.dtype) -> Any:
    """The same random weights on every rank, made on its device."""
    torch.manual_seed(0)
    with torch.device(bench.device):
        config = LlamaConfig(**bench.shape(name))
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def training_step(model: Any, ids: Tensor, optimizer: Any, mean: Any = None) -> Callable[[], None]:
    """Forward, backward, the mean, the update."""

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if mean is not None:
            mean()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def weak(bench: Bench) -> None:
    """QLoRA of the 8B shape: one GPU alone against all of them."""
    model = random_model(bench, "8b", torch.float32 if bench.dry else torch.bfloat16)
    convert(model.requires_grad_(False), RECIPE)
    model = get_peft_model(model, LoRA(r=16)).train()
    fuse(model)
    ids, optimizer = bench.batch(), torch.optim.AdamW(trained(model), lr=1e-4, fused=True)
    alone = torch.zeros((), device=bench.device)
    if bench.rank == 0:
        alone.fill_(bench.step_ms(training_step(model, ids, optimizer), together=False))
    dist.broadcast(alone, 0)
    for p in trained(model):  # rank 0 has trained alone
        dist.broadcast(p.data, 0)
    mean = GradientMean(model.parameters(), bench.size)
    together = bench.step_ms(training_step(model, ids, optimizer, mean))
    bench.note(
        "weak",
        "QLoRA 8B, 4 x 2048 a GPU",
        alone_ms=round(float(alone), 2),
        all_ms=round(together, 2),
        scaling=round(float(alone) / together, 4),
        tokens_s=round(ids.numel() * bench.size / together * 1e3),
        peak_gib=round(bench.peak_gib(), 2),
        want="scaling >= 0.975 at four",
    )


def fsdp(bench: Bench) -> None:
    """QLoRA of the 70B shape, sharded."""
    config = LlamaConfig(**bench.shape("70b"))
    dtype = torch.float32 if bench.dry else torch.bfloat16
    model, receipt = load_sharded_model(config, recipe=RECIPE, lora=LoRA(r=16), dtype=dtype)
    model.train()
    ids, optimizer = bench.batch()[:1], torch.optim.AdamW(trained(model), lr=1e-4, fused=True)
    ms = bench.step_ms(training_step(model, ids, optimizer))
    bench.note(
        "fsdp",
        "QLoRA 70B, 1 x 2048 a GPU",
        all_ms=round(ms, 2),
        tokens_s=round(ids.numel() * bench.size / ms * 1e3),
        peak_gib=round(bench.peak_gib(), 2),
        receipt=str(receipt).splitlines()[-1],
        want="fits",
    )


def full(bench: Bench) -> None:
    """All weights of a 1B (3B) shape: three ways for gradients to travel."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    name = "3b" if bench.options.large else "1b"
    want = "int8 no slower than bf16"
    for way in ("float32", "bf16", "int8"):
        model = random_model(bench, name, torch.float32).train()
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        exchange = None
        if way == "bf16":
            # torch has the one for bfloat16 on CUDA only
            hooks = default_hooks
            ddp.register_comm_hook(None, hooks.fp16_compress_hook if bench.dry else hooks.bf16_compress_hook)
        elif way == "int8":
            exchange = quantize_gradients(ddp, INT8)
        ids, optimizer = bench.batch(), torch.optim.AdamW(trained(model), lr=1e-5, fused=True)
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=not bench.dry):
            ms = bench.step_ms(training_step(ddp, ids, optimizer))
        bench.note(
            "full",
            f"all weights, {name}, gradients in {way}",
            all_ms=round(ms, 2),
            tokens_s=round(ids.numel() * bench.size / ms * 1e3),
            peak_gib=round(bench.peak_gib(), 2),
            receipt="" if exchange is None else str(exchange).splitlines()[0],
            want=want if way == "int8" else "",
        )
        del model, ddp, optimizer, exchange
        bench.free()


PARTS = {"weak": weak, "fsdp": fsdp, "full": full}


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        head = f"{row['part']:<6} {row['what']:<44} {row['gpus']} GPUs"
        rest = {k: v for k, v in row.items() if k not in ("part", "what", "gpus") and v != ""}
        lines.append(f"{head}  {'  '.join(f'{k} {v}' for k, v in rest.items())}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Check, measure what was asked for, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes over gloo; no figure of it counts"
    )
    parser.add_argument("--large", action="store_true", help="full: the 3.2B shape")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder (default: $OUT, or here)")
    options = parser.parse_args(argv)
    bench = Bench(options)
    checks(bench)
    for name in options.parts or PARTS:
        PARTS[name](bench)
        bench.free()
    if bench.rank == 0:
        facts = {"dry_run": bench.dry, "torch": torch.__version__, "rows": bench.rows}
        (Path(options.out) / "multi_gpu.json").write_text(json.dumps(facts, indent=1))
        print(table(bench.rows))
    dist.barrier()
    if bench.began:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
