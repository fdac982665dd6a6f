"""Kernels beside what they replaced, which nobody has timed yet: run on a GPU before publishing anything.

    python benchmarks/kernel_variants.py [--device cpu]        on a CPU only what needs no kernel is tried

- shares: t and dW of SwiGLU's backward pass, added by one kernel, beside torch's sums, copies and casts.
- rank: W + s B A in float32 at rank 128, 32 ranks at a time, beside all at once (8 KB of spills a thread).
- decode: NF4 to transposed float8 (45 to 51 % of a copy's rate so far) under other tiles.

Microseconds: medians of 20 runs after 3, with events around each; the operands are larger than the L2 cache.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from fewbits.formats import NF4_DQ
from fewbits.kernels import _fake_quantize_triton as fake
from fewbits.kernels import _gated_lora_triton as gated
from fewbits.kernels.dequantize import DecodeTile, dequantize_ref
from fewbits.kernels.dequantize import launch as decode


def microseconds(run: Callable[[], object]) -> float:
    """The median of 20 runs on the device's own clock."""
    times = []
    for i in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def say(name: str, run: Callable[[], object], device: str) -> None:
    """One line; on a CPU the function only runs."""
    if device == "cpu":
        run()
        print(f"{name}: runs")
    else:
        print(f"{name}: {microseconds(run):.1f} us")


def shares(device: str) -> None:
    """The sums of split shares, M = 8192, I = 14336, rank 16."""
    M, I, R = (8192, 14336, 16) if device != "cpu" else (1024, 256, 16)
    each = gated.HOPPER_TILE.block_m * gated.HOPPER_TILE.steps
    t_shares = torch.randn(I // 64, 2, R, M, device=device)
    dw_shares = torch.randn(M // each, 3, I, R, device=device)
    t = torch.empty(M, 2 * R, dtype=torch.bfloat16, device=device)

    def before() -> Tensor:
        dw = dw_shares.sum(0)[..., :R]
        t.copy_(t_shares.sum(0)[:, :R].permute(2, 0, 1).flatten(1).to(torch.bfloat16))
        return dw

    def after() -> Tensor:
        return gated._sum(t_shares, dw_shares, t, (M, I, R), (1.0, 1.0), each)

    say("shares, torch", before, device)
    if device != "cpu":
        need, need_t = before(), t.clone()
        torch.testing.assert_close(after(), need, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(t, need_t, rtol=2.0**-7, atol=2.0**-7)
        say("shares, kernel", after, device)


def rank(device: str) -> None:
    """The effective weight of 4096 x 4096 with float32 adapters of rank 128."""
    if device == "cpu":
        return
    w = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    a, b = torch.randn(128, 4096, device=device), torch.randn(4096, 128, device=device)
    out = torch.empty_like(w)
    for part in (32, 64, 128):
        with mock.patch.object(fake, "_FLOAT32_PART", part):
            say(f"rank 128, {part} at a time", lambda: fake.launch_lora(w, a, b, 1.0, out, None), device)


def decoding(device: str) -> None:
    """28672 x 4096 in NF4 with double quantisation to E4M3, transposed: 180 MB, 42 us at a copy's rate."""
    N, K = (28672, 4096) if device != "cpu" else (128, 128)
    weight = torch.randn(N, K, dtype=torch.bfloat16, device=device) * 0.02
    packed = NF4_DQ.quantize(weight)
    parts, inverse = list(packed.parts.values()), torch.full((1, 1), 1000.0, device=device)
    if device == "cpu":
        dequantize_ref(packed, torch.float8_e4m3fn, True, inverse)
        print("decode: the definition runs")
        return
    out = torch.empty(K, N, dtype=torch.float8_e4m3fn, device=device)
    need = dequantize_ref(packed, out.dtype, True, inverse)
    for rows, groups, warps in ((64, 1, 4), (64, 1, 8), (128, 1, 4), (128, 1, 8), (256, 1, 8), (64, 2, 4)):
        tile = DecodeTile(rows, groups, warps)
        decode(parts, NF4_DQ, (N, K), inverse, out, True, tile)
        assert torch.equal(out.view(torch.uint8), need.view(torch.uint8)), tile
        say(
            f"decode {tuple(tile)}",
            lambda tile=tile: decode(parts, NF4_DQ, (N, K), inverse, out, True, tile),
            device,
        )


def main() -> None:
    """All of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    for part in (shares, rank, decoding):
        part(options.device)


if __name__ == "__main__":
    main()
