"""An output head in FP8: its parts beside bfloat16, and what each choice does to the gradient.

    python benchmarks/training/float8_head.py [--record benchmarks/results.csv] [--max-size 512 --device cpu]

Times are of a chunk of 1,024 rows, Llama-3.1-8B's and Qwen3-1.7B's heads, all variants in turns. The gradient
is that of 1,024 hidden states under a head of 128256 x 4096 whose rows share a mean and a direction of how
frequent their word is, with labels drawn by Zipf's law: a softmax then has a tail, as with random weights it
has not. Printed are the relative errors of dh and of its mean over rows, which is what steps add up.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.bench.measure import CudaTimer, HostTimer, device_to_time, measure
from fewbits.bench.record import Row, append, conditions
from fewbits.kernels.codec.quantize_float8 import quantize_rows
from fewbits.kernels.loss.cross_entropy_triton import Gradient8, launch
from fewbits.kernels.loss.linear_cross_entropy import linear_cross_entropy, rows_ref
from fewbits.kernels.loss.linear_cross_entropy_float8 import head_operands, linear_cross_entropy_float8
from fewbits.kernels.product.matmul_float8 import float8_linear, scale_row

SHAPES = {"llama-3.1-8b": (128256, 4096), "qwen3-1.7b": (151936, 2048)}
ROWS = 1024
Run = Callable[[], tuple[Tensor, ...]]


def sizes(args: argparse.Namespace, V: int, K: int) -> tuple[int, int, int]:
    """Rows, vocabulary and width, cut to --max-size."""
    return min(ROWS, args.max_size), min(V, args.max_size), min(K, args.max_size)


def parts(M: int, V: int, K: int, device: torch.device) -> dict[str, Run]:
    """The products and the pass between them, as functions to time."""
    h = torch.randn(M, K, device=device).bfloat16()
    w = torch.randn(V, K, device=device).bfloat16() * 0.02
    y = torch.randint(V, (M,), device=device)
    made = head_operands(w)
    assert made.transposed is not None
    w8, turned, of_z, of_dh = made.w8, made.transposed, scale_row(made.scale, V), scale_row(made.scale, K)
    q, scale = quantize_rows(h)
    z, loss = h @ w.t(), torch.empty(M, device=device)
    found = gradient8(z)
    over_rows = launch if z.is_cuda else rows_ref
    over_rows(z, y, None, loss, -100, (0.0, 0.0, 0.0), False, found)
    dz = z.clone()

    def a_pass(dense: bool, out: Gradient8 | None) -> Run:
        def run() -> tuple[Tensor, ...]:
            over_rows(dz if dense else z, y, None, loss, -100, (0.0, 0.0, 0.0), dense, out)
            return (loss,)

        return run

    return {
        "logits": lambda: (float8_linear(q, scale, w8, of_z, fast=False),),
        "logits, short accumulator": lambda: (float8_linear(q, scale, w8, of_z),),
        "logits, bfloat16": lambda: (h @ w.t(),),
        "dh": lambda: (float8_linear(found.q, found.scale, turned, of_dh, fast=False),),
        "dh, short accumulator": lambda: (float8_linear(found.q, found.scale, turned, of_dh),),
        "dh, bfloat16": lambda: (dz @ w,),
        "loss and gradient, 8 bits": a_pass(False, found),
        "loss and gradient, bfloat16": a_pass(True, None),
        "loss and gradient, both": a_pass(True, found),
    }


def gradient8(z: Tensor) -> Gradient8:
    M = z.shape[0]
    q = torch.empty(z.shape, dtype=torch.float8_e4m3fn, device=z.device)
    return Gradient8(q, torch.empty((M, 1), device=z.device), torch.empty(M, device=z.device))


def zipf(M: int, V: int, K: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head and labels with the tail of a language's words."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    logs = -torch.log(torch.arange(1, V + 1, device=device).float() + 2.7)
    frequent, mean = (F.normalize(normal(K), dim=0) for _ in range(2))
    w = normal(V, K) / math.sqrt(K) + 0.05 * (logs - logs.mean())[:, None] * frequent + 0.5 * mean
    y = torch.multinomial(logs.softmax(0), M, replacement=True, generator=generator)
    h = 20 * frequent + normal(M, K) * math.sqrt(512 / K) + 6 * F.normalize(w[y] - 0.5 * mean, dim=1)
    return h.bfloat16(), w.bfloat16(), y


def errors(M: int, V: int, K: int, device: torch.device) -> dict[str, tuple[float, float, float]]:
    """Of each way to make dh: error of the loss, of dh, and of the mean of its rows."""
    h, w, y = zipf(M, V, K, device)
    made = head_operands(w)
    assert made.transposed is not None
    leaf = h.float().requires_grad_()
    exact = F.cross_entropy(leaf @ w.float().t(), y, reduction="sum")
    (want,) = torch.autograd.grad(exact, leaf)
    leaf = h.requires_grad_()
    results: dict[str, tuple[float, Tensor]] = {}
    for name, loss in (
        ("bfloat16", linear_cross_entropy(leaf, w, y, reduction="sum")),
        ("FP8", linear_cross_entropy_float8(leaf, w, y, made, reduction="sum")),
        (
            "FP8, dh in bfloat16",
            linear_cross_entropy_float8(leaf, w, y, made._replace(transposed=None), reduction="sum"),
        ),
    ):
        results[name] = float(loss.detach()), torch.autograd.grad(loss, leaf)[0]
    q, scale = quantize_rows(h.detach())
    over_rows = launch if h.is_cuda else rows_ref
    for name, fast_z, fast_dh in (
        ("short accumulator for logits", True, False),
        ("short accumulator for dh", False, True),
    ):
        z = float8_linear(q, scale, made.w8, made.scale, fast=fast_z)
        found, loss = gradient8(z), torch.empty(M, device=device)
        over_rows(z, y, None, loss, -100, (0.0, 0.0, 0.0), False, found)
        dh = float8_linear(found.q, found.scale, made.transposed, made.scale, fast=fast_dh).float()
        results[name] = float(loss.sum()), dh + found.own[:, None] * w[y].float()
    return {
        name: (
            (loss - float(exact.detach())) / M,
            float((dh.float() - want).norm() / want.norm()),
            float((dh.float() - want).mean(0).norm() / want.mean(0).norm()),
        )
        for name, (loss, dh) in results.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-size", type=int, default=2**20, help="cut every dimension to this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=Path, help="append the rows to this file")
    parser.add_argument("--commit", help="the commit, outside of a git checkout")
    args = parser.parse_args()
    device = device_to_time(args.device)
    timer = CudaTimer(device) if device.type == "cuda" else HostTimer()
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    M, V, K = sizes(args, *SHAPES["llama-3.1-8b"])
    for name, found in errors(M, V, K, device).items():
        print(
            f"{name:<30} loss {found[0]:+.4f}, dh off by {found[1]:.4f}, its mean by {found[2]:.4f}",
            flush=True,
        )
        for metric, value in zip(("loss error", "gradient error", "mean gradient error"), found, strict=True):
            rows.append(
                Row(
                    op="float8_head", part="zipf", variant=name, format="float8_e4m3", M=M, N=V, K=K,
                    metric=metric, unit="nats" if metric == "loss error" else "relative",
                    low=round(value, 5), value=round(value, 5), high=round(value, 5),
                )
            )  # fmt: skip
    for shape, (vocabulary, width) in SHAPES.items():
        M, V, K = sizes(args, vocabulary, width)
        runs = parts(M, V, K, device)
        times = measure({name: lambda run=run: run for name, run in runs.items()}, timer, rounds=args.rounds)
        for name, t in times.items():
            print(
                f"{shape} {name:<28} {t.p50:9.1f} us a chunk, {t.p50 * 8192 / M / 1e3:7.2f} ms of 8,192 rows"
            )
            rows.append(
                Row(
                    op="float8_head", part=shape, variant=name, format="float8_e4m3", M=M, N=V, K=K,
                    metric="time", unit="us",
                    low=round(t.p20, 2), value=round(t.p50, 2), high=round(t.p80, 2),
                )
            )  # fmt: skip
    if args.record:
        here = conditions(device, command="python benchmarks/training/float8_head.py", commit=args.commit)
        append(args.record, rows, here)


if __name__ == "__main__":
    main()
