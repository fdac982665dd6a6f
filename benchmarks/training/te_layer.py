"""One layer of Transformer Engine's documented 5B model by `fewbits.te`, each recipe beside bfloat16.

    python benchmarks/training/te_layer.py [--parts linears layer] [--recipes bfloat16 delayed ...]

Hidden size 4096, feed-forward 16384, 32 heads, 31 x 512 tokens, forward and backward. "linears" are its
four `Linear` (12288, 4096, 16384 and 4096 outputs, with biases) one by one on inputs of their own, "layer" is
the whole `TransformerLayer` without dropout. The recipes take turns, ``--rounds`` times ``--steps`` steps
each, so that all see the same warm GPU; printed are the medians. ``--profile N`` prints the N kernels that
take most of one step. On a CPU tiny sizes run, to see that the script does.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import fewbits.te as te
from fewbits.te import recipe

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HIDDEN, FEED, HEADS, LENGTH, BATCH = (4096, 16384, 32, 512, 31) if CUDA else (64, 256, 4, 16, 2)
RECIPES: dict[str, Any] = {
    "bfloat16": None,
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "current_primary": recipe.Float8CurrentScaling(),
    "delayed_primary": recipe.DelayedScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
KINDS = (
    ("products", r"gemm|nvjet|cutlass|sm90_xmma|matmul"),
    ("attention", r"flash|fmha|cudnn|attention"),
    ("quantisation", r"float8_|_amax|_multiplier|_quantize"),
    ("norms", r"layer_norm|LayerNorm|GammaBeta|rms"),
    ("sums of gradients", r"reduce_kernel"),
    ("elementwise", r"elementwise|vectorized|Copy|copy|Memset|Memcpy|fill|gelu"),
)


def linears(name: str) -> tuple[list[Any], Callable[[], None]]:
    """The modules and a step of the four linears."""
    shapes = ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, FEED), (FEED, HIDDEN))
    with te.quantized_model_init(enabled=name.endswith("_primary"), recipe=RECIPES[name]):
        modules = [te.Linear(k, n, params_dtype=torch.bfloat16, device=DEVICE) for k, n in shapes]
    tokens = LENGTH * BATCH
    inputs = [torch.randn(tokens, k, dtype=torch.bfloat16, device=DEVICE).requires_grad_() for k, _ in shapes]
    dy = [torch.randn(tokens, n, dtype=torch.bfloat16, device=DEVICE) for _, n in shapes]

    def step() -> None:
        with te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            outputs = [module(x) for module, x in zip(modules, inputs, strict=True)]
        torch.autograd.backward(outputs, dy)
        for tensor in (*inputs, *(p for module in modules for p in module.parameters())):
            tensor.grad = None

    return modules, step


def layer(name: str) -> tuple[list[Any], Callable[[], None]]:
    """The module and a step of the whole layer."""
    with te.quantized_model_init(enabled=name.endswith("_primary"), recipe=RECIPES[name]):
        module = te.TransformerLayer(
            HIDDEN,
            FEED,
            HEADS,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            fuse_qkv_params=True,
            params_dtype=torch.bfloat16,
            device=DEVICE,
        )
    x = torch.randn(LENGTH, BATCH, HIDDEN, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    dy = torch.randn_like(x.detach())

    def step() -> None:
        with te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            y = module(x)
        y.backward(dy)
        for tensor in (x, *module.parameters()):
            tensor.grad = None

    return [module], step


def timed(step: Callable[[], None], steps: int) -> list[float]:
    """Milliseconds of each of several steps, which follow each other without a pause."""
    if not CUDA:
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - began))
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def profile(step: Callable[[], None], most: int) -> None:
    """Print the kernels of one step, by kinds and by name."""
    activity = torch.profiler.ProfilerActivity.CUDA if CUDA else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as run:
        step()
        if CUDA:
            torch.cuda.synchronize()
    names, kinds = collections.Counter(), collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for event in run.events():
        micro = event.device_time_total if CUDA else event.cpu_time_total
        names[event.name] += micro
        counts[event.name] += 1
        kinds[next((k for k, pattern in KINDS if re.search(pattern, event.name)), "others")] += micro
    print("   " + ", ".join(f"{kind} {micro / 1e3:.2f}" for kind, micro in kinds.most_common()))
    for name, micro in names.most_common(most):
        print(f"   {micro / 1e3:8.3f} ms {counts[name]:4} x {name[:150]}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", nargs="+", default=["linears", "layer"], choices=["linears", "layer"])
    plain = [name for name in RECIPES if name not in ("mxfp8", "nvfp4", "delayed_primary")]
    parser.add_argument("--recipes", nargs="+", default=plain, choices=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--profile", type=int, default=0, metavar="KERNELS")
    options = parser.parse_args()
    for part in options.parts:
        torch.manual_seed(0)
        runs = {name: {"linears": linears, "layer": layer}[part](name)[1] for name in options.recipes}
        times: dict[str, list[float]] = {name: [] for name in runs}
        with te.emulation():
            for turn in range(options.rounds + 1):  # the first one warms up
                for name, step in runs.items():
                    some = timed(step, options.steps)
                    times[name] += some if turn else []
            base = statistics.median(times[options.recipes[0]])
            for name, step in runs.items():
                middle = statistics.median(times[name])
                low, high = min(times[name]), max(times[name])
                print(
                    f"{part} {name}: {middle:.2f} ms ({low:.2f} to {high:.2f}), {base / middle:.3f} times "
                    f"{options.recipes[0]}",
                    flush=True,
                )
                if options.profile:
                    profile(step, options.profile)
        del runs
        if CUDA:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
