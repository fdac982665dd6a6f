"""Inner values that the kernel which makes x begins: what one leaves and the next takes up."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.generation.batch_rows import BatchRows
from fewbits.kernels.generation.columns import Columns
from fewbits.kernels.generation.cut import Work, reading_of
from fewbits.kernels.generation.decode_attention import DecodeAttention, begins_inner
from fewbits.kernels.generation.few_rows import FewRows, few_rows_ref
from fewbits.kernels.generation.operands import LowRankSum, NextInner, Product, RowNorm, takes_parts
from fewbits.kernels.launch import nvrtc
from tests.kernels import emulated
from tests.kernels.test_columns import ROOM, cut_columns
from tests.kernels.test_decode_attention import Problem as AttentionProblem
from tests.kernels.test_few_rows import error, needs_gxx, weight_of

BF16 = torch.bfloat16


def octets(a: Tensor, ranks: int) -> Tensor:
    """A (r, K) as kernels read it, filled up to so many rows."""
    whole = torch.zeros(ranks, a.shape[1], dtype=a.dtype, device=a.device)
    whole[: len(a)] = a
    return whole.view(ranks, -1, 8).transpose(0, 1).contiguous()


def norm_of(K: int, half: torch.dtype, device: str = "cpu") -> RowNorm:
    return RowNorm((torch.randn(K, device=device) * 0.2 + 1).to(half), 1e-5, 0.5)


class Pair:
    """A product, and the one behind it whose branches it begins; outputs and sums full of NaN."""

    def __init__(
        self,
        name: str,
        M: int,
        sizes: tuple[int, int, tuple[int, ...]],
        ranks: tuple[int, ...],
        *,
        gated: bool = False,
        norm: bool = True,
        device: str = "cpu",
        shape: Columns | None = None,
    ) -> None:
        half = torch.float16 if name == "float16" else BF16
        K, N, last = sizes
        begin = 4  # another product's inner values stand before these
        places = [begin + sum(-(-r // 4) * 4 for r in ranks[:i]) for i in range(len(ranks))]
        all_ranks = places[-1] + -(-ranks[-1] // 4) * 4
        self.a = [torch.randn(r, N, device=device).to(half) * N**-0.5 for r in ranks]
        whole = torch.zeros(all_ranks, N, dtype=half, device=device)
        for place, a in zip(places, self.a, strict=True):
            whole[place : place + len(a)] = a
        following = norm_of(N, half, device) if norm else None
        x = torch.randn(M, K, device=device)
        weights = [weight_of(name, N, K, device) for _ in range(1 + gated)]
        out = torch.full((M, N), torch.nan, device=device, dtype=half if gated else torch.float32)
        if not gated:
            out = torch.randn(M, N, device=device)
        self.before = out.clone()
        self.product = Product(
            x,
            weights,
            out,
            norm=norm_of(K, half, device) if gated else None,
            activation="silu" if gated else None,
            add=not gated,
            next=NextInner(octets(whole, all_ranks), following),
        )
        self.first = FewRows(self.product, shape=shape)
        sums = self.first.next_sums
        assert sums is not None
        sums.fill_(torch.nan)
        branches = []
        for place, a, n in zip(places, self.a, last, strict=True):
            rank = -(-len(a) // 4) * 4
            b = torch.zeros(n, rank, dtype=half, device=device)
            b[:, : len(a)] = torch.randn(n, len(a), device=device)
            branches.append(LowRankSum(b, sums[:, :, place : place + rank], 0.5))
        ends = [weight_of(name, n, N, device) for n in last]
        after = torch.full((M, sum(last)), torch.nan, device=device)
        ends = [weight_of(name, n, N, device) for n in last]
        after = torch.full((M, sum(last)), torch.nan, device=device)
        self.behind = Product(out, ends, after, branches=branches, norm=following)
        self.second = FewRows(self.behind)

    def check(self) -> None:
        """The first one's output is as it is; what belongs to it is its own test's."""
        sums, out = self.first.next_sums, self.product.out
        assert sums is not None and self.product.next is not None and out.isfinite().all()
        assert error(sums.sum(0), self.product.next.sums_of(out)) < 1e-5
        whole = [
            LowRankSum(b.weight[:, : len(a)], b.inner, b.scale, a.double())
            for b, a in zip(self.behind.branches or (), self.a, strict=True)
            if b is not None
        ]
        need = few_rows_ref(out.double(), self.behind.weights, branches=whole, norm=self.behind.norm)
        assert error(self.behind.out, need) < (
            2.0**-7 if isinstance(self.behind.weights[0], Tensor) else 2.0**-11
        )


def emulate(call: FewRows, folder: Path) -> None:
    library = emulated.build(folder, call.source, "few_rows_emulation.cpp", call.defines)
    library.run(ctypes.byref(call.argument), call.shape.blocks, call.shape.shared_bytes)


CALLS: list[tuple[str, int, tuple[int, int, tuple[int, ...]], tuple[int, ...], dict[str, Any]]] = [
    ("nf4_dq", 1, (256, 256, (16, 24, 8)), (16, 16, 16), {}),
    ("nf4", 2, (128, 192, (20, 12)), (3, 9), {}),
    ("int4_g64", 1, (128, 256, (24,)), (8,), {"norm": False}),
    ("int8", 2, (64, 80, (16,)), (70,), {}),
    ("bfloat16", 1, (64, 40, (16, 8)), (40, 33), {}),
    ("float16", 2, (64, 72, (24,)), (17,), {}),
    ("nf4", 2, (128, 128, (16,)), (5,), {"gated": True, "norm": False}),
]
SLOW = [pytest.param(*call, marks=() if i == 1 else pytest.mark.slow) for i, call in enumerate(CALLS)]


@needs_gxx
@pytest.mark.parametrize(("name", "M", "sizes", "ranks", "what"), SLOW)
def test_the_next_product_has_its_branches(
    tmp_path: Path,
    name: str,
    M: int,
    sizes: tuple[int, int, tuple[int, ...]],
    ranks: tuple[int, ...],
    what: dict[str, Any],
) -> None:
    """Equal bits twice, from sums and outputs that were NaN."""
    pair, bits = Pair(name, M, sizes, ranks, **what), []
    for _ in range(2):
        pair.product.out.copy_(pair.before)
        pair.behind.out.fill_(torch.nan)
        emulate(pair.first, tmp_path)
        emulate(pair.second, tmp_path)
        bits.append(pair.behind.out.clone())
    pair.check()
    assert torch.equal(*bits)


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize(("M", "gated", "teams"), [(1, True, 1), (1, False, 3), (2, True, 2)])
def test_columns_begin_and_take_up_too(tmp_path: Path, M: int, gated: bool, teams: int) -> None:
    """Blocks of several teams, some of which have no last tile."""
    reading = reading_of(weight_of("nf4_dq", 16, 512))
    assert reading is not None
    cut = cut_columns(Work(reading, 512, M, 8, 1, ROOM), slices=2, teams=teams, sets=M, most_blocks=2)
    assert cut is not None
    pair = Pair("nf4_dq", M, (512, 256, (40,)), (12,), gated=gated, norm=not gated, shape=cut)
    assert pair.first.source == "generation/columns.cu"
    emulate(pair.first, tmp_path)
    emulate(pair.second, tmp_path)
    pair.check()
    # The same cut behind it: parts in, branches of a gated product.
    M = len(pair.product.out)
    weights = [weight_of("nf4_dq", 44, 512) for _ in range(2)]
    x, sums = torch.randn(M, 512), torch.randn(5, M, 20)
    branches = [
        LowRankSum(torch.randn(44, r).to(BF16), sums[:, :, at : at + r], 0.5) for r, at in ((8, 0), (12, 8))
    ]
    out = torch.full((M, 44), torch.nan)
    product = Product(x, weights, out, branches=branches, norm=norm_of(512, BF16), activation="silu")
    emulate(FewRows(product, shape=cut), tmp_path)
    need = few_rows_ref(x.double(), weights, branches=branches, norm=product.norm, activation="silu")
    assert error(out, need) < 2.0**-11


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "D"), [([5, 37], 4, 2, 64), ([300], 8, 1, 96), ([40], 12, 2, 40)]
)
def test_attention_begins_what_its_reader_needs(
    tmp_path: Path, lengths: list[int], heads: int, kv_heads: int, D: int
) -> None:
    """In one part and in several, whose last block has all outputs."""
    p = AttentionProblem(lengths, heads=heads, kv_heads=kv_heads, D=D)
    a = torch.randn(13, heads * D).to(BF16)
    following = NextInner(octets(a, 16))
    call = DecodeAttention(p.qkv, p.cache, p.out, p.rules, after=following)
    assert call.next_sums is not None
    library = emulated.build(
        tmp_path, "generation/decode_attention.cu", "decode_attention_emulation.cpp", call.defines
    )
    for _ in range(2):
        p.out.fill_(torch.nan)
        call.next_sums.fill_(torch.nan)
        library.run(ctypes.byref(call.argument), *call.grid)
        assert error(call.next_sums.sum(0), following.sums_of(p.out)) < 1e-5
        assert call.next_sums.sum(0)[:, 13:].abs().sum() == 0


def test_a_cpu_computes_the_definition() -> None:
    for gated in (False, True):
        pair = Pair("nf4", 2, (128, 64, (16, 8)), (4, 5), gated=gated, norm=not gated)
        pair.first.launch()
        pair.second.launch()
        pair.check()
    p = AttentionProblem([9], heads=4, kv_heads=2, D=64)
    following = NextInner(octets(torch.randn(8, 256).to(BF16), 8))
    call = DecodeAttention(p.qkv, p.cache, p.out, p.rules, after=following)
    call.launch()
    assert call.next_sums is not None
    assert torch.equal(call.next_sums.sum(0), following.sums_of(p.out))


def test_what_is_taken() -> None:
    assert takes_parts(1, [16, 16, 16]) and takes_parts(2, [128]) and not takes_parts(2, [128, 1])
    assert not takes_parts(3, [4]) and not takes_parts(1, [300])
    assert begins_inner(torch.empty(1, 8, 0, 128), 32, [16])
    assert not begins_inner(torch.empty(1, 8, 0, 16), 32, [16])  # heads of 16 values
    assert not begins_inner(torch.empty(3, 8, 0, 128), 32, [16])


def test_what_is_refused() -> None:
    x, out, weight = torch.randn(1, 64), torch.empty(1, 16), weight_of("nf4", 16, 64)
    a = octets(torch.randn(4, 16).to(BF16), 4)
    with pytest.raises(Unsupported, match="several weights whose outputs begin"):
        FewRows(Product(x, [weight, weight], torch.empty(1, 32), next=NextInner(a)))
    with pytest.raises(Unsupported, match="an A of other columns"):
        FewRows(Product(x, [weight], out, next=NextInner(a[:1])))
    with pytest.raises(Unsupported, match="3 rows of 4 inner values"):
        FewRows(Product(torch.randn(3, 64), [weight], torch.empty(3, 16), next=NextInner(a)))
    sums, b = torch.zeros(2, 1, 8), torch.zeros(16, 4, dtype=BF16)
    with pytest.raises(Unsupported, match="only some come in parts"):
        branches = [LowRankSum(b, sums[:, :, :4], 1.0), LowRankSum(b, sums[0], 1.0)]
        FewRows(Product(x, [weight, weight], torch.empty(1, 32), branches=branches))
    with pytest.raises(Unsupported, match="parts not aligned"):
        FewRows(Product(x, [weight], out, branches=[LowRankSum(b, sums[:, :, 2:6], 1.0)]))
    with pytest.raises(Unsupported, match="not filled up to fours"):
        FewRows(Product(x, [weight], out, branches=[LowRankSum(b[:, :3], sums[:, :, :3], 1.0)]))
    with pytest.raises(BadInput, match="takes inner values of branches whole"):
        BatchRows(Product(x, [weight], out, branches=[LowRankSum(b, sums[:, :, :4], 1.0)]))


@pytest.mark.skipif(nvrtc.missing() is not None, reason="needs NVRTC")
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_compiles_to_machine_code(capability: int) -> None:
    pair = Pair("nf4_dq", 1, (512, 256, (16, 16)), (16, 12), gated=True, norm=True)
    p = AttentionProblem([40], heads=4, kv_heads=2, D=64)
    attention = DecodeAttention(
        p.qkv, p.cache, p.out, p.rules, after=NextInner(octets(torch.randn(8, 256).to(BF16), 8))
    )
    calls = [(call.source, call.defines) for call in (pair.first, pair.second)]
    for source, defines in (*calls, ("generation/decode_attention.cu", attention.defines)):
        macros = dict(defines) | {"EARLY": int(capability >= 90)}
        assert nvrtc.cubin(source, tuple(macros.items()), capability)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 2])
@pytest.mark.parametrize("name", ["nf4_dq", "int4_g64", "int8", "float8_e4m3_row", "bfloat16"])
@pytest.mark.parametrize("ranks", [(16, 16, 16), (3, 64)])
def test_on_a_gpu(name: str, M: int, ranks: tuple[int, ...]) -> None:
    last = (1024, 256, 256)[: len(ranks)]
    for gated, sizes in ((False, (4096, 2048, last)), (True, (2048, 5504, last))):
        pair, bits = Pair(name, M, sizes, ranks, gated=gated, norm=not gated, device="cuda"), []
        for _ in range(2):
            pair.product.out.copy_(pair.before)
            pair.behind.out.fill_(torch.nan)
            pair.first.launch()
            pair.second.launch()
            bits.append(pair.behind.out.clone())
        pair.check()
        assert torch.equal(*bits)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 37, 128, 4000, 9000])
def test_attention_on_a_gpu(length: int) -> None:
    p = AttentionProblem([length, length // 2 + 1], heads=32, kv_heads=8, D=128, device="cuda")
    following = NextInner(octets(torch.randn(13, 4096, device="cuda").to(BF16), 16))
    call = DecodeAttention(p.qkv, p.cache, p.out, p.rules, after=following)
    assert call.next_sums is not None
    call.next_sums.fill_(torch.nan)
    out = call.launch()
    assert error(call.next_sums.sum(0), following.sums_of(out)) < 1e-5
