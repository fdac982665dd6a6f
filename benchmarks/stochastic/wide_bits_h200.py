"""Stochastic products by warpgroups' products of bits (wide_bits.cu): exact, then times.

    PYTHONPATH=src:. python benchmarks/stochastic/wide_bits_h200.py      # about a minute on an H200

Every width of tile, beside cuBLAS in bfloat16 and what is chosen; `wide_bits.plan` and `estimated_clocks` of
`fewbits.kernels.stochastic.choice` are made from these times.
Floors, times bfloat16 at its peak: 1.5 at 8 steps, 2 at 16, 3 at 32, 5 at 64, 9 at 128.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from torch import Tensor

from fewbits.bench.measure import CudaTimer, measure
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.kernels.stochastic import lookup, wide_bits
from fewbits.kernels.stochastic.codes import stochastic_codes
from fewbits.kernels.stochastic.quantize import quantize_stochastic

SHAPES = {"gate/up": (4096, 14336), "down": (14336, 4096), "o": (4096, 4096)}
CASES = (
    ("gate/up", 2048, (8, 16, 32, 64, 128)),
    ("down", 2048, (16, 32, 128)),
    ("down", 256, (16, 32, 64, 128)),
    ("down", 128, (32, 128)),
    ("gate/up", 128, (32, 128)),
    ("gate/up", 32, (32, 128)),
    ("o", 256, (32, 128)),
    ("o", 64, (32, 128)),
    ("gate/up", 512, (32, 128)),
    ("down", 512, (32, 128)),
    ("down", 64, (32, 128)),
    ("o", 2048, (32, 128)),
)
PLAIN = wide_bits.plan


def with_columns(columns: int) -> None:
    """Blocks of so many of a's rows, whatever the estimate."""
    wide_bits.plan = partial(PLAIN, columns=columns)  # type: ignore[assignment]


def check(device: torch.device) -> None:
    """Every width of block, against the definition on the CPU."""
    for columns in (32, 64, 128):
        with_columns(columns)
        for length in (128, 50, 32, 16, 5):
            options = STOCHASTIC.with_length(length)
            a, b = (quantize_stochastic(torch.randn(n, 1040), options) for n in (300, 700))
            tables = wide_bits.tables_of(options, (length,), 128, device)
            y = torch.full((1, 300, 700), torch.nan, device=device)
            wide_bits.launch([x[None].to(device).contiguous() for x in (*a, *b)], tables, None, 128, y)
            if not torch.equal(y[0].cpu(), stochastic_codes(*a, *b, options)):
                raise SystemExit(f"{columns} columns, {length} steps: DIFFERENT; nothing is timed.")
    print("exact", flush=True)


def main() -> None:
    """Check, time, print."""
    style = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=style).parse_args()
    device, started = torch.device("cuda", 0), time.time()
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    check(device)
    timer = CudaTimer(device)

    def clock(call: partial[Tensor | None]) -> float:
        return measure({"it": lambda: call}, timer, rounds=2, repeats=2)["it"].p50

    for name, rows, lengths in CASES:
        D, M = SHAPES[name]
        x, w = (torch.randn(n, D, device=device, dtype=torch.bfloat16) for n in (rows, M))
        operands = [t[None] for v in (x, w) for t in quantize_stochastic(v, STOCHASTIC)]
        y, exact = torch.empty(1, rows, M, device=device), clock(partial(torch.matmul, x, w.t()))
        for length in lengths:
            options = STOCHASTIC.with_length(length)
            tables, words = wide_bits.tables_of(options, (length,), 128, device), list[str]()
            for columns in (128, 64, 32) if rows <= 256 else (128, 64):
                if columns >= 2 * rows:
                    continue
                with_columns(columns)
                us = clock(partial(wide_bits.launch, operands, tables, None, 128, y))
                words.append(f"{columns} columns {us:.0f} ({us / exact:.2f})")
            wide_bits.plan = PLAIN
            present = clock(partial(stochastic_codes, *operands, options))
            if rows <= 256:
                z, counts = torch.empty_like(y), lookup.tables_of(options, (length,), 128, device)
                lookup.launch(operands, counts, None, 128, z)
                words.append("equals few rows'" if torch.equal(z, y) else "DIFFERENT")
            print(
                f"{name} {rows} rows, {length} steps: bf16 {exact:.0f} us, chosen {present:.0f} |",
                " | ".join(words),
                flush=True,
            )
    print(f"{time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
