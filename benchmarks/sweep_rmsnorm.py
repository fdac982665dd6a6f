"""Which tile is fastest for RMSNorm on this GPU: the numbers behind its row_tile and SumTile.

python benchmarks/sweep_rmsnorm.py
"""

from __future__ import annotations

import torch

from fewbits.bench.measure import CudaTimer, measure
from fewbits.kernels._launch import RowTile, next_power_of_2
from fewbits.kernels._rmsnorm_triton import SumTile, row_tile
from fewbits.kernels.rmsnorm import launch_bwd, launch_fwd

SHAPES = [(8192, 2048), (8192, 4096), (8192, 8192), (262144, 128)]


def tiles(N: int) -> list[RowTile]:
    block_n = next_power_of_2(N)
    blocks = [b for b in (1, 2, 4, 8, 16, 32, 64) if 2048 <= b * block_n <= 8192] or [1]
    return [
        RowTile(b, block_n, w) for b in blocks for w in (2, 4, 8, 16) if 8 <= b * block_n // (32 * w) <= 64
    ]


def sweep(timer: CudaTimer, M: int, N: int) -> None:
    x, dy = (torch.randn(M, N, device="cuda").bfloat16() for _ in range(2))
    w = torch.ones(N, device="cuda", dtype=torch.bfloat16)
    r = launch_fwd(x, w, 1e-5, 0.0)[1]
    variants = {}
    for tile in tiles(N):
        name = f"{tile.block_m}x{tile.block_n} {tile.num_warps} warps"
        variants[f"forward {name}"] = lambda t=tile: lambda: launch_fwd(x, w, 1e-5, 0.0, t)
        variants[f"dx {name}"] = lambda t=tile: lambda: launch_bwd(dy, x, w, r, 0.0, False, t)
        for total in [SumTile(programs, stages) for programs in (1, 2, 4, 8) for stages in (1, 2, 3)]:
            variants[f"dx, dw {name} {total.programs} programs {total.stages} stages"] = (
                lambda t=tile, s=total: lambda: launch_bwd(dy, x, w, r, 0.0, True, t, s)
            )
    times = measure(variants, timer, rounds=4, repeats=8)
    print(f"{M}x{N}, row_tile gives {tuple(row_tile(N))}")
    for kind in ("forward", "dx ", "dx, dw"):
        best = sorted((t.p50, name) for name, t in times.items() if name.startswith(kind))[:4]
        print("  " + "; ".join(f"{name}: {us:.1f} us" for us, name in best))


if __name__ == "__main__":
    for rows, values in SHAPES:
        sweep(CudaTimer(torch.device("cuda")), rows, values)
