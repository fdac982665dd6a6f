"""Stochastic computing: options, sequences, tables and codes, against the published facts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.formats.stochastic import (
    Stochastic,
    boundaries,
    product_tables,
    quantize_operand,
    sobol,
)
from formats.generated_streams import _count, _gray_sobol, _numbers

CPU = torch.device("cpu")
HALVE = Stochastic(halve_bipolar_stoc_len=True)


def test_options_are_one_frozen_value() -> None:
    assert Stochastic() == Stochastic() and hash(Stochastic()) == hash(Stochastic())
    with pytest.raises(dataclasses.FrozenInstanceError):
        Stochastic().stoc_len = 3  # type: ignore[misc]
    for field, value in (("scramble", "off"), ("n_masks", 64), ("stoc_len", 9), ("scramble_rescale", False)):
        assert dataclasses.replace(Stochastic(), **{field: value}) != Stochastic()


@pytest.mark.parametrize(
    ("options", "length", "levels", "max_code"),
    [
        ({}, 256, 256, 127),
        ({"halve_bipolar_stoc_len": True}, 128, 128, 127),
        ({"halve_bipolar_stoc_len": True, "stoc_len": 64}, 64, 128, 127),
        ({"halve_bipolar_stoc_len": True, "rng_levels": 256}, 128, 256, 127),
        ({"halve_bipolar_stoc_len": True, "mode": "unipolar"}, 256, 256, 255),
        ({"sc_prec": 4, "stoc_len": 10}, 10, 16, 7),
    ],
)
def test_defaults_follow_from_the_precision(options, length: int, levels: int, max_code: int) -> None:
    streams = Stochastic(**options).streams
    assert (streams.length, streams.levels, streams.max_code) == (length, levels, max_code)


def test_boundaries() -> None:
    assert boundaries(Stochastic().streams)[[0, 1, 2, 3, 63, 64, 126, 127]].tolist() == [
        0, 2, 4, 6, 127, 129, 254, 256,
    ]  # fmt: skip
    assert boundaries(HALVE.streams)[[1, 2, 3, 63, 64, 126, 127]].tolist() == [1, 2, 3, 63, 65, 127, 128]


def test_sequences() -> None:
    a, b = sobol(8, "a"), sobol(8, "b")
    assert a[:16] == b[:16] == (0, 128, 192, 64, 96, 224, 160, 32, 48, 176, 240, 112, 80, 208, 144, 16)
    assert a[-4:] == (65, 193, 129, 1) and b[-4:] == (191, 63, 127, 255)
    assert sobol(4, "a") == sobol(4, "b")
    for p in range(1, 13):
        for operand in "ab":
            assert list(sobol(p, operand)) == _gray_sobol(p, operand == "b")
            assert sorted(sobol(p, operand)) == list(range(2**p))


def test_masks() -> None:
    assert Stochastic().masks(300) == (0,) * 300  # full streams on a full grid are never scrambled
    assert HALVE.masks(5) == (0, 128, 64, 192, 32) and HALVE.masks(258)[256:] == HALVE.masks(2)
    counter = dataclasses.replace(HALVE, scramble="counter")
    assert counter.masks(258) == (*range(256), 0, 1)
    assert dataclasses.replace(counter, n_masks=3).masks(5) == (0, 1, 2, 0, 1)
    assert dataclasses.replace(HALVE, scramble="off").masks(3) == (0, 0, 0)
    assert dataclasses.replace(HALVE, scramble_rescale=False).masks(3) == (0, 0, 0)
    assert Stochastic(stoc_len=64, scramble_rescale=False).masks(2) == (0, 128)
    drawn = dataclasses.replace(HALVE, scramble="random")
    assert dataclasses.replace(drawn, n_masks=2).masks(4) == (154, 106, 154, 106)
    assert drawn.masks(8) == (154, 106, 62, 64, 97, 191, 254, 210) and drawn.masks(500)[:8] == drawn.masks(8)


def test_products_of_the_specification() -> None:
    pairs = [(64, 64), (127, 127), (1, 1), (100, 37)]
    full = product_tables(Stochastic().streams, (0,), CPU)[0]
    assert [int(full[pair]) for pair in pairs] == [65, 256, 1, 59]
    halve = product_tables(HALVE.streams, HALVE.masks(2), CPU)
    assert [int(halve[0][pair]) for pair in pairs] == [34, 128, 1, 29]
    assert [int(halve[1][pair]) for pair in pairs] == [33, 128, 0, 29]
    assert full.dtype == torch.int16 and full.shape == (128, 128)


@pytest.mark.parametrize(
    "options",
    [
        {"sc_prec": 5, "stoc_len": 21},
        {"sc_prec": 4, "halve_bipolar_stoc_len": True},
        {"sc_prec": 4, "rng_levels": 50},
        {"sc_prec": 3, "mode": "unipolar", "stoc_len": 5, "rng_levels": 3},
    ],
)
def test_tables_equal_generated_streams(options) -> None:
    o = Stochastic(**options)
    named, D, p = dataclasses.asdict(o), 3, o.sc_prec
    tables = product_tables(o.streams, o.masks(D), CPU)
    for d in range(D):
        ra, rb = (_numbers(_gray_sobol(p, side), d, named) for side in (False, True))
        for u in range(o.max_code + 1):
            for v in range(o.max_code + 1):
                assert tables[d, u, v] == _count(u, v, ra, rb, o.max_code, o.streams.levels)


def test_largest_and_zero_codes() -> None:
    for options in (Stochastic(), HALVE, Stochastic(mode="unipolar"), Stochastic(sc_prec=12)):
        T = product_tables(options.streams, (0,), CPU)[0]
        assert T[-1, -1] == options.streams.length and not T[0].any() and not T[:, 0].any()


def test_codes_use_the_whole_range_and_decode() -> None:
    x = torch.randn(2, 5, 30)
    for granularity in ("per_row", "per_tensor", "per_head"):
        for mode in ("bipolar", "unipolar") if granularity != "per_head" else ("bipolar",):
            q = quantize_operand(x, Stochastic(granularity=granularity, mode=mode))
            scales = q.scales.float().expand(2, 5)[..., None]
            decoded = q.codes.float()
            if q.zero_points is not None:
                decoded = decoded - q.zero_points.float().expand(2, 5)[..., None]
            assert ((decoded * scales - x).abs() <= scales * 0.5001).all()
            assert q.codes.abs().max() == q.codes.new_tensor(127 if mode == "bipolar" else 255)


def test_rows_of_a_group_share_a_scale() -> None:
    x = torch.randn(1, 5, 8)
    scales = quantize_operand(x, Stochastic(), group=2).scales[0]
    assert scales[0] == scales[1] and scales[2] == scales[3] and len(set(scales.tolist())) == 3
    assert torch.equal(scales[4:], quantize_operand(x[:, 4:], Stochastic()).scales[0])
    assert len(set(quantize_operand(x, Stochastic(), group=9).scales[0].tolist())) == 1


def test_zeros_are_zero() -> None:
    x = torch.zeros(1, 3, 4)
    for options in (Stochastic(), Stochastic(granularity="per_tensor"), Stochastic(mode="unipolar")):
        q = quantize_operand(x, options)
        assert not q.codes.any() and (q.scales > 0).all()


def test_numbers_are_whole_numbers() -> None:
    with pytest.raises(BadInput, match="group_a=True is refused"):
        Stochastic(group_a=True)
