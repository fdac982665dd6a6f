"""Decoding a weight of 14336 x 4096 to bfloat16 by the kernel that descriptions generate, beside a copy.

    python benchmarks/kernels/decode_described.py [NAME ...]    on a GPU; a minute for all kinds of format

Of each format first a weight is decoded and compared with the definition, bit for bit; what differs is
not timed. Then microseconds: the best of three means of 10 runs, two weights in turn, so that the second
cache does not hold them; GB/s of the bytes that must move, and their share of what a copy reaches here.
Two numbers stand first: a copy of the dense weight, and filling it, which writes as much and reads nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from fewbits.formats import FORMATS
from fewbits.formats.base import Format, Packed
from fewbits.kernels.codec import dequantize_described as described

N, K = 14336, 4096
KINDS = (
    "int2_g128", "int3_g128", "int3_g128_zp", "int5_g128", "int6_g128", "int7_g128", "ternary_g128", "mxfp4",
    "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8", "nvfp4", "nvfp4_16x16",
    *(f"gguf_{kind}" for kind in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k")),
    *(f"gguf_{kind}" for kind in ("q6_k", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0", "mxfp4")),
    "trellis2", "trellis3", "trellis4",
)  # fmt: skip


def weight(format: Format, rows: int) -> Packed:
    """A packed (rows, K) of random bytes, on the GPU."""
    parts = {}
    for name, spec in format.layout((rows, K)).items():
        if spec.dtype.itemsize == 1:
            raw = torch.randint(0, 127, spec.shape, dtype=torch.uint8, device="cuda")
            parts[name] = raw.view(spec.dtype)
        else:
            parts[name] = torch.rand(spec.shape, device="cuda", dtype=torch.float32).to(spec.dtype)
    return Packed(format, (rows, K), torch.bfloat16, parts)


def differs(format: Format) -> bool:
    """Whether the kernel's bits are others than the definition's, on 256 rows; a NaN is a NaN."""
    packed = weight(format, 256)
    out = torch.empty(256, K, dtype=torch.bfloat16, device="cuda")
    described.launch(format, packed.parts, (256, K), out)
    parts = {name: part.cpu() for name, part in packed.parts.items()}
    wanted, found = Packed(format, (256, K), torch.bfloat16, parts).dequantize(), out.cpu()
    bits = [x.view(torch.int16).masked_fill(wanted.isnan(), 0) for x in (wanted, found)]
    return not (torch.equal(*bits) and torch.equal(wanted.isnan(), found.isnan()))


def ms(run: Callable[[int], None]) -> float:
    """The best of three means, of ten launches that were recorded: the host's time is not in it."""
    run(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(10):
            run(number)
    best = float("inf")
    for _ in range(4):  # the first warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 10)
    return best


def copy(to: Tensor, of: Tensor) -> None:
    """``of`` (N, K) into ``to``."""
    to.copy_(of)


def main() -> None:
    """Print one line for each format."""
    out = torch.empty(N, K, dtype=torch.bfloat16, device="cuda")
    pair = torch.empty_like(out), torch.empty_like(out)
    copied = 2 * out.nbytes / ms(lambda number: copy(pair[number % 2], out)) / 1e6
    filled = out.nbytes / ms(lambda number: pair[number % 2].fill_(1.0)) / 1e6
    print(f"a copy: {copied:.0f} GB/s; filling: {filled:.0f} GB/s")
    print(f"{'format':14s} {'us':>7s} {'GB/s':>6s} {'of a copy':>9s}")
    for name in sys.argv[1:] or KINDS:
        format = FORMATS[name]
        if differs(format):
            print(f"{name:14s} DIFFERS from the definition", flush=True)
            continue
        packed = [weight(format, N) for _ in range(2)]
        nbytes = out.nbytes + packed[0].nbytes

        def run(number: int, format: Format = format, packed: list[Packed] = packed) -> None:
            described.launch(format, packed[number % 2].parts, (N, K), out)

        time = ms(run)
        rate = nbytes / time / 1e6
        print(f"{name:14s} {1e3 * time:7.1f} {rate:6.0f} {100 * rate / copied:7.0f} %", flush=True)


if __name__ == "__main__":
    main()
