"""What `fewbits bench tune` tries: kernels at the widths of a model, and the tiles they may take there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.bench.measure import relative_error
from fewbits.formats import get_format
from fewbits.kernels.codec import dequantize as dequantize_module
from fewbits.kernels.codec.dequantize import dequantize_ref
from fewbits.kernels.codec.dequantize_triton import DecodeTile, decode_tile
from fewbits.kernels.decoder.gated_activation import gated_activation_backward_ref, gated_activation_ref
from fewbits.kernels.decoder.gated_activation_triton import (
    GatedOutputs,
    GatedTile,
    LowRank,
    gated_tile,
    low_rank_arguments,
)
from fewbits.kernels.decoder.gated_activation_triton import launch_bwd as gated_bwd
from fewbits.kernels.decoder.gated_activation_triton import launch_fwd as gated_fwd
from fewbits.kernels.decoder.gated_lora_backward import gated_lora_backward_ref
from fewbits.kernels.decoder.gated_lora_backward_triton import SAFE_TILE, BackwardOperands, GatedLoRATile
from fewbits.kernels.decoder.gated_lora_backward_triton import launch as gated_lora_launch
from fewbits.kernels.decoder.rmsnorm import rmsnorm_backward_ref, rmsnorm_ref
from fewbits.kernels.decoder.rmsnorm_triton import NormedRows, RowOutputs, launch_backward_rows, row_tile
from fewbits.kernels.decoder.rmsnorm_triton import launch_rows as rmsnorm_fwd
from fewbits.kernels.decoder.rope import rope_ref, split_heads
from fewbits.kernels.decoder.rope_triton import RopeTile, Tables, rope_tile
from fewbits.kernels.decoder.rope_triton import launch as rope_launch
from fewbits.kernels.launch.jit import RowTile, next_power_of_2
from fewbits.kernels.launch.tuning import key_of

_ROWS = 256  # of which the definition is computed: in float32 all rows of a wide tensor would take gigabytes
_EPS = 1e-5
_DTYPE = torch.bfloat16  # of all operands


class Widths(NamedTuple):
    """Of a model, and the tokens of a step."""

    tokens: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    rank: int = 16


WIDTHS = {
    "8b": Widths(8192, 4096, 14336, 32, 8, 128),
    "1.7b": Widths(8192, 2048, 6144, 16, 8, 128),
    "0.6b": Widths(8192, 1024, 3072, 16, 8, 128),
}


@dataclass(frozen=True)
class Sweep:
    """One kernel on one set of operands.

    Attributes:
        key: under which the best tile is kept; see `fewbits.kernels.launch.tuning.key_of`.
        title: for the table.
        bytes_moved: inputs read once and outputs written once.
        tolerance: largest relative error of an output beside the definition.
        rule: the tile that is taken without tuning.
        tiles: those to try beside it.
        run: launches the kernel with a tile.
        outputs: what it writes.
        exact: what it must write, of the first rows at least.
    """

    key: str
    title: str
    bytes_moved: int
    tolerance: float
    rule: tuple[int, ...]
    tiles: Sequence[tuple[int, ...]]
    run: Callable[[Any], object]
    outputs: Sequence[Tensor]
    exact: Sequence[Tensor]

    def error(self, tile: tuple[int, ...]) -> float:
        """The largest relative error with this tile; infinite where a value is missing."""
        for out in self.outputs:
            out.view(torch.uint8).fill_(0xFF)  # NaN in every float format
        self.run(tile)
        parts = zip(self.outputs, self.exact, strict=True)
        wrong = [relative_error(out[: want.shape[0]], want) for out, want in parts]
        whole = all(bool(out[-1].float().isfinite().all()) for out in self.outputs)
        return max(wrong) if whole else float("inf")


def sweeps(widths: Widths, device: torch.device) -> Iterator[Sweep]:
    """All of them, one after another, so that only one's operands are in memory."""
    for make in (_dequantize, _gated, _gated_lora, _rope, _rmsnorm):
        yield from make(widths, device)


def _randn(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=_DTYPE)


def _dequantize(widths: Widths, device: torch.device) -> Iterator[Sweep]:
    N, K = widths.intermediate, widths.hidden
    inverse = torch.full((N, 1), 300.0, device=device, dtype=torch.float32)
    eight = torch.float8_e4m3fn
    for name, dtype, transposed in [
        ("nf4_dq", _DTYPE, False),
        ("nf4_dq", eight, False),
        ("nf4_dq", eight, True),
        ("int8", _DTYPE, False),
    ]:
        packed = get_format(name).quantize(_randn(N, K, device=device) * 0.02)
        scale = inverse if dtype == eight else None
        need = dequantize_ref(packed, dtype, transposed, scale)
        out, group = torch.empty_like(need), 128 if name == "int8" else 64
        tiles = []
        for values, warps, groups in itertools.product((1024, 2048, 4096, 8192), (1, 2, 4, 8), (1, 16, 64)):
            lanes = values // group
            tile = DecodeTile(lanes, 1, warps) if transposed else DecodeTile(lanes // groups, groups, warps)
            if tile.rows and values // (32 * warps) in (8, 16, 32, 64) and not (transposed and groups > 1):
                tiles.append(tile)

        def run(tile: DecodeTile, p: Any = packed, s: Any = scale, y: Any = out, t: Any = transposed) -> None:
            dequantize_module.launch(list(p.parts.values()), p.format, p.shape, s, y, t, tile)

        size = out.element_size()
        yield Sweep(
            key_of("dequantize", group, size, transposed),
            f"dequantize {name} {N}x{K} to {str(dtype)[6:]}{' transposed' if transposed else ''}",
            packed.nbytes + out.numel() * size,
            0.0,
            decode_tile(group, K, transposed, size),
            tiles,
            run,
            (out,),
            (need,),
        )


def _gated_tiles(low_rank: bool) -> list[GatedTile]:
    if not low_rank:
        flat = [(1, 512), (1, 1024), (2, 1024), (4, 1024), (1, 2048), (2, 512), (4, 512), (8, 512), (8, 256)]
        tiles = [GatedTile(m, i, w) for m, i in flat for w in (2, 4, 8) if 8 <= m * i // (32 * w) <= 32]
        return tiles + [GatedTile(m, i, 4, 8, s) for m, i in [(1, 1024), (2, 1024), (2, 512)] for s in (1, 3)]
    single = [(16, 64, 2), (16, 128, 2), (16, 128, 4), (32, 64, 4), (32, 128, 4), (64, 64, 4), (32, 256, 8)]
    looped = [(16, 64, 2), (16, 128, 2), (16, 128, 4), (32, 64, 4), (32, 128, 4), (64, 64, 4)]
    steps = [(4, 1), (8, 2), (8, 3), (16, 3)]
    return [GatedTile(*t) for t in single] + [GatedTile(*t, *s) for t in looped for s in steps]


def _branches(widths: Widths, device: torch.device) -> tuple[LowRank, LowRank, LowRank]:
    M, I, R = widths.tokens, widths.intermediate, widths.rank
    xa = _randn(M, 2 * R, device=device)
    e, u = (LowRank(x, _randn(I, R, device=device) * 0.1) for x in (xa[:, :R], xa[:, R:]))
    return e, u, LowRank(_randn(M, R, device=device), (_randn(R, I, device=device) * 0.1).t())


def _gated(widths: Widths, device: torch.device) -> Iterator[Sweep]:
    M, I = widths.tokens, widths.intermediate
    gate_up, dh = _randn(M, 2 * I, device=device), _randn(M, I, device=device)
    e, u = gate_up[:, :I], gate_up[:, I:]
    written = [torch.empty(M, I, device=device, dtype=_DTYPE) for _ in range(3)]
    low, rows = _branches(widths, device), slice(0, _ROWS)
    for branches in (low, (None, None, None)):
        short = tuple(b and LowRank(b.x[rows], b.w) for b in branches)
        for backward in (False, True):
            outputs = written if backward else written[2:]
            need: tuple[Tensor, ...]
            if backward:
                need = gated_activation_backward_ref(dh[rows], e[rows], u[rows], "silu", *short)
            else:
                need = (gated_activation_ref(e[rows], u[rows], "silu", *short[:2]),)

            def run(tile: GatedTile, backward: bool = backward, branches: Any = branches) -> None:
                if backward:
                    gated_bwd(
                        dh, e, u, "silu", branches, GatedOutputs(written[0], written[1], written[2]), tile
                    )
                else:
                    gated_fwd(e, u, "silu", branches[:2], written[2], None, tile)

            ranks = tuple(low_rank_arguments(b, e)[1] for b in branches[: 3 if backward else 2])
            kind = "backward" if backward else "forward"
            yield Sweep(
                key_of(f"gated_{kind}", max(rank.block for rank in ranks), 2, False),
                f"gated {kind}, {f'rank {widths.rank}' if branches[0] else 'no branches'}, {M}x{I}",
                (6 if backward else 3) * M * I * 2,
                5e-3,
                gated_tile(backward, ranks, 2),
                _gated_tiles(branches[0] is not None),
                run,
                outputs,
                need,
            )


def _gated_lora(widths: Widths, device: torch.device) -> Iterator[Sweep]:
    M, I, R = widths.tokens, widths.intermediate, widths.rank
    gate_up, dh = _randn(M, 2 * I, device=device), _randn(M, I, device=device)
    e, u = gate_up[:, :I], gate_up[:, I:]
    de, du = (torch.empty(M, I, device=device, dtype=_DTYPE) for _ in range(2))
    t, low = torch.empty(M, 2 * R, device=device, dtype=_DTYPE), _branches(widths, device)
    rows = slice(0, _ROWS)
    xe, xu, xd = (LowRank(b.x[rows], b.w) for b in low)
    need = gated_lora_backward_ref(dh[rows], e[rows], u[rows], "silu", (xe, xu, xd))[:2]
    operands = BackwardOperands(dh, e, u, "silu", low, (de, du), t)
    tiles = [
        GatedLoRATile(m, i, w, steps, stages)
        for m, i, w in [(16, 64, 4), (32, 32, 4), (32, 64, 4), (32, 64, 8), (64, 32, 4), (64, 64, 4)]
        for steps, stages in [(16, 2), (16, 3), (32, 3)]
    ]
    yield Sweep(
        key_of("gated_lora", max(16, next_power_of_2(R))),
        f"gated backward with its products, {M}x{I}",
        5 * M * I * 2,
        5e-3,
        SAFE_TILE,
        tiles,
        lambda tile: gated_lora_launch(operands, tile=tile),
        (de, du),
        need,
    )


def _rope(widths: Widths, device: torch.device) -> Iterator[Sweep]:
    M, H, Hk, D = widths.tokens, widths.heads, widths.kv_heads, widths.head
    B, width = 4, (H + 2 * Hk) * D
    qkv, out = (_randn(M, width, device=device) for _ in range(2))
    angle = torch.outer(torch.arange(M // B).float(), 5e5 ** -(torch.arange(0, D, 2) / D)).to(device)
    tables = Tables(angle.cos()[None], angle.sin()[None], None, D)
    empty = qkv.new_empty(0, 0)
    sources, outputs = (split_heads(t, B, H, Hk, D) for t in (qkv, out))
    need = [rope_ref(x, tables, True, (empty, empty)) for x in sources[:2]]
    tiles = [RopeTile(*t) for t in itertools.product((16, 32, 64), (1, 2, 4, 8), (2, 4, 8))]
    yield Sweep(
        key_of("rope", D // 2),
        f"rope, {M} tokens, {H} + 2 x {Hk} heads",
        2 * M * width * 2,
        5e-3,
        rope_tile(D // 2),
        tiles,
        lambda tile: rope_launch(sources, outputs, [(empty, empty)] * 3, tables, True, tile),
        outputs[:2],
        need,
    )


def _rmsnorm(widths: Widths, device: torch.device) -> Iterator[Sweep]:
    M, N = widths.tokens, widths.hidden
    x, dy = (_randn(M, N, device=device) for _ in range(2))
    y, weight = torch.empty_like(x), torch.ones(N, device=device, dtype=_DTYPE)
    need, r = rmsnorm_ref(x, weight, _EPS)
    written, normed = torch.empty_like(r), NormedRows(x, weight, r)
    dx = rmsnorm_backward_ref(dy, x, weight, r)[0]
    block_n = next_power_of_2(N)
    blocks = [b for b in (1, 2, 4, 8, 16) if 2048 <= b * block_n <= 8192] or [1]
    warps = (2, 4, 8, 16, 32)
    tiles = [RowTile(b, block_n, w) for b in blocks for w in warps if 8 <= b * block_n // (32 * w) <= 64]
    yield Sweep(
        key_of("rmsnorm_forward", N, 2),
        f"rmsnorm forward {M}x{N}",
        2 * M * N * 2,
        5e-3,
        row_tile(N),
        tiles,
        lambda tile: rmsnorm_fwd(x, weight, _EPS, 0.0, RowOutputs(y, written), tile=tile),
        (y,),
        (need,),
    )
    yield Sweep(
        key_of("rmsnorm_backward", N, 2, False),
        f"rmsnorm backward {M}x{N}",
        3 * M * N * 2,
        5e-3,
        row_tile(N),
        tiles,
        lambda tile: launch_backward_rows(dy, normed, y, tile=tile),
        (y,),
        (dx,),
    )
