"""Stochastic products of many rows, by the kernels that are chosen, beside cuBLAS in bfloat16.

    PYTHONPATH=src:. python benchmarks/stochastic/many_rows_h200.py           # about 25 s on an H200

First attention's products of a prompt, then the linears of the 8B shape: microseconds of bfloat16, then of 8
to 128 steps as multiples of it, and of whole numbers. `fewbits.kernels.stochastic.choice` and `wide_bits`
estimate by rates that follow from such times. Floors of products of bits, times bfloat16 at its peak: 1.5 at
8 steps, 2 at 16, 3 at 32, 5 at 64, 9 at 128.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from fewbits.formats.stochastic import STOCHASTIC
from fewbits.kernels.stochastic import wide_bits
from fewbits.kernels.stochastic.codes import stochastic_codes
from fewbits.kernels.stochastic.integer_product import integer_product
from fewbits.kernels.stochastic.quantize import quantize_stochastic

SHAPES = {"gate/up": (4096, 14336), "down": (14336, 4096), "o": (4096, 4096), "k, v": (4096, 1024)}
ROWS = (2048, 512, 128, 256, 64, 32, 4096, 1024)
LENGTHS = (8, 16, 32, 64, 128)


class Clock:
    """Medians with a cold L2 cache, behind a backlog."""

    def __init__(self, device: torch.device) -> None:
        self.flush = torch.ones(64 * 2**20, device=device)

    def __call__(self, run: Callable[[], object], repeats: int = 5) -> float:
        """Microseconds."""
        run()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        torch.cuda.synchronize()
        torch.cuda._sleep(8_000_000)
        for start, end in events:
            self.flush.sum()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return sorted(start.elapsed_time(end) * 1e3 for start, end in events)[repeats // 2]


def attention(clock: Clock, device: torch.device) -> None:
    """8 groups of 4 query heads of 128, 2,048 tokens; inner dimensions whole."""
    whole = replace(STOCHASTIC, chunk_d=0)
    for name, rows, outputs, inner in (("QK^T", 8192, 2048, 128), ("PV", 8192, 128, 2048)):
        x, w = (torch.randn(8, n, inner, device=device, dtype=torch.bfloat16) for n in (rows, outputs))
        exact, words = clock(partial(torch.matmul, x, w.mT), 7), []
        operands = [t for v in (x, w) for t in quantize_stochastic(v, whole)]
        for length in LENGTHS[1:]:
            options = whole.with_length(length)
            us = clock(partial(stochastic_codes, *operands, options))
            words.append(f"{us / exact:.2f} ({us:.0f})")
        quantising = [clock(partial(quantize_stochastic, v, whole)) for v in (x, w)]
        index = torch.randint(0, 2, (8, rows, 1), dtype=torch.uint8, device=device)
        mixed = clock(partial(stochastic_codes, *operands, whole.with_length(64), (64, 32), index))
        integer = clock(partial(integer_product, *operands, whole))
        print(
            f"{name} | bf16 {exact:.1f} | 16 to 128 steps: {' | '.join(words)} | rows of 64 and 32 "
            f"{mixed / exact:.2f} | whole numbers {integer / exact:.2f} | quantising "
            f"{sum(quantising):.0f} us",
            flush=True,
        )


def main() -> None:
    """Time, print."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--columns", type=int, choices=(32, 64, 128), help="rows of a tile, not as planned")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which nothing is begun")
    args = parser.parse_args()
    if args.columns is not None:
        wide_bits.plan = partial(wide_bits.plan, columns=args.columns)  # type: ignore[assignment]
    device, began = torch.device("cuda", 0), time.time()
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    clock = Clock(device)
    print(torch.cuda.get_device_name(device), torch.__version__, flush=True)
    attention(clock, device)
    for rows in ROWS:
        for name, (inner, outputs) in SHAPES.items():
            if time.time() - began > args.limit:
                print("the limit is reached")
                return
            x, w = (torch.randn(n, inner, device=device, dtype=torch.bfloat16) for n in (rows, outputs))
            operands = [t[None] for v in (x, w) for t in quantize_stochastic(v, STOCHASTIC)]
            exact, words = clock(partial(torch.matmul, x, w.t()), 7), []
            for length in LENGTHS:
                us = clock(partial(stochastic_codes, *operands, STOCHASTIC.with_length(length)), 3)
                words.append(f"{us / exact:.2f} ({us:.0f})")
            integer = clock(partial(integer_product, *operands, STOCHASTIC), 3)
            print(
                f"{name} {rows} | bf16 {exact:.1f} | {' | '.join(words)}",
                f"| whole numbers {integer / exact:.2f}",
                flush=True,
            )
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
