"""Attention over packed keys and values: the definition, the CUDA source on a CPU, machine code, a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.kv_cache import KVCache, get_kv_cache
from fewbits.kernels.generation.decode_attention import Cache, Rules, decode_attention_ref
from fewbits.kernels.generation.packed_attention import (
    PackedAttention,
    PackedKeysValues,
    empty_cache,
    format_codes,
    kernel_codes,
    packed_attention,
    packed_attention_ref,
    why_not_packed,
)
from fewbits.kernels.launch import nvrtc
from tests.kernels import emulated
from tests.kernels.attention_parts import BF16, head_norms, places, rotary_tables


class Problem:
    """Sequences of different lengths, some padded on the left; what is not seen is NaN."""

    def __init__(
        self,
        lengths: list[int],
        kind: KVCache | str = "int4",
        *,
        heads: int = 4,
        kv_heads: int = 2,
        D: int = 64,
        rotary: int | None = None,
        norms: bool = False,
        dtype: torch.dtype = BF16,
        device: str = "cpu",
        **rules: Any,
    ) -> None:
        B, room = len(lengths), max(lengths) + 3
        kind = get_kv_cache(kind)
        self.qkv = torch.randn(B, (heads + 2 * kv_heads) * D, device=device)
        position, first = places(lengths, device)
        stored = empty_cache(kind, (B, kv_heads, room, D), dtype, torch.device(device))
        for tensor in stored.values():
            tensor.fill_(255 if tensor.dtype == torch.uint8 else torch.nan)
        cosines, sines = rotary_tables(room, rotary or D, device)
        self.cache = PackedKeysValues(
            kind,
            **stored,
            cosines=cosines,
            sines=sines,
            position=position,
            first=first,
        )
        self.whole = {
            w: torch.randn(B, kv_heads, room, D, device=device).to(dtype) for w in ("keys", "values")
        }
        for which, whole in self.whole.items():
            whole[..., 3] *= 9  # a channel that stands out, as keys have them
            self._fill(which, whole)
        rules |= head_norms(D, dtype, device) if norms else {}
        self.rules = Rules(scale=D**-0.5, **rules)
        self.out = torch.full((B, heads * D), torch.nan, dtype=dtype, device=device)

    def _fill(self, which: str, whole: Tensor) -> None:
        cache, kind = self.cache, self.cache.kind
        codes, scales, newest, first = cache.stored(which)
        side = cache.sides[which]
        for b in range(len(whole)):
            n, begin = int(cache.position[b]), int(cache.first[b])
            rows = slice(begin + kind.first, max(n - kind.newest, begin + kind.first))
            packed, scale = side.pack(whole[b, :, rows])
            codes[b, :, rows], scales[b, :, rows] = kernel_codes(packed, side, which), scale
            ring = range(max(n - kind.newest, begin), n)
            newest[b, :, [i % (kind.newest + 1) for i in ring]] = whole[b, :, list(ring)]
            count = min(kind.first, n - begin)
            first[b, :, :count] = whole[b, :, begin : begin + count]

    def copied(self) -> PackedKeysValues:
        tensors = {f.name: getattr(self.cache, f.name) for f in fields(self.cache) if f.name != "kind"}
        return replace(self.cache, **{name: t.clone() for name, t in tensors.items()})

    def check(self, out: Tensor, cache: PackedKeysValues, need: Tensor, after: PackedKeysValues) -> None:
        """Rounding of queries and weights to float16, of results to 16 bits; codes at most one apart."""
        assert float((out.float() - need.float()).norm() / need.float().norm()) < 2.0**-7
        for which in ("keys", "values"):
            side = cache.sides[which]
            ours, theirs = cache.stored(which), after.stored(which)
            for mine, other in zip(ours[2:], theirs[2:], strict=True):
                torch.testing.assert_close(mine, other, rtol=2.0**-7, atol=1e-3, equal_nan=True)
            for b in range(len(need)):
                begin = int(cache.first[b]) + cache.kind.first
                rows = slice(begin, max(int(cache.position[b]) - cache.kind.newest + 1, begin))
                a, c = (
                    side.unpack(format_codes(t[0][b, :, rows], side, which), t[1][b, :, rows], torch.float32)
                    for t in (ours, theirs)
                )
                assert bool((a.isfinite() & c.isfinite()).all())
                assert float((a - c).norm()) <= 0.02 * float(c.norm())


CASES: list[tuple[list[int], dict[str, Any]]] = [
    ([1, 5, 37], {"kind": KVCache(newest=16, first=2)}),
    ([700, 90], {"D": 128, "heads": 8}),
    ([400], {"kind": "int8", "heads": 7, "kv_heads": 1, "norms": True, "dtype": torch.float16}),
    ([330, 120], {"kind": "fp8", "D": 96, "heads": 3, "kv_heads": 3, "cap": 5.0}),
    ([600], {"kind": KVCache(keys="int8", group=32, first=0), "D": 128, "kv_heads": 1, "rotary": 32}),
    ([600, 70], {"kind": KVCache(values="fp8", newest=32), "heads": 12, "kv_heads": 1, "window": 300}),
    ([200], {"kind": KVCache(rotated=False, group=128), "D": 256, "heads": 2, "kv_heads": 1, "window": 20}),
]


def test_the_definition_is_attention_over_what_was_rounded() -> None:
    """Beside attention over a 16-bit cache that holds the decoded keys and values."""
    p = Problem([300, 90], D=64)
    cache, kind = p.cache, p.cache.kind
    read = {}
    for which, whole in p.whole.items():
        side = cache.sides[which]
        rounded = side.unpack(*side.pack(whole), torch.float32)
        for b in range(2):
            n, begin = int(cache.position[b]), int(cache.first[b])
            rounded[b, :, n - kind.newest :] = whole[b, :, n - kind.newest :].float()
            rounded[b, :, begin : begin + kind.first] = whole[b, :, begin : begin + kind.first].float()
        read[which] = rounded
    plain = Cache(read["keys"], read["values"], cache.cosines, cache.sines, cache.position, cache.first)
    need = decode_attention_ref(p.qkv, plain, p.rules)
    out = packed_attention(p.qkv, cache, p.rules)
    torch.testing.assert_close(out.float(), need, rtol=2.0**-6, atol=2.0**-6)
    assert not torch.allclose(p.whole["keys"][0].float(), read["keys"][0], atol=1e-2)  # it is lossy


def test_a_hundred_tokens_one_by_one_are_packed_as_a_prompt_is() -> None:
    p = Problem([1], KVCache(newest=16, first=4))
    kind, seen = p.cache.kind, []
    for n in range(100 if p.cache.key_codes.shape[2] >= 100 else p.cache.key_codes.shape[2]):
        p.cache.position.fill_(n)
        qkv = torch.randn_like(p.qkv)
        packed_attention_ref(qkv, p.cache, p.rules)
        seen.append(qkv.view(-1, 64)[-2:].to(BF16))
    whole = torch.stack(seen, dim=1)[None]
    n = whole.shape[2]
    assert torch.equal(
        p.cache.newest_values[:, :, [i % 17 for i in range(max(n - 16, 0), n)]], whole[:, :, -16:]
    )
    assert torch.equal(p.cache.first_values[:, :, : min(n, 4)], whole[:, :, :4])
    side = p.cache.sides["values"]
    codes, scales = side.pack(whole[:, :, kind.first : max(n - 16, kind.first)])
    rows = slice(kind.first, max(n - 16, kind.first))
    assert torch.equal(p.cache.value_codes[:, :, rows], kernel_codes(codes, side, "values"))
    assert torch.equal(p.cache.value_scales[:, :, rows], scales)


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(("lengths", "what"), CASES, ids=str)
def test_the_source_gives_the_definition(tmp_path: Path, lengths: list[int], what: dict[str, Any]) -> None:
    p = Problem(lengths, **what)
    after = p.copied()
    need = packed_attention_ref(p.qkv, after, p.rules)
    call = PackedAttention(p.qkv, p.cache, p.out, p.rules)
    library = emulated.build(
        tmp_path, "generation/packed_attention.cu", "packed_attention_emulation.cpp", call.defines
    )
    for _ in range(2):  # a step that is run twice gives the same, and its counters are zeros again
        p.out.fill_(torch.nan)
        library.run(ctypes.byref(call.argument), *call.grid, call.shared_bytes)
        p.check(p.out, p.cache, need, after)


def test_what_does_not_fit_is_refused() -> None:
    p = Problem([4], D=96)
    with pytest.raises(Unsupported, match="in int4 does not take heads of 96 values"):
        PackedAttention(p.qkv, p.cache, p.out, p.rules)
    assert why_not_packed(get_kv_cache("int8/int4"), 128, 4) == ""
    assert "does not take bfloat16/int4" in why_not_packed(get_kv_cache("bfloat16/int4"), 128, 4)
    assert "129 newest" in why_not_packed(KVCache(newest=129), 128, 4)
    p = Problem([4])
    with pytest.raises(Unsupported, match=r"queries in torch\.bfloat16"):
        PackedAttention(p.qkv.to(BF16), p.cache, p.out, p.rules)


@pytest.mark.skipif(nvrtc.missing() is not None, reason="needs NVRTC")
@pytest.mark.parametrize(
    ("capability", "what"),
    [
        (80, CASES[1][1]),
        (86, CASES[3][1]),
        (89, CASES[5][1]),
        (90, CASES[1][1]),
        (100, CASES[4][1]),
        (120, CASES[2][1]),
    ],
    ids=str,
)
def test_compiles_to_machine_code(capability: int, what: dict[str, Any]) -> None:
    p = Problem([4], **what)
    defines = dict(PackedAttention(p.qkv, p.cache, p.out, p.rules).defines) | {"EARLY": int(capability >= 90)}
    code = nvrtc.cubin("generation/packed_attention.cu", tuple(defines.items()), capability)
    assert code[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "what"), [*CASES, ([9000, 4999, 17], {"heads": 32, "kv_heads": 8, "D": 128})], ids=str
)
def test_on_a_gpu(lengths: list[int], what: dict[str, Any]) -> None:
    p = Problem(lengths, device="cuda", **what)
    after = p.copied()
    need = packed_attention_ref(p.qkv, after, p.rules)
    call = PackedAttention(p.qkv, p.cache, p.out, p.rules)
    first = call.launch().clone()
    p.check(first, p.cache, need, after)
    assert torch.equal(call.launch(), first)
