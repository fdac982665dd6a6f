"""Kernels beside what they replaced.

    python benchmarks/kernels/kernel_variants.py [--device cpu]   on a CPU only what needs no kernel

- gated: SwiGLU's backward pass with its branches, by Triton and CUDA C++ with (warps of a block, parts of M).
- forward: SwiGLU with its branches and down's inner values, by Triton and cuBLAS, and at once by CUDA C++.
- turned: NF4 to transposed float8, by Triton and by CUDA C++.
- shares: t and dW of SwiGLU's backward pass, added by one kernel, beside torch's sums, copies and casts.
- rank: W + s B A in float32 at rank 128, 32 ranks at a time, beside all at once (8 KB of spills a thread).
- decode: NF4 to transposed float8 (45 to 51 % of a copy's rate so far) under other tiles.

Microseconds: medians of 20 runs after 3, with events around each, queued behind a kernel that sleeps, so that
the host is not timed; the operands are larger than the L2 cache. The share of the floor is of 4.28 TB/s.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fewbits.formats import NF4_DQ
from fewbits.kernels.codec import dequantize_cuda as turned_by_hand
from fewbits.kernels.codec.dequantize import DecodeTile, dequantize_ref
from fewbits.kernels.codec.dequantize import launch as decode
from fewbits.kernels.decoder import gated_lora_backward_cuda as by_hand
from fewbits.kernels.decoder import gated_lora_backward_triton as gated
from fewbits.kernels.decoder import gated_lora_forward_cuda as forward_by_hand
from fewbits.kernels.decoder.gated_activation import gated_activation_into
from fewbits.kernels.decoder.gated_activation_triton import LowRank, Quantized8
from fewbits.kernels.decoder.gated_lora_backward_cuda import GatedTiling
from fewbits.kernels.product import fake_quantize_triton as fake

PLANS = (GatedTiling(14, 4), GatedTiling(8, 9), GatedTiling(16, 4))


def microseconds(run: Callable[[], object]) -> float:
    """The median of 20 runs on the device's own clock."""
    times = []
    for i in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def say(name: str, run: Callable[[], object], device: str, floor_us: float = 0.0) -> None:
    """One line; on a CPU the function only runs."""
    if device == "cpu":
        run()
        print(f"{name}: runs")
        return
    us = microseconds(run)
    print(
        f"{name}: {us:.1f} us" + (f", {100 * floor_us / us:.0f} % of its floor" if floor_us else ""),
        flush=True,
    )


def apart(a: Tensor, b: Tensor) -> float:
    """The norm of a - b, of b's."""
    return float((a.float() - b.float()).norm() / b.float().norm())


def gated_operands(device: str) -> tuple[Any, Any, Any, Any, Tensor]:
    """dh, a buffer of gate and up, the branches, a buffer of their gradients and t: as in the 8B step."""
    M, I = 8192, 14336
    dh, gate_up = (torch.randn(M, n, device=device).to(torch.bfloat16) for n in (I, 2 * I))
    xa, xd = (torch.randn(M, n, device=device).mul(0.3).to(torch.bfloat16) for n in (32, 16))
    wide = torch.empty(M, 2 * I + 32, dtype=torch.bfloat16, device=device)
    w = [torch.randn(I, 16, device=device).mul(0.02).to(torch.bfloat16) for _ in range(2)]
    down = torch.randn(16, I, device=device).mul(0.02).to(torch.bfloat16).t()
    low = (LowRank(xa[:, :16], w[0]), LowRank(xa[:, 16:], w[1]), LowRank(xd, down))
    return dh, (gate_up[:, :I], gate_up[:, I:]), low, (wide[:, :I], wide[:, I : 2 * I]), wide[:, 2 * I :]


def gated_lora(device: str) -> None:
    """M = 8192, I = 14336, rank 16: gradients in bfloat16, then in E4M3."""
    if device == "cpu":
        return
    dh, (e, u), low, d, t = gated_operands(device)
    M, I = e.shape
    q = Quantized8(
        torch.empty(M, 2 * I, device=device).to(torch.float8_e4m3fn),
        torch.full((1,), 20.0, device=device),
        torch.zeros(1, device=device),
    )
    for name, outputs, quantized, floor in (
        ("bfloat16", d, None, 10 * M * I / 4.28e6),
        ("E4M3", (None, None), q, 8 * M * I / 4.28e6),
    ):
        operands = gated.BackwardOperands(dh, e, u, "silu", low, outputs, t, quantized)

        def before() -> Tensor:
            return gated.launch(operands, (1.0, 1.0))  # noqa: B023

        need, need_t = before(), t.clone()
        need_d, need_q = ([x.clone() for x in d], q.q.clone()) if quantized is None else ([], q.q.clone())
        need_amax = q.amax.clone()
        say(f"gated {name}, Triton", before, device, floor)
        for how in PLANS:

            def after(how: GatedTiling = how) -> Tensor:
                return by_hand.launch(operands, (1.0, 1.0), how)  # noqa: B023

            for x in (*d, t):
                x.fill_(torch.nan)
            q.amax.zero_()
            have = after()
            errors = [apart(t, need_t), *(apart(a, b) for a, b in zip(have, need, strict=True))]
            errors += [apart(a, b) for a, b in zip(d, need_d, strict=False)]
            if quantized is not None:
                errors.append(float((q.q.view(torch.uint8) != need_q.view(torch.uint8)).float().mean()))
                errors.append(float((q.amax - need_amax).abs() / need_amax))
            again_t = t.clone()
            same = torch.equal(after(), have) and torch.equal(t, again_t)
            print(f"  {tuple(how)}: apart {', '.join(f'{x:.1e}' for x in errors)}; again the same: {same}")
            if max(errors) < 2.0**-7 and same:
                say(f"gated {name}, CUDA {tuple(how)}", after, device, floor)
            else:
                print("  WRONG: not timed")


def forward(device: str) -> None:
    """M = 8192, I = 14336, rank 16: h in bfloat16, then in E4M3."""
    if device == "cpu":
        return
    _, (e, u), (gate, up, down), (h, _), _ = gated_operands(device)
    M, I = e.shape
    h = h.contiguous()
    q = Quantized8(
        torch.empty_like(h, dtype=torch.float8_e4m3fn),
        torch.full((1,), 20.0, device=device),
        torch.zeros(1, device=device),
    )
    for name, quantized, floor in (("bfloat16", None, 6 * M * I / 4.28e6), ("E4M3", q, 5 * M * I / 4.28e6)):

        def before() -> Tensor:
            gated_activation_into(
                e,
                u,
                h,
                activation="silu",
                low_rank_gate=gate,
                low_rank_up=up,
                quantized=quantized,  # noqa: B023
            )
            return h @ down.w

        need, need_h, need_q = before(), h.clone(), q.q.clone()
        say(f"forward {name}, Triton and cuBLAS", before, device, floor)
        for how in PLANS:
            out = h if quantized is None else None

            def after(how: GatedTiling = how, out: Tensor | None = out, q: Any = quantized) -> Tensor:
                operands = forward_by_hand.ForwardOperands(e, u, "silu", (gate, up), down.w, out, q)
                return forward_by_hand.launch(operands, 1.0, how)

            h.fill_(torch.nan)
            errors = [apart(after(), need)]
            if quantized is None:
                errors.append(apart(h, need_h))
            else:
                errors.append(float((q.q.view(torch.uint8) != need_q.view(torch.uint8)).float().mean()))
            print(f"  {tuple(how)}: apart {', '.join(f'{x:.1e}' for x in errors)}")
            if max(errors) < 2.0**-7:
                say(f"forward {name}, CUDA {tuple(how)}", after, device, floor)
            else:
                print("  WRONG: not timed")


def turned(device: str) -> None:
    """One of gate and up beside the other, and down, in NF4 with double quantisation."""
    if device == "cpu":
        return
    for N, K in ((14336, 4096), (4096, 14336), (1024, 4096)):
        packed = NF4_DQ.quantize(torch.randn(N, K, dtype=torch.bfloat16, device=device) * 0.02)
        inverse = torch.full((1, 1), 1000.0, device=device)
        out = torch.empty(K, 2 * N, dtype=torch.float8_e4m3fn, device=device)[:, N:]
        need = dequantize_ref(packed, out.dtype, True, inverse)
        parts, floor = dict(packed.parts), (1.5 + 1 / 64) * N * K / 4.28e6
        of = packed.format, list(parts.values())

        def before() -> None:
            decode(of[1], of[0], (N, K), inverse, out, True, DecodeTile(64, 1, 4))  # noqa: B023

        def after() -> None:
            turned_by_hand.launch(of[0], parts, N, K, inverse, out)  # noqa: B023

        for name, run in (("Triton", before), ("CUDA", after)):
            out.copy_(torch.zeros_like(need))
            run()
            if torch.equal(out.view(torch.uint8), need.view(torch.uint8)):
                say(f"turned {N} x {K}, {name}", run, device, floor)
            else:
                print(f"turned {N} x {K}, {name}: WRONG: not timed")


def shares(device: str) -> None:
    """The sums of split shares, M = 8192, I = 14336, rank 16."""
    M, I, R = (8192, 14336, 16) if device != "cpu" else (1024, 256, 16)
    each = 64 * 16  # rows of a program on Hopper
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
    for part in (32, 64):
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
    for rows, groups, warps in ((64, 1, 4), (64, 1, 8), (128, 1, 4), (128, 1, 8), (256, 1, 8)):
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
    for part in (shares, rank, decoding, gated_lora, forward, turned):
        part(options.device)


if __name__ == "__main__":
    main()
