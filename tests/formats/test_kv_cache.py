"""Keys and values in few bits: names, rounding, bytes, what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from fewbits.errors import BadInput, Unsupported
from fewbits.formats import INT8
from fewbits.formats.kv_cache import (
    KINDS,
    KVCache,
    get_kv_cache,
    hadamard,
    kv_cache_to_config,
    ordered_codes,
    unordered_codes,
)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("int4", KVCache()),
        ("int8/int4", KVCache(keys="int8")),
        ("bf16", KVCache(keys="bfloat16", values="bfloat16")),
        ("float8_e4m3/int4", KVCache(keys="fp8")),
        (INT8, KVCache(keys="int8", values="int8")),
        ({"keys": "int8", "values": "int4", "group": 32}, KVCache(keys="int8", group=32)),
        ({"name": "fp8", "newest": 128}, KVCache(keys="fp8", values="fp8", newest=128)),
    ],
)
def test_names_and_mappings(said: object, meant: KVCache) -> None:
    found = get_kv_cache(said)
    assert found == meant
    assert get_kv_cache(json.loads(json.dumps(kv_cache_to_config(found)))) == meant


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("int3", "no key/value cache in 'int3'; known: bfloat16, fp8, int8, int4, and two of them"),
        ("int8/", None),
        (8, "a key/value cache cannot be 8; give a name"),
        ({"keys": 8}, "no key/value cache in 8"),
        ({"first": True}, "first=True of a key/value cache is not a number from 0 to 64"),
        ({"newest": 0}, "newest=0 .* from 1 to 1024"),
        ({"rotated": "yes"}, "must be true or false"),
        ({"sinks": 4}, "no field sinks; its fields: keys, values, group, newest, first, rotated"),
    ],
)
def test_what_is_refused(said: object, message: str | None) -> None:
    if message is None:
        assert get_kv_cache(said).name == "int8"
        return
    with pytest.raises(BadInput, match=message):
        get_kv_cache(said)


def test_heads_that_cannot_be_packed() -> None:
    with pytest.raises(Unsupported, match=r"heads of 20 values do not divide into groups of 8 or more"):
        KVCache().side("keys", 20)
    assert KVCache(keys="bfloat16").side("keys", 20).rotation == 0
    assert KVCache().side("keys", 96) == ("int4", 96, 32, 32)
    assert KVCache(rotated=False).side("keys", 128).rotation == 0
    assert KVCache(keys="int8").side("keys", 128).rotation == 0


def test_the_hadamard_matrix_is_orthonormal_and_its_own_inverse() -> None:
    eye = torch.eye(96)
    for block in (8, 32):
        matrix = hadamard(eye, block)
        torch.testing.assert_close(matrix @ matrix.T, eye)
        torch.testing.assert_close(matrix, matrix.T)
        assert set((matrix.abs() * block**0.5).unique().round(decimals=4).tolist()) == {0.0, 1.0}
    assert hadamard(eye, 0) is eye


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "bfloat16"])
@pytest.mark.parametrize("size", [8, 64, 96, 128])
def test_rounding(kind: str, size: int) -> None:
    """Near half a step of the largest value of a turned group (4 bits cut); orders are permutations."""
    x = torch.randn(2, 3, 5, size, generator=torch.Generator().manual_seed(1))
    x[..., 3] *= 30
    side = get_kv_cache(kind).side("keys", size)
    codes, scales = side.pack(x)
    assert codes.shape == (2, 3, 5, side.row_bytes) and scales.dtype == torch.float16
    read = side.unpack(codes, scales, torch.float32)
    largest = hadamard(x, side.rotation).unflatten(-1, (-1, side.group)).abs().amax(-1, keepdim=True)
    step = largest / {"int4": 7, "int8": 127, "fp8": 14}[kind]
    error = (hadamard(read, side.rotation) - hadamard(x, side.rotation)).unflatten(-1, (-1, side.group)).abs()
    assert bool((error <= {"int4": 1.75, "int8": 0.57, "fp8": 0.57}[kind] * step).all())
    for lanes in (4, 8):
        if side.group >= 32 or side.group >= lanes:
            turned = ordered_codes(codes, side, lanes)
            assert torch.equal(unordered_codes(turned, side, lanes), codes)


def test_sixteen_codes_and_the_best_of_four_scales_err_less_than_the_largest_number_allows() -> None:
    x = torch.randn(400, 128, generator=torch.Generator().manual_seed(1))
    x[:, 3] *= 30
    x[0], x[1] = 0, 1e-9
    side = KVCache().side("keys", 128)
    codes, scales = side.pack(x)
    turned = hadamard(x, side.rotation)
    plain = side.format.quantize(turned).dequantize()
    read = hadamard(side.unpack(codes, scales, torch.float32), side.rotation)
    assert float((read - turned).norm()) < 0.9 * float((plain - turned).norm())
    assert not read[0].any() and float(read[1].abs().max()) < 1e-7
    assert set((codes[2:] & 15).unique().tolist()) == set(range(16)) and bool((scales[2:] < 0).any())
    x[2, 7] = torch.inf
    assert bool(side.pack(x)[1][2].isnan().all()) and bool(side.pack(x)[1][3:].isfinite().all())


def test_turning_makes_outliers_cheaper() -> None:
    x = torch.randn(1, 1, 200, 128, generator=torch.Generator().manual_seed(1))
    x[..., 5] *= 25
    error = {}
    for rotated in (True, False):
        side = KVCache(rotated=rotated).side("keys", 128)
        error[rotated] = float((side.unpack(*side.pack(x), torch.float32) - x).norm() / x.norm())
    assert error[True] < 0.7 * error[False]


def test_bytes_and_capacity() -> None:
    """Codes, scales of 16 bits, 64 newest and 4 first tokens in 16 bits; 3.5 times as many at 8k and more."""
    plain = 2 * 2 * 128
    assert KVCache().nbytes(64, 128) == (64 + 4) * plain
    assert KVCache().nbytes(1064, 128) == 1000 * 2 * (64 + 4) + 68 * plain
    assert get_kv_cache("bfloat16").nbytes(100, 128) == 100 * plain
    assert 8192 * plain / KVCache().nbytes(8192, 128) > 3.6
    assert 2048 * plain / KVCache().nbytes(2048, 128) > 3.4
    assert 1.9 < 8192 * plain / get_kv_cache("int8").nbytes(8192, 128) < 2
