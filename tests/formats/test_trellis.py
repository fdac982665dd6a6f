"""Trellis codes: the definition worked out value by value, the search beside all paths, its worth."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fewbits import formats
from fewbits.errors import BadInput
from fewbits.formats.base import Packed
from fewbits.formats.trellis import Trellis

SMALL = Trellis(name="trellis2", state_bits=6, block=(1, 16))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def value(state: int) -> float:
    mixed = (34038481 * state + 76625530) % 2**32
    return (sum(mixed.to_bytes(4, "little")) - 510) / 147.8


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_decoding_is_its_definition(bits: int) -> None:
    """Random bytes, read bit by bit in plain Python; the last block is short."""
    format = Trellis(name="trellis2", code_bits=bits, state_bits=12, block=(1, 16))
    shape, generator = (3, 40), torch.Generator().manual_seed(bits)
    layout = format.layout(shape)
    stored = torch.randint(0, 256, layout["codes"].shape, generator=generator, dtype=torch.uint8)
    scales = torch.rand(layout["scales"].shape, generator=generator, dtype=torch.float32)
    decoded = Packed(format, shape, torch.float32, {"codes": stored, "scales": scales}).dequantize()
    for row in range(3):
        stream = int.from_bytes(bytes(stored[row].tolist()), "little")
        codes = [stream >> (bits * i) & (2**bits - 1) for i in range(40)]
        for i in range(40):
            first = i // 16 * 16
            length = min(16, 40 - first)
            before = [codes[first + (i - first - back) % length] for back in range(12 // bits)]
            state = sum(code << (bits * back) for back, code in enumerate(before))
            want = value(state) * float(scales.view(3, 3)[row, i // 16])
            assert abs(float(decoded[row, i]) - want) < 1e-6


def test_the_search_is_near_the_best_of_all_closed_paths() -> None:
    format = Trellis(name="trellis2", code_bits=1, state_bits=4, block=(1, 12))
    x = normal(40, 12)
    packed = format.quantize(x)
    units = x / x.square().mean(-1, keepdim=True).sqrt()
    ours = (packed.dequantize() / packed.scales.view(-1, 1) - units).square().sum(-1)
    paths = torch.tensor(list(itertools.product((0, 1), repeat=12)), dtype=torch.int64)
    states = sum(paths.roll(back, 1) << back for back in range(4))
    table = torch.tensor([value(s) for s in range(16)], dtype=torch.float32)
    least = (table[states][None] - units[:, None]).square().sum(-1).amin(-1)
    assert (ours > least - 1e-4).all()
    assert ours.sum() < 1.05 * least.sum() and (ours < least + 1e-4).float().mean() > 0.6


@pytest.mark.parametrize(("bits", "most"), [(2, 0.08), (3, 0.022), (4, 0.0062)])
def test_normal_values_lose_less_than_in_whole_numbers_of_more_bits(bits: int, most: float) -> None:
    """The best table of 2**bits values has 0.1175, 0.0345 and 0.0095."""
    x = normal(4, 512)
    x /= x.square().mean().sqrt()
    trellis, whole = formats.FORMATS[f"trellis{bits}"], formats.FORMATS[f"int{bits}_g32_zp"]
    errors = [float((f.quantize(x).dequantize() - x).square().mean()) for f in (trellis, whole)]
    assert errors[0] < most and errors[0] < errors[1]
    assert trellis.bits_per_value((4, 512)) == bits + 0.125 < whole.bits_per_value((4, 512))


def test_short_rows_and_more_states() -> None:
    for shape in ((3, 5), (2, 16), (2, 17), (2, 3, 20), (1,), ()):
        x = normal(*shape, seed=1)
        assert (SMALL.quantize(x).dequantize() - x).norm() < 0.75 * x.norm() + 1e-6, shape
    x = normal(8, 64)
    errors = [
        (Trellis(name="trellis2", state_bits=bits).quantize(x).dequantize() - x).norm() for bits in (2, 4, 8)
    ]
    assert errors[0] > errors[1] > errors[2]


def test_what_is_not_finite_and_seeds() -> None:
    x = normal(3, 40)
    x[1, 20] = torch.nan
    packed = SMALL.quantize(x)
    decoded = packed.dequantize()
    assert decoded[1, 16:32].isnan().all() and decoded.isnan().sum() == 16
    assert not SMALL.quantize(torch.zeros(2, 40, dtype=torch.float32)).dequantize().any()
    dithered = [SMALL.quantize(x, seed=seed).codes for seed in (1, 1, 2)]
    assert torch.equal(dithered[0], dithered[1]) and not torch.equal(dithered[0], dithered[2])


def test_fields_that_cannot_be() -> None:
    for fields, what in (
        ({"code_bits": 5}, "code_bits is 5"),
        ({"code_bits": 3, "state_bits": 16}, "state_bits is 16, and it is a multiple"),
        ({"block": (16, 16)}, "a trellis runs along one row"),
        ({"block": (1, 0)}, "a trellis runs along one row"),
    ):
        with pytest.raises(BadInput, match=what):
            Trellis(name="trellis2", **fields)
