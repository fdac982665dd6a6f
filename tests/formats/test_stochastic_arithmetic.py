"""Stochastic arithmetics other than scmp_kernels': their tables, what they promise, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.formats import get_format
from fewbits.formats.base import format_from_config, format_to_config
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.formats.streams import (
    counted,
    numbers,
    operand_bits,
    product_bits,
    product_tables,
    second_directions,
)

CPU = torch.device("cpu")
SMALL = Stochastic(sc_prec=5, halve_bipolar_stoc_len=True)
VARIANTS = (
    {},
    {"gate": "and"},
    {"signs": "twos_complement"},
    {"gate": "and", "signs": "twos_complement"},
    {"sequence": "unary"},
    {"sequence": "unary", "gate": "and", "planned_len": 20, "stoc_len": 7},
    {"sequence": "halton", "seed_b": 5},
    {"sequence": "weyl"},
    {"flip_rate": 0.1},
    {"flip_rate": 0.1, "gate": "and", "signs": "twos_complement"},
    {"gate": "and", "or_group": 4, "scramble": "cells"},
)


@pytest.mark.parametrize("fields", VARIANTS)
def test_tables_count_the_bits_of_the_definition(fields) -> None:
    options = replace(SMALL, **fields)
    streams, keys = options.streams, options.masks(6)
    tables = product_tables(streams, keys, CPU)
    assert tables.shape == (6, streams.num_codes, streams.num_codes) and tables.dtype == torch.int16
    for table, key in zip(tables, keys, strict=True):
        assert torch.equal(table.long(), counted(product_bits(streams, key).sum(-1), streams))


def test_twos_complement_has_the_ends_and_the_middle() -> None:
    options = replace(SMALL, signs="twos_complement", scramble="off")
    table = product_tables(options.streams, (0,), CPU)[0]
    L, Q = options.length, options.max_code
    assert table[0, 0] == table[-1, -1] == L and table[0, -1] == table[-1, 0] == -L
    exact = torch.arange(-Q, Q + 1).float() / Q
    assert (table / L - exact[:, None] * exact).abs().max() < 0.3


def test_a_unary_stream_is_ones_and_then_zeros() -> None:
    for fields in ({}, {"stoc_len": 11}, {"planned_len": 20, "stoc_len": 9}):
        options = replace(SMALL, sequence="unary", **fields)
        bits = operand_bits(options.streams, "a", options.masks(3)[2], options.length)
        assert (bits.int().diff(dim=1) <= 0).all()
        whole = options.planned_len or options.length
        share = torch.arange(16) / 15
        assert ((share * whole).ceil().clamp(max=options.length) - bits.sum(1)).abs().max() <= 1


def test_cells_do_not_overlap() -> None:
    options = Stochastic(gate="and", or_group=16, scramble="cells", stoc_len=256)
    keys = options.masks(16)
    assert options.masks(20)[16:] == keys[:4] and len(set(keys)) == 16
    ones = torch.stack([product_bits(options.streams, key)[-1, -1] for key in keys]).sum(0)
    assert int(ones.max()) == 1  # no step has two products


def test_early_termination_of_scrambled_streams_is_a_shorter_stream() -> None:
    early, short = replace(STOCHASTIC, planned_len=128, stoc_len=32), STOCHASTIC.with_length(32)
    assert torch.equal(
        product_tables(early.streams, early.masks(4), CPU), product_tables(short.streams, short.masks(4), CPU)
    )
    full = Stochastic(planned_len=256, stoc_len=32)  # streams of 256 steps have no masks, shorter ones do
    assert full.masks(4) == (0, 0, 0, 0) != Stochastic(stoc_len=32).masks(4)
    assert replace(STOCHASTIC, planned_len=100).length == 100


def test_flips_come_at_their_rate_from_their_seed_and_the_first_are_those_of_longer_streams() -> None:
    plain, rate = Stochastic(scramble="off"), 0.03
    flipped = replace(plain, flip_rate=rate)
    before, after = (operand_bits(o.streams, "b", o.masks(6)[5], 256) for o in (plain, flipped))
    share = float((before != after)[1:].double().mean())
    assert abs(share - rate) < 4 * (rate / after.numel()) ** 0.5
    short = operand_bits(replace(flipped, stoc_len=40, planned_len=256).streams, "b", flipped.masks(6)[5], 40)
    assert torch.equal(short, after[:, :40])
    assert not after[0].any()  # a zero has no stream
    others = [operand_bits(replace(flipped, flip_seed=1).streams, "b", flipped.masks(6)[5], 256)]
    others += [operand_bits(flipped.streams, "b", flipped.masks(6)[4], 256)]
    assert all(not torch.equal(other, after) for other in others)
    everything = operand_bits(replace(plain, flip_rate=1.0).streams, "b", 0, 256)
    assert torch.equal(everything[1:], ~before[1:])


def test_numbers_of_the_further_sequences() -> None:
    halton, weyl = Stochastic(sequence="halton").streams, Stochastic(sequence="weyl").streams
    assert numbers(halton, "a")[:5] == (0, 128, 64, 192, 32)
    assert numbers(halton, "b")[:5] == (0, 85, 170, 28, 113)
    assert numbers(weyl, "a")[:3] == (0, 159, 62) and numbers(weyl, "b")[:3] == (0, 107, 214)
    assert sorted(numbers(weyl, "b")) == list(range(256)) == sorted(numbers(halton, "a"))


def test_the_gate_and_has_sequences_that_fill_the_square() -> None:
    """Every cell of 16 x 16 has one of the 256 points; scmp_kernels' pair begins on the diagonal."""
    pairs = {
        gate: [(x // 16, y // 16) for x, y in zip(numbers(s, "a"), numbers(s, "b"), strict=True)]
        for gate in ("and", "enable")
        for s in [Stochastic(gate=gate).streams]
    }
    assert len(set(pairs["and"])) == 256 and len(set(pairs["enable"])) < 256
    assert second_directions(8) == (1, 3, 5, 15, 17, 51, 85, 255)
    named = Stochastic(gate="and", seed_b=(1,) * 8).streams
    assert numbers(named, "b") == numbers(named, "a")


def test_an_arithmetic_survives_plain_data() -> None:
    value = replace(STOCHASTIC, gate="and", or_group=4, scramble="cells", flip_rate=0.25, flip_seed=3)
    plain = format_to_config(value, {"stochastic": STOCHASTIC})
    assert plain == {
        "name": "stochastic",
        "scramble": "cells",
        "gate": "and",
        "or_group": 4,
        "flip_rate": 0.25,
        "flip_seed": 3,
    }
    assert format_from_config(plain, {"stochastic": STOCHASTIC}) == get_format(plain) == value


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gate": "xor"}, "gate 'xor' is unknown; choose one of enable, and"),
        ({"signs": "ones_complement"}, "signs 'ones_complement' is unknown; choose one of magnitude"),
        ({"flip_rate": 1.5}, "flip_rate=1.5 is refused: give the share of inverted bits, from 0 to 1"),
        ({"flip_rate": -0.1}, "flip_rate=-0.1 is refused"),
        ({"flip_rate": float("nan")}, "flip_rate=nan is refused"),
        ({"flip_rate": "1"}, "flip_rate='1' is refused"),
        ({"flip_seed": -1}, "flip_seed=-1 is refused: give a whole number from 0"),
        ({"planned_len": 64, "stoc_len": 65}, "65 steps run longer than the streams of planned_len=64"),
        ({"planned_len": 257}, "planned_len=257 is refused: give a whole number from 1 to 256"),
        ({"or_group": 0}, "or_group=0 is refused"),
        ({"or_group": 4, "signs": "twos_complement"}, "without or_group"),
        ({"mode": "unipolar", "signs": "twos_complement"}, 'are for mode "bipolar"'),
        ({"scramble": "cells"}, 'needs gate="and" and an or_group that is a square'),
        ({"scramble": "cells", "gate": "and", "or_group": 8}, "an or_group that is a square"),
        ({"scramble": "cells", "gate": "and", "or_group": 9}, "or_group=9 cannot cut a grid of 256 levels"),
        ({"scramble": "cells", "gate": "and", "or_group": 256}, "cannot cut a grid of 256 levels into 16"),
        ({"sequence": "unary", "seed_a": (1,) * 8}, 'the sequence "unary" has no seed_a'),
        ({"sequence": "weyl", "seed_b": 4}, "give an odd number from 1 to 255"),
    ],
)
def test_arithmetics_that_are_refused(fields, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        Stochastic(**fields)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_what_is_not_scmp_kernels_is_named_and_can_be_left_out() -> None:
    assert STOCHASTIC.arithmetic == {} == replace(STOCHASTIC, scramble="off", stoc_len=9).arithmetic
    value = replace(STOCHASTIC, gate="and", or_group=4, scramble="cells", planned_len=64)
    assert value.arithmetic == {"gate": "and", "or_group": 4, "planned_len": 64, "scramble": "cells"}
    plain = value.without_streams(4)
    assert plain.arithmetic == {} and plain.sc_prec == 4 and plain.chunk_d == value.chunk_d
