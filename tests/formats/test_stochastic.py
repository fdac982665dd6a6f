"""Stochastic computing: options, sequences, tables and codes, against the published facts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.formats import FORMATS, STOCHASTIC, get_format
from fewbits.formats.rounding import random_words
from fewbits.formats.stochastic import (
    Stochastic,
    boundaries,
    product_tables,
    quantize_operand,
    sobol,
)
from fewbits.formats.streams import lfsr, numbers, prefix_tables, reversed_bits, step_tables, uniform
from tests.formats.generated_streams import _count, _gray_sobol, _numbers

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
        0,
        2,
        4,
        6,
        127,
        129,
        254,
        256,
    ]
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


def test_registers_are_maximal() -> None:
    """Every state but 0 once, then the first again: XAPP 052's stages for all numbers of bits."""
    for p in range(1, 13):
        a, b = lfsr(p, "a"), lfsr(p, "b")
        assert sorted(a[:-1]) == list(range(1, 2**p)) and a[-1] == a[0]
        assert b == tuple(reversed_bits(x, p) for x in a)
        assert sorted(lfsr(p, "a", 1)[:-1]) == list(range(1, 2**p))
    assert lfsr(8, "a")[0] == 125 and lfsr(8, "a", 1)[:3] == (1, 128, 64)


def test_random_numbers_come_from_a_counter() -> None:
    assert uniform(8, "a") != uniform(8, "b") and uniform(8, "b") == uniform(8, "a", 1)
    assert set(uniform(4, "a", 2**64 - 1)) <= set(range(16))
    words = random_words(256, 5).tolist()
    assert uniform(8, "a", 5) == tuple(word // 2**24 for word in words)
    assert abs(sum(uniform(12, "a")) / 2**24 - 0.5) < 0.03


def test_sobol_seeds_give_permutations() -> None:
    seed = (1, 3, 7, 15, 31, 63, 127, 255)
    values = sobol(8, "b", seed)
    assert sorted(values) == list(range(256)) and values != sobol(8, "b")
    options = Stochastic(seed_b=seed, stoc_len=64)
    assert numbers(options.streams, "b") == values and numbers(options.streams, "a") == sobol(8, "a")
    assert not torch.equal(
        product_tables(options.streams, (0,), CPU), product_tables(Stochastic(stoc_len=64).streams, (0,), CPU)
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sequence": "faure"}, "sequence 'faure' is unknown; choose one of sobol, lfsr, random"),
        ({"seed_a": 3}, 'seed_a=3 is refused for the sequence "sobol": give 8 odd numbers'),
        ({"seed_b": (1, 2, 1, 1, 1, 1, 1, 1)}, "give 8 odd numbers, the i-th"),
        ({"seed_b": (1, 5, 1, 1, 1, 1, 1, 1)}, "give 8 odd numbers"),
        ({"seed_b": (1, 1)}, "give 8 odd numbers"),
        ({"sequence": "lfsr", "seed_a": 0}, "give a whole number from 1 to 255"),
        ({"sequence": "lfsr", "seed_a": 256}, "give a whole number from 1 to 255"),
        ({"sequence": "random", "seed_b": -1}, "give a whole number from 0 to"),
        ({"sequence": "random", "seed_b": True}, "give a whole number from 0 to"),
    ],
)
def test_sequences_that_are_refused(fields, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        Stochastic(**fields)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_prefix_and_step_tables_make_every_length() -> None:
    options = Stochastic(sc_prec=6, rng_levels=32, sequence="lfsr")
    masks = options.masks(5)
    lengths = (0, 1, 17, 40, 64)
    prefixes = prefix_tables(options.streams, masks, CPU).long()
    steps = step_tables(options.streams, masks, lengths, CPU).long()
    for i, length in enumerate(lengths):
        for m in range(len(masks)):
            T = prefixes[m][steps[i, m]]
            if length:
                assert torch.equal(
                    T, product_tables(options.with_length(length).streams, masks, CPU)[m].long()
                )
            else:
                assert not T.any()


def test_the_registrys_operating_point() -> None:
    assert FORMATS["stochastic"] == STOCHASTIC == get_format("stochastic")
    assert (STOCHASTIC.length, STOCHASTIC.chunk_d, STOCHASTIC.n_masks) == (128, 128, 64)
    assert STOCHASTIC.streams.levels == STOCHASTIC.with_length(32).streams.levels == 128
    assert STOCHASTIC.bits_per_value((64, 1024)) == 8 + 32 / 128


def test_numbers_are_whole_numbers() -> None:
    with pytest.raises(BadInput, match="group_a=True is refused"):
        Stochastic(group_a=True)
