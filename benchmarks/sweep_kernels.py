"""Which tile is fastest for the kernels between the products: the numbers behind their tile functions.

python benchmarks/sweep_kernels.py [dequantize] [gated_forward] [gated_backward] [rope] [--shape 8b]

Every configuration is first compared with the definition (relative error in the Frobenius norm; for
dequantisation bit for bit); one that is wrong, or that does not compile or fit, is listed with the reason
and not timed. The table has microseconds (median; quintiles), and the share of the floor: the
bytes that must move at 4282 GB/s, a copy's rate on an H200.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fewbits.bench.measure import CudaTimer, measure, relative_error
from fewbits.formats import get_format
from fewbits.kernels import dequantize as dequantize_module
from fewbits.kernels._gated_triton import GatedTile, LowRank
from fewbits.kernels._gated_triton import launch_bwd as gated_bwd
from fewbits.kernels._gated_triton import launch_fwd as gated_fwd
from fewbits.kernels._rope_triton import RopeTile, Tables
from fewbits.kernels._rope_triton import launch as rope_launch
from fewbits.kernels.dequantize import DecodeTile, dequantize_ref
from fewbits.kernels.gated_activation import gated_activation_backward_ref, gated_activation_ref
from fewbits.kernels.rope import rope_ref, split_heads

COPY_RATE = 4282e9
TOP = 6
SHAPES = {  # tokens, hidden, intermediate, heads, kv heads, head width
    "8b": (8192, 4096, 14336, 32, 8, 128),
    "1.7b": (8192, 2048, 6144, 16, 8, 128),
    "0.6b": (8192, 1024, 3072, 16, 8, 128),
}
RANK = 16

Config = tuple[str, Callable[[], object], Callable[[], float]]  # name, what is timed, its error


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def dequantize_sweeps(shape: tuple[int, ...]) -> Iterator[tuple[str, int, list[Config]]]:
    N, K = shape[2], shape[1]
    inverse = torch.full((N, 1), 300.0, device="cuda")
    for format, dtype, transposed in [
        ("nf4_dq", torch.bfloat16, False),
        ("nf4_dq", torch.float8_e4m3fn, False),
        ("nf4_dq", torch.float8_e4m3fn, True),
        ("nf4_dq", torch.bfloat16, True),
        ("int4_g64", torch.bfloat16, False),
        ("int8", torch.bfloat16, False),
    ]:
        packed = get_format(format).quantize(randn(N, K) * 0.02)
        scale = inverse if dtype == torch.float8_e4m3fn else None
        need = dequantize_ref(packed, dtype, transposed, scale)
        out = torch.empty_like(need)
        group = 128 if format == "int8" else 64
        configs = []
        for values, warps, groups in itertools.product((1024, 2048, 4096, 8192), (1, 2, 4, 8), (1, 16, 64)):
            lanes = values // group
            tile = DecodeTile(lanes, 1, warps) if transposed else DecodeTile(lanes // groups, groups, warps)
            if tile.rows < 1 or values // (32 * warps) not in (8, 16, 32, 64) or (transposed and groups > 1):
                continue

            def run(tile: DecodeTile = tile, packed=packed, out=out, t=transposed, scale=scale) -> None:
                parts = list(packed.parts.values())
                dequantize_module.launch(parts, packed.format, packed.shape, scale, out, t, tile)

            def error(run=run, out=out, need=need) -> float:
                out.fill_(float("nan"))
                run()
                return 0.0 if torch.equal(out.view(torch.uint8), need.view(torch.uint8)) else 1.0

            configs.append((f"{tile.rows} rows x {tile.groups} groups, {warps} warps", run, error))
        moved = packed.nbytes + need.numel() * need.element_size()
        where = " transposed" if transposed else ""
        yield f"dequantize {format} {N}x{K} to {str(dtype)[6:]}{where}", moved, configs


def gated_tiles(low_rank: bool) -> list[GatedTile]:
    if not low_rank:
        flat = [(1, 512), (1, 1024), (2, 1024), (4, 1024), (1, 2048), (2, 512), (4, 512), (8, 512), (8, 256)]
        tiles = [GatedTile(m, i, w) for m, i in flat for w in (2, 4, 8) if 8 <= m * i // (32 * w) <= 32]
        return tiles + [GatedTile(m, i, 4, 8, s) for m, i in [(1, 1024), (2, 1024), (2, 512)] for s in (1, 3)]
    single = [(16, 64, 1), (16, 64, 2), (16, 128, 2), (16, 128, 4), (32, 64, 2), (32, 64, 4), (32, 128, 4)]
    single += [(32, 128, 8), (64, 64, 4), (64, 128, 8), (16, 256, 4), (32, 256, 8), (32, 32, 1), (64, 32, 2)]
    looped = [(16, 64, 1), (16, 64, 2), (16, 128, 2), (16, 128, 4), (32, 64, 4), (32, 128, 4), (64, 64, 4)]
    steps = [(4, 1), (16, 1), (8, 2), (16, 3), (64, 2)]
    return [GatedTile(*t) for t in single] + [GatedTile(*t, *s) for t in looped for s in steps]


def gated_sweeps(shape: tuple[int, ...], backward: bool) -> Iterator[tuple[str, int, list[Config]]]:
    M, _, I, *_ = shape
    gate_up, dh = randn(M, 2 * I), randn(M, I)
    e, u = gate_up[:, :I], gate_up[:, I:]
    xa = randn(M, 2 * RANK)
    branches = (
        LowRank(xa[:, :RANK], randn(I, RANK) * 0.1),
        LowRank(xa[:, RANK:], randn(I, RANK) * 0.1),
        LowRank(randn(M, RANK), (randn(RANK, I) * 0.1).t()),
    )
    rows = slice(0, 256)  # the definition in float32 of all rows would take 3 GB a tensor
    for low_rank in (True, False):
        low = branches if low_rank else (None, None, None)
        short = tuple(b and LowRank(b.x[rows], b.w) for b in low)
        grads = torch.empty(M, 2 * I + 32, device="cuda", dtype=torch.bfloat16)
        h = torch.empty(M, I, device="cuda", dtype=torch.bfloat16)
        outputs = (grads[:, :I], grads[:, I : 2 * I], h)
        if backward:
            need = gated_activation_backward_ref(dh[rows], e[rows], u[rows], "silu", *short)
        else:
            need = (gated_activation_ref(e[rows], u[rows], "silu", *short[:2]),)
        configs = []
        for tile in gated_tiles(low_rank):

            def run(tile: GatedTile = tile, low=low, outputs=outputs) -> None:
                if backward:
                    gated_bwd(dh, e, u, "silu", low, outputs, None, tile)
                else:
                    gated_fwd(e, u, "silu", low[0], low[1], outputs[2], None, tile)

            def error(run=run, outputs=outputs, need=need) -> float:
                written = outputs if backward else outputs[2:]
                for out in written:
                    out.fill_(float("nan"))
                run()
                wrong = [relative_error(out[rows], want) for out, want in zip(written, need, strict=True)]
                return max(wrong) + sum(float("inf") for out in written if not out[-1].isfinite().all())

            loop = f"{tile.steps} steps, {tile.stages} stages"
            configs.append((f"{tile.block_m}x{tile.block_i}, {tile.num_warps} warps, {loop}", run, error))
        kind = "backward, h again" if backward else "forward"
        with_branches = f"rank {RANK}" if low_rank else "no branches"
        yield f"gated {kind}, {with_branches}, {M}x{I}", (6 if backward else 3) * M * I * 2, configs


def rope_sweeps(shape: tuple[int, ...]) -> Iterator[tuple[str, int, list[Config]]]:
    M, _, _, H, Hk, D = shape
    B, width = 4, (H + 2 * Hk) * D
    qkv, out = randn(M, width), torch.empty(M, width + 48, device="cuda", dtype=torch.bfloat16)
    angle = torch.outer(torch.arange(M // B).float(), 5e5 ** -(torch.arange(0, D, 2) / D)).cuda()
    tables = Tables(angle.cos()[None], angle.sin()[None], None, D)
    none = [(randn(0, 0), randn(0, 0))] * 3
    low = [(randn(M, RANK), randn(h * D, RANK) * 0.1) for h in (H, Hk, Hk)]
    for kind, branch, inverse, in_place in [
        ("in place, rank 16", low, False, True),
        ("in place", none, False, True),
        ("moved, inverse", none, True, False),
    ]:
        fresh = qkv.clone()
        target = fresh if in_place else out
        sources, outputs = (split_heads(t, B, H, Hk, D) for t in (fresh, target))
        need = [rope_ref(x, tables, inverse, b) for x, b in zip(sources[:2], branch[:2], strict=True)]
        configs = []
        for m, heads, warps in itertools.product((16, 32, 64), (1, 2, 4, 8), (2, 4, 8)):
            tile = RopeTile(m, heads, warps)

            def run(tile=tile, s=sources, o=outputs, b=branch, i=inverse) -> None:
                rope_launch(s, o, b, tables, i, tile)

            def error(run=run, fresh=fresh, o=outputs, need=need) -> float:
                fresh.copy_(qkv)
                run()
                return max(relative_error(x, want) for x, want in zip(o[:2], need, strict=True))

            configs.append((f"{m} rows x {heads} heads, {warps} warps", run, error))
        heads_moved = H + Hk + (Hk if branch is low or not in_place else 0)
        yield f"rope {kind}, {M} tokens, {H} + 2 x {Hk} heads", heads_moved * D * M * 4, configs


def report(title: str, moved: int, configs: list[Config], timer: CudaTimer, rounds: int) -> None:
    variants, refused = {}, []
    for name, run, error in configs:
        try:
            wrong = error()
        except (RuntimeError, ValueError) as reason:  # does not fit or compile
            refused.append(f"{name}: {str(reason)[:80]!r}")
            continue
        if wrong <= 5e-3:
            variants[name] = lambda run=run: run
        else:
            refused.append(f"{name}: error {wrong:.1e}")
    floor = moved / COPY_RATE * 1e6
    print(f"\n{title}: floor {floor:.1f} us")
    times = measure(variants, timer, rounds=rounds, repeats=5) if variants else {}
    for name, t in sorted(times.items(), key=lambda item: item[1].p50)[:TOP]:
        print(f"  {t.p50:7.1f} us  {floor / t.p50:4.0%}  {name}  ({t.p20:.1f} - {t.p80:.1f})")
    for line in refused:
        print(f"  refused: {line}")


def main() -> None:
    sweeps = {
        "dequantize": dequantize_sweeps,
        "gated_forward": lambda shape: gated_sweeps(shape, backward=False),
        "gated_backward": lambda shape: gated_sweeps(shape, backward=True),
        "rope": rope_sweeps,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", nargs="*", help=", ".join(sweeps) + "; all if none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    args = parser.parse_args()
    timer = CudaTimer(torch.device("cuda"))
    for name in args.kernels or sweeps:
        for title, moved, configs in sweeps[name](SHAPES[args.shape]):
            report(title, moved, configs, timer, args.rounds)


if __name__ == "__main__":
    main()
