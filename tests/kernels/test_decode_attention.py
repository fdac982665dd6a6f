"""Attention of a new token: the definition, the CUDA source on a CPU, its machine code, and a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.kernels.generation import decode_attention as module
from fewbits.kernels.generation.decode_attention import (
    Cache,
    DecodeAttention,
    Rules,
    decode_attention,
    decode_attention_ref,
)
from fewbits.kernels.launch import nvrtc
from tests.kernels import emulated
from tests.kernels.attention_parts import BF16, head_norms, places, rotary_tables


class Problem:
    """Sequences of different lengths, some padded on the left; what is not seen is NaN."""

    def __init__(
        self,
        lengths: list[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        D: int = 64,
        rotary: int | None = None,
        norms: bool = False,
        device: str = "cpu",
        **rules: Any,
    ) -> None:
        B, room = len(lengths), max(lengths) + 3
        self.qkv = torch.randn(B, (heads + 2 * kv_heads) * D, device=device)
        keys, values = (torch.randn(B, kv_heads, room, D, device=device).to(BF16) for _ in range(2))
        position, first = places(lengths, device)
        for b in range(B):
            for cache in (keys, values):
                cache[b, :, : first[b]] = cache[b, :, position[b] :] = torch.nan
        self.cache = Cache(keys, values, *rotary_tables(room, rotary or D, device), position, first)
        rules |= head_norms(D, BF16, device) if norms else {}
        self.rules = Rules(scale=D**-0.5, **rules)
        self.out = torch.full((B, heads * D), torch.nan, dtype=BF16, device=device)

    def check(self, out: Tensor, cache: Cache, need: Tensor, after: Cache) -> None:
        """Two roundings to bfloat16 and exponentials a last bit apart."""
        assert float((out.float() - need.float()).norm() / need.float().norm()) < 2.0**-7
        for ours, theirs in ((cache.keys, after.keys), (cache.values, after.values)):
            torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=1e-3, equal_nan=True)

    def copied(self) -> Cache:
        c = self.cache
        return Cache(c.keys.clone(), c.values.clone(), c.cosines, c.sines, c.position, c.first)


CASES: list[tuple[list[int], dict[str, Any]]] = [
    ([1, 5, 37], {}),
    ([130], {"heads": 8, "kv_heads": 1, "D": 96}),
    ([300, 20], {"window": 33, "norms": True, "D": 128}),
    ([700], {"cap": 5.0, "rotary": 32}),
    ([260, 3], {"heads": 3, "kv_heads": 3, "D": 40}),
    ([90], {"heads": 12, "kv_heads": 1, "D": 72, "cap": 4.0, "window": 50}),
]


def test_the_definition_is_attention() -> None:
    """Beside torch's own, with keys turned by hand."""
    p = Problem([6], heads=2, kv_heads=1, D=8)
    q, k, v = p.qkv.view(4, 8).split([2, 1, 1])
    half = lambda x: torch.cat([-x[:, 4:], x[:, :4]], dim=-1)  # noqa: E731
    cosines, sines = p.cache.cosines[5], p.cache.sines[5]
    q, k = ((x * cosines + half(x) * sines).to(BF16) for x in (q, k))
    keys = torch.cat([p.cache.keys[0, :, :5], k[None]], dim=1).float()
    values = torch.cat([p.cache.values[0, :, :5], v[None].to(BF16)], dim=1).float()
    need = torch.nn.functional.scaled_dot_product_attention(
        q[:, None].float(), keys.expand(2, -1, -1), values.expand(2, -1, -1)
    )
    out = decode_attention(p.qkv, p.cache, p.rules)
    torch.testing.assert_close(out.view(2, 8).float(), need[:, 0], rtol=2.0**-8, atol=2.0**-9)
    assert torch.equal(p.cache.keys[0, 0, 5], k[0]) and p.cache.keys[0, 0, 6:].isnan().all()


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(("lengths", "what"), CASES, ids=str)
def test_the_source_gives_the_definition(tmp_path: Path, lengths: list[int], what: dict[str, Any]) -> None:
    p, after = Problem(lengths, **what), None
    after = p.copied()
    need = decode_attention_ref(p.qkv, after, p.rules)
    call = DecodeAttention(p.qkv, p.cache, p.out, p.rules)
    library = emulated.build(
        tmp_path, "generation/decode_attention.cu", "decode_attention_emulation.cpp", call.defines
    )
    for _ in range(2):  # its counters are zeros again
        p.out.fill_(torch.nan)
        library.run(ctypes.byref(call.argument), *call.grid)
        p.check(p.out, p.cache, need, after)


def following(
    rows: int, length: int, device: str = "cpu", **what: Any
) -> tuple[Problem, list[Tensor], Cache]:
    """Following tokens of one sequence: the rows of a call, what each gives in turn, the cache then."""
    p = Problem([length + i for i in range(rows)], device=device, **what)
    c = p.cache
    keys, values = (t[-1:].clone().expand(rows, -1, -1, -1) for t in (c.keys, c.values))
    for whole in (keys, values):
        whole[0, :, length - 1 :] = torch.nan
        whole[0, :, : length - 1].nan_to_num_(nan=0.5)
    c.first.fill_(1)
    turn = Cache(keys[:1].clone(), values[:1].clone(), c.cosines, c.sines, c.position[:1], c.first[:1])
    need = []
    for i in range(rows):
        turn = Cache(turn.keys, turn.values, c.cosines, c.sines, c.position[i : i + 1], c.first[:1])
        need.append(decode_attention_ref(p.qkv[i : i + 1], turn, p.rules))
    p.cache = Cache(keys, values, c.cosines, c.sines, c.position, c.first)
    return p, need, turn


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("what", [{}, {"window": 9, "norms": True}], ids=str)
def test_following_tokens_of_one_sequence_in_two_launches(tmp_path: Path, what: dict[str, Any]) -> None:
    """The first launch writes all new keys; the second one sees them. The definition has them at once."""
    p, need, turn = following(5, 140, **what)
    by_definition = Cache(
        p.cache.keys[:1].clone().expand(5, -1, -1, -1),
        p.cache.values[:1].clone().expand(5, -1, -1, -1),
        *(p.cache.cosines, p.cache.sines, p.cache.position, p.cache.first),
    )
    out = decode_attention_ref(p.qkv, by_definition, p.rules)
    p.check(out, Cache(by_definition.keys[:1], by_definition.values[:1], *[None] * 4), torch.cat(need), turn)  # type: ignore[arg-type]
    call = DecodeAttention(p.qkv, p.cache, p.out, p.rules)
    library = emulated.build(
        tmp_path, "generation/decode_attention.cu", "decode_attention_emulation.cpp", call.defines
    )
    for _ in range(2):
        library.run(ctypes.byref(call.argument), *call.grid)
    one = Cache(p.cache.keys[:1], p.cache.values[:1], *[None] * 4)  # type: ignore[arg-type]
    p.check(p.out, one, torch.cat(need), turn)


@pytest.mark.gpu
@pytest.mark.parametrize("what", [{}, {"heads": 32, "kv_heads": 8, "D": 128}], ids=str)
def test_following_tokens_on_a_gpu(what: dict[str, Any]) -> None:
    p, need, turn = following(9, 1300, device="cuda", **what)
    for _ in range(2):
        out = DecodeAttention(p.qkv, p.cache, p.out, p.rules).launch()
    one = Cache(p.cache.keys[:1], p.cache.values[:1], *[None] * 4)  # type: ignore[arg-type]
    p.check(out, one, torch.cat(need), turn)


def test_what_does_not_fit_is_refused() -> None:
    p = Problem([4])
    with pytest.raises(Unsupported, match="does not take heads of 264 values"):
        big = Problem([4], heads=1, kv_heads=1, D=264)
        DecodeAttention(big.qkv, big.cache, big.out, big.rules)
    with pytest.raises(Unsupported, match=r"queries in torch\.bfloat16"):
        DecodeAttention(p.qkv.to(BF16), p.cache, p.out, p.rules)


@pytest.mark.parametrize(
    ("capability", "processors", "splits", "cluster"),
    [
        *(((9, 0), 132, 33, 16), ((9, 0), 60, 33, 8), ((9, 0), 16, 4, 1), ((9, 0), 132, 5, 4)),
        *(((12, 0), 170, 40, 1), ((8, 0), 108, 27, 1)),
    ],
)
def test_only_gpus_that_take_clusters_get_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], processors: int, splits: int, cluster: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(module, "multiprocessors", lambda _: processors)
    assert module.cluster_of(torch.device("cuda"), splits) == cluster


@pytest.mark.skipif(nvrtc.missing() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles_to_machine_code(capability: int) -> None:
    p = Problem([4], norms=True, cap=2.0)
    defines = dict(DecodeAttention(p.qkv, p.cache, p.out, p.rules).defines) | {"EARLY": int(capability >= 90)}
    assert nvrtc.cubin("generation/decode_attention.cu", tuple(defines.items()), capability)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "what"),
    [
        *CASES,
        ([5000, 4999, 17], {"heads": 32, "kv_heads": 8, "D": 128}),
        *(([n], {"heads": 32, "kv_heads": 8, "D": 128}) for n in (1, 17, 129, 4096, 4097, 9000)),
    ],
    ids=str,
)
def test_on_a_gpu(lengths: list[int], what: dict[str, Any]) -> None:
    p = Problem(lengths, device="cuda", **what)
    after = p.copied()
    need = decode_attention_ref(p.qkv, after, p.rules)
    call = DecodeAttention(p.qkv, p.cache, p.out, p.rules)
    first = call.launch().clone()
    p.check(first, p.cache, need, after)
    assert torch.equal(call.launch(), first)
