"""Random bits against published vectors, bit packing, rounding."""

from __future__ import annotations

import pytest
import torch

from fewbits.formats import E4M3, INT4, INT8, NF4
from fewbits.formats.bits import pack_bits, packed_size, unpack_bits
from fewbits.formats.rounding import philox, random_uniform, random_words, round_to_integer
from fewbits.formats.tables import round_to_table


# kat_vectors of the Random123 library (Salmon et al. 2011), philox4x32 with 10 rounds
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected) -> None:
    words = philox(tuple(torch.tensor([c], dtype=torch.int64) for c in counter), key)
    assert [w.item() for w in words] == list(expected)


def test_words_depend_on_position_alone() -> None:
    whole = random_words(1000, seed=7)
    assert torch.equal(whole[:4], random_words(4, seed=7))
    for offset, n in ((0, 1), (1, 5), (3, 10), (4, 4), (997, 3)):
        assert torch.equal(random_words(n, seed=7, offset=offset), whole[offset : offset + n])
    assert random_words(2, seed=0).tolist() == [0x6627E8D5, 0xE169C58D]
    assert not torch.equal(random_words(100, seed=7 + 2**32), whole[:100])
    assert random_words(4, seed=-1).min() >= 0


def test_uniform_is_uniform() -> None:
    """Mean and variance of n uniform numbers within 6 standard errors; their variances: 1/12, 1/180."""
    n = 1 << 18
    u = random_uniform((512, 512), seed=3).double()
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) <= 6 * (1 / 12 / n) ** 0.5
    assert abs(((u - 0.5) ** 2).mean() - 1 / 12) <= 6 * (1 / 180 / n) ** 0.5
    neighbours = ((u[:, 1:] - 0.5) * (u[:, :-1] - 0.5)).mean()
    assert abs(neighbours) <= 6 / 12 / n**0.5


def test_golden_codes() -> None:
    """Pinned: other devices, and later kernels, must give these very codes."""
    x = torch.linspace(-1, 1, 16)
    assert INT8.quantize(x, seed=42).codes.tolist() == GOLDEN["int8"]
    assert INT4.quantize(x, seed=42).codes.tolist() == GOLDEN["int4"]
    assert NF4.quantize(x, seed=42).codes.tolist() == GOLDEN["nf4"]
    assert E4M3.quantize(x, seed=42).codes.view(torch.uint8).tolist() == GOLDEN["e4m3"]


GOLDEN = {
    "int8": [-127, -110, -93, -76, -60, -42, -25, -8, 8, 25, 42, 59, 76, 93, 110, 127],
    "int4": [169, 203, 236, 15, 16, 50, 84, 118],
    "nf4": [0, 33, 66, 101, 152, 203, 237, 254],
    "e4m3": [254, 252, 250, 248, 246, 241, 235, 223, 95, 107, 113, 117, 120, 122, 124, 126],
}


def test_ties_go_to_even() -> None:
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    assert round_to_integer(x).tolist() == [-2, -2, 0, 0, 2, 2]


def test_stochastic_rounding_keeps_whole_numbers() -> None:
    x = torch.arange(-50.0, 50.0)
    assert torch.equal(round_to_integer(x, random_uniform((100,), 1)), x)


@pytest.mark.parametrize("x", [-2.3, -0.7, -0.3, -1e-9, 0.0, 1e-3, 0.7, 5.25])
def test_probability_of_rounding_up(x: float) -> None:
    """As the head of rounding.py has it: the ceiling of the fraction, but for x in (-0.5, 0) the nearest."""
    value = torch.tensor(x)
    fraction = (value.double() - value.double().floor()) * 2**24  # exact: 53 bits
    steps = int(fraction.round() if -0.5 < x < 0 else fraction.ceil())
    below, at = (torch.tensor(n * 2.0**-24) for n in (max(steps - 1, 0), min(steps, 2**24 - 1)))
    up = value.floor() + 1
    assert (round_to_integer(value, below) == up) == (steps > 0)
    assert (round_to_integer(value, at) == up) == (steps == 2**24)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 5), (2, 3, 9), (0,), (4, 0)])
def test_packing_both_ways(bits: int, shape: tuple[int, ...]) -> None:
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.shape == (*shape[:-1], packed_size(shape[-1], bits))
    assert torch.equal(unpack_bits(packed, bits, shape[-1]), codes)


def test_packing_order() -> None:
    assert pack_bits(torch.tensor([1, 2, 3], dtype=torch.uint8), 4).tolist() == [0x21, 0x03]
    assert pack_bits(torch.tensor([1, 2, 3, 0, 1], dtype=torch.uint8), 2).tolist() == [0b00111001, 1]


def test_a_table_takes_the_nearest_or_one_of_two_neighbours_by_chance() -> None:
    values = (-1.0, -0.25, 0.0, 0.5, 1.0)
    x = torch.tensor([-3.0, -1.0, -0.125, 0.25, 0.26, 0.9, 7.0], dtype=torch.float32)
    codes = round_to_table(x, values)
    assert codes.dtype == torch.uint8 and codes.tolist() == [0, 0, 1, 2, 3, 4, 4]  # ties: the lower
    many = x[None].expand(4000, -1)
    chosen = round_to_table(many, values, random_uniform(tuple(many.shape), 3))
    means = torch.tensor(values, dtype=torch.float32)[chosen.long()].mean(0)
    torch.testing.assert_close(means, x.clamp(-1, 1), rtol=0, atol=0.03)  # 0.5 / 2 / sqrt(4000) is 0.004
    assert all(len(set(column.tolist())) <= 2 for column in chosen.T)
