"""Stochastic products on a GPU, in one call: whether all paths are exact, then times beside bf16.

python benchmarks/stochastic/stochastic_h200.py                 # about 4 minutes on an H200, the table last
python benchmarks/stochastic/stochastic_h200.py --quick         # the 8B shapes, fewer repetitions

Exactness first, and nothing is timed after a difference: `stochastic_codes` by lookups (both plans) and by
thermometers, quantised operands, attention products, and a second GPU if there is one. Times are medians with
a cold L2 cache behind a backlog (docs/notebook/how-we-measure.md), variants taking turns;
`goal` is the issue's.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fewbits.bench.measure import CudaTimer, measure
from fewbits.errors import Unsupported
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.kernels.stochastic import thermometer
from fewbits.kernels.stochastic.codes import stochastic_codes, stochastic_path
from fewbits.kernels.stochastic.emulated import emulated_product, prepare_emulated, stochastic_emulated
from fewbits.kernels.stochastic.quantize import quantize_stochastic, quantize_stochastic_ref

OPTIONS = {
    "halve": STOCHASTIC,
    "full": Stochastic(chunk_d=128),
    "L=64": STOCHASTIC.with_length(64),
    "L=32": STOCHASTIC.with_length(32),
    "L=31": STOCHASTIC.with_length(31),
}
SHAPES = {
    "8B gate/up": (4096, 14336),
    "8B down": (14336, 4096),
    "70B gate/up": (8192, 28672),
    "70B down": (28672, 8192),
}
GOALS = {(1, "halve"): 0.6, (4, "halve"): 1.2, (16, "halve"): 4.0, (1, "full"): 1.2, (4, "full"): 2.4}
GOALS |= {(16, "full"): 8.0, (2048, "halve"): 25.0, (2048, "full"): 25.0, (2048, "L=64"): 25.0}
GOALS |= {(2048, "L=32"): 17.0, (2048, "L=31"): 17.0, (2048, "rank 16"): 10.0, (2048, "rank 16 prep"): 10.0}


def same(what: str, got: Tensor, expected: Tensor) -> None:
    if not torch.equal(got.cpu(), expected.cpu()):
        wrong = int((got.cpu() != expected.cpu()).sum())
        raise SystemExit(f"{what}: {wrong} of {expected.numel()} values differ; nothing is timed.")
    print(f"exact: {what}", flush=True)


def check_products(device: torch.device) -> None:
    """Against the definition on the CPU, over row counts, options, odd shapes and both paths."""
    for name, options in OPTIONS.items():
        for N, M, D in (
            (1, 300, 1000),
            (2, 65, 384),
            (4, 1030, 4096),
            (17, 77, 91),
            (100, 2600, 4100),
            (600, 2100, 1024),
        ):
            a, b = (options.quantize(torch.randn(rows, D, device=device)) for rows in (N, M))
            expected = stochastic_codes(*(x.cpu() for p in (a, b) for x in p.parts.values()), options)
            got = stochastic_codes(a.codes, a.scales, b.codes, b.scales, options)
            path = stochastic_path(device, D, options).name
            same(f"{path} {name} {N} x {M} x {D}", got, expected)
            operands = [x[None] for p in (a, b) for x in p.parts.values()]
            tables = thermometer.tables_of(options, (options.streams.length,), 128 if D > 128 else D, device)
            y = torch.full((1, N, M), torch.nan, device=device)
            thermometer.launch(operands, tables, None, 128 if D > 128 else D, y)
            same(f"thermometer {name} {N} x {M} x {D}", y[0], expected)


def check_the_rest(device: torch.device) -> None:
    whole = replace(STOCHASTIC, chunk_d=0)
    for B, N, M, D in ((8, 1, 1500, 128), (8, 130, 1500, 128), (8, 4, 128, 1500), (2, 300, 128, 2048)):
        a, b = (quantize_stochastic(torch.randn(B, rows, D, device=device), whole) for rows in (N, M))
        expected = stochastic_codes(*(x.cpu() for x in (*a, *b)), whole)
        same(f"attention {B} x {N} x {M} x {D}", stochastic_codes(*a, *b, whole), expected)
    levels, index = (128, 96, 33, 0), torch.randint(0, 4, (9, 32), dtype=torch.uint8, device=device)
    a, b = (quantize_stochastic(torch.randn(rows, 4096, device=device), STOCHASTIC) for rows in (9, 200))
    on_cpu = stochastic_codes(*(x.cpu() for x in (*a, *b)), STOCHASTIC, levels, index.cpu())
    same("lengths of rows and chunks", stochastic_codes(*a, *b, STOCHASTIC, levels, index), on_cpu)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, s = torch.randn(300, 4100, device=device).to(dtype), torch.rand(4100, device=device) + 0.5
        for smooth, is_b in ((None, False), (s, False), (s, True)):
            got = quantize_stochastic(x, STOCHASTIC, smooth, is_b=is_b)
            cpu = None if smooth is None else smooth.cpu()
            expected = quantize_stochastic_ref(x.cpu(), STOCHASTIC, cpu, is_b=is_b)
            for part, want in zip(got, expected, strict=True):
                same(f"quantize {dtype} smooth={smooth is not None} is_b={is_b}", part, want)


def print_rows(timer: CudaTimer, label: str, N: int, bf16, variants: dict, repeats: int) -> None:
    """One shape's times, each with bf16's taking turns, and their ratio."""
    for name, variant in variants.items():
        head = f"{label:14s} {N:5d} {name:14s}"
        try:
            times = measure({"bf16": bf16, name: variant}, timer, rounds=4, repeats=repeats)
        except Unsupported as error:
            print(f"{head} {error}", flush=True)
            continue
        base, mine = times["bf16"].p50, times[name].p50
        goal = GOALS.get((N, name))
        verdict = "" if goal is None else f"{goal:6.1f} {'met' if mine / base <= goal else 'MISSED'}"
        print(f"{head} {base:10.1f} {mine:12.1f} {mine / base:8.2f}  {verdict}", flush=True)


def linears(timer: CudaTimer, shapes: dict, device: torch.device, repeats: int) -> None:
    for label, (D, M) in shapes.items():
        weight = torch.randn(M, D, device=device, dtype=torch.bfloat16)
        qb = {name: quantize_stochastic(weight, options) for name, options in OPTIONS.items()}
        ready = prepare_emulated(*qb["halve"], STOCHASTIC)
        for N in (1, 4, 16, 128, 2048):
            x = torch.randn(N, D, device=device, dtype=torch.bfloat16)
            variants = {}
            for name, options in OPTIONS.items():
                a = quantize_stochastic(x, options)
                variants[name] = lambda a=a, b=qb[name], o=options: partial(stochastic_codes, *a, *b, o)
            variants["quantise"] = lambda x=x: partial(quantize_stochastic, x, STOCHASTIC)
            if N >= 128:
                a = quantize_stochastic(x, STOCHASTIC)
                variants["rank 16"] = lambda a=a, b=qb["halve"]: partial(
                    stochastic_emulated, *a, *b, STOCHASTIC, 16
                )
                variants["rank 16 prep"] = lambda a=a, b=ready: partial(
                    emulated_product, *a, b, torch.bfloat16
                )
            if N == 2048 and D * M < 2**26:
                operands = [t[None] for t in (*quantize_stochastic(x, OPTIONS["L=32"]), *qb["L=32"])]
                tables, y = (
                    thermometer.tables_of(OPTIONS["L=32"], (32,), 128, device),
                    torch.empty(1, N, M, device=device),
                )
                variants["thermometer 32"] = lambda o=operands, t=tables, y=y: partial(
                    thermometer.launch, o, t, None, 128, y
                )
            print_rows(
                timer,
                label,
                N,
                lambda x=x, w=weight: partial(torch.matmul, x, w.t()),
                variants,
                repeats if N < 2048 else 2,
            )


def attention(timer: CudaTimer, device: torch.device, repeats: int) -> None:
    """Llama-3.1-8B: 8 groups of 4 query heads of 128, over 2048 keys; both operands quantised on the fly."""
    whole = replace(STOCHASTIC, chunk_d=0)
    for label, N, M, D in (
        ("QK^T decode", 4, 2048, 128),
        ("PV decode", 4, 128, 2048),
        ("QK^T prefill", 8192, 2048, 128),
        ("PV prefill", 8192, 128, 2048),
    ):
        a, b = (torch.randn(8, n, D, device=device, dtype=torch.bfloat16) for n in (N, M))

        def run(a=a, b=b) -> Tensor:
            return stochastic_codes(*quantize_stochastic(a, whole), *quantize_stochastic(b, whole), whole)

        print_rows(
            timer,
            label,
            N,
            lambda a=a, b=b: partial(torch.matmul, a, b.mT),
            {"halve": lambda r=run: r},
            repeats,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the 8B shapes alone, fewer repetitions")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    path = stochastic_path(device, 4096, STOCHASTIC)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; path: {path.name} {path.reason}")
    check_products(device)
    check_the_rest(device)
    if torch.cuda.device_count() > 1:
        check_products(torch.device("cuda", 1))
        assert torch.cuda.current_device() == 0
    timer, repeats = CudaTimer(device), 4 if args.quick else 8
    shapes = dict(list(SHAPES.items())[:2]) if args.quick else SHAPES
    print(
        f"{'shape':14s} {'N':>5s} {'variant':14s} {'bf16 us':>10s} {'us':>12s} {'x bf16':>8s}  {'goal':>6s}"
    )
    linears(timer, shapes, device, repeats)
    attention(timer, device, repeats)


if __name__ == "__main__":
    main()
