"""Formats against specifications and other libraries: exact, every code and scale."""

from __future__ import annotations

import warnings
from fractions import Fraction
from itertools import pairwise
from math import isnan

import pytest
import torch
from torch import Tensor

import fewbits.formats as formats
from fewbits.formats import FORMATS, GGUFBlocks, Packed
from fewbits.formats.bits import pack_bits, unpack_bits
from fewbits.formats.gguf_layouts import LAYOUTS, blocks_not_finite
from fewbits.formats.minifloat import MINIFLOATS
from tests import peer_formats, peers

# Rows of unlike sizes, so that scales differ, and none near the ends of any scale's range.
ROWS, COLUMNS = 64, 512
# Table 5 of the OCP Microscaling specification 1.0 (and of OFP8): bits, bias, largest, smallest numbers.
SPECIFICATION = {
    "e2m1": (4, 6.0, 0.5),
    "e2m3": (6, 7.5, 0.125),
    "e3m2": (6, 28.0, 0.0625),
    "e4m3": (8, 448.0, 2.0**-9),
    "e5m2": (8, 57344.0, 2.0**-16),
}


def numbers(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    return x * torch.exp(3 * torch.randn(ROWS, 1, generator=generator))


def torchao() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")


@pytest.mark.parametrize("kind", SPECIFICATION)
def test_element_types_are_the_specifications(kind: str) -> None:
    bits, largest, smallest = SPECIFICATION[kind]
    element = MINIFLOATS[kind]
    assert element.bits == bits
    finite = [v for v in element.values if not isnan(v)]
    assert max(finite) == largest == -min(finite)
    assert min(v for v in finite if v > 0) == smallest


@pytest.mark.parametrize("kind", SPECIFICATION)
def test_every_midpoint_goes_to_the_even_code(kind: str) -> None:
    """Over all pairs of neighbours, in exact arithmetic: the middle, and one float32 to each side of it."""
    element = MINIFLOATS[kind]
    positive = element.values[: element.largest_code + 1]
    for code, (low, high) in enumerate(pairwise(positive)):
        middle = torch.tensor(float((Fraction(low) + Fraction(high)) / 2))
        below, above = torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(1e9))
        got = element.codes(torch.stack([below, middle, above, -middle])).tolist()
        even = code + code % 2
        assert got == [code, even, code + 1, even + 2 ** (element.bits - 1)]


def test_mx_blocks_by_hand() -> None:
    """Scales of the specification, section 6.3: 2**(floor(log2(absmax)) - emax); what is above is cut."""
    x = torch.zeros(3, 32)
    x[0, :5] = torch.tensor([7.9, -2.5, 1.75, 0.25, -0.2])  # absmax 2**2, E2M1 has emax 2: scale 1
    x[1, :3] = torch.tensor([0.75, 0.3, -0.5])  # absmax 2**-1: scale 2**-3
    packed = formats.MXFP4.quantize(x)
    assert packed.scales.flatten().tolist() == [127, 124, 0]
    assert unpack_bits(packed.codes, 4, 32)[0, :5].tolist() == [7, 12, 4, 0, 8]  # 6, -2, 2, 0, -0
    assert packed.dequantize()[1, :3].tolist() == [0.75, 0.25, -0.5]
    whole = formats.MXINT8.quantize(torch.tensor([[1.999, -1.0, 1 / 64, 3 / 128] + [0.0] * 28]))
    assert whole.scales.item() == 127
    assert whole.codes.view(torch.int8)[0, :4].tolist() == [127, -64, 1, 2]  # 127.9 is cut, 1.5 is even at 2


@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("mxfp8_e4m3", torch.float8_e4m3fn),
        ("mxfp8_e5m2", torch.float8_e5m2),
        ("mxfp6_e2m3", "fp6_e2m3"),
        ("mxfp6_e3m2", "fp6_e3m2"),
        ("mxfp4", torch.float4_e2m1fn_x2),
    ],
)
def test_mx_is_torchaos(name: str, element: torch.dtype | str) -> None:
    module = torchao()
    x = numbers()
    scales, codes = module.to_mx(x, element, 32)
    packed = FORMATS[name].quantize(x)
    bits = FORMATS[name].bits
    ours = packed.codes if bits != 6 else unpack_bits(packed.codes, 6, COLUMNS)
    assert torch.equal(scales.view(torch.uint8).view(packed.scales.shape), packed.scales)
    assert torch.equal(codes.view(torch.uint8), ours)
    assert ours.numel() == ROWS * COLUMNS * (1 if bits > 4 else 0.5)  # 32,768 codes, 1,024 scales
    kind = name.split("_")[-1] if bits != 4 else "e2m1"
    assert torch.equal(packed.dequantize(), peer_formats.mx_decoded(codes, scales, kind))
    assert torch.equal(packed.dequantize(), peers.live_mx(codes, scales, kind, element))


def test_nvfp4_is_torchaos() -> None:
    torchao()
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize

    x = numbers() / 100
    packed = formats.NVFP4.quantize(x)
    scale = x.abs().max() / (448 * 6)
    scales, codes = nvfp4_quantize(x, 16, scale)
    assert packed.parts["tensor_scale"].item() == scale
    assert torch.equal(scales.view(torch.uint8).view(packed.scales.shape), packed.scales.view(torch.uint8))
    assert torch.equal(codes, packed.codes)
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)
    assert torch.equal(packed.dequantize(), peers.live_nvfp4(theirs))


def test_four_over_six_never_rounds_worse() -> None:
    x = numbers(1)[:, :256] / 100
    six, either = formats.NVFP4.fake_quantize(x), formats.NVFP4_4O6.fake_quantize(x)
    assert (either - x).norm() < 0.97 * (six - x).norm()
    # The paper's example: 10, 20, 30, 40 lie exactly on the grid under 4 and not under 6.
    x = torch.tensor([[10.0, 20.0, 30.0, 40.0] * 4])
    assert torch.equal(formats.NVFP4_4O6.quantize(x).dequantize().round(decimals=3), x)
    assert (formats.NVFP4.fake_quantize(x) - x).abs().max() > 3


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7])
def test_streams_of_bits_are_compressed_tensors(bits: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(0, 2**bits, (8, 96), generator=torch.Generator().manual_seed(bits))
    words = helpers.pack_to_int32((codes - 2 ** (bits - 1)).to(torch.int8), bits)
    ours = pack_bits(codes.to(torch.uint8), bits)
    assert torch.equal(words.contiguous().view(torch.uint8), ours)
    assert torch.equal(unpack_bits(ours, bits, 96).long(), codes)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 65])
@pytest.mark.parametrize("bits", range(1, 9))
def test_streams_of_bits_come_back(bits: int, size: int) -> None:
    codes = torch.randint(0, 2**bits, (3, size)).to(torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.shape == (3, -(-size * bits // 8))
    assert torch.equal(unpack_bits(packed, bits, size), codes)


@pytest.mark.parametrize("name", formats.GGUF_TYPES)
def test_gguf_bytes_decode_as_the_packages(name: str) -> None:
    """Written blocks, and every byte at random: 64 rows of 512 values each."""
    gguf = pytest.importorskip("gguf")
    format = FORMATS[name]
    assert isinstance(format, GGUFBlocks)
    kind = gguf.GGMLQuantizationType[format.kind]
    packed = format.quantize(numbers()[:8] / 100)
    shape = (ROWS, COLUMNS)
    codes = torch.randint(0, 256, format.layout(shape)["codes"].shape, generator=torch.Generator()).byte()
    if format.kind == "MXFP4":
        codes.view(-1, 17)[:, 0] %= 250  # 255 is NaN here, as the specification says, and 2**127 there
    for written in (packed, Packed(format, shape, torch.float32, {"codes": codes})):
        theirs = peers.live_gguf(written.codes.numpy(), kind)
        ours = written.dequantize()
        assert torch.equal(ours.isnan(), theirs.isnan())
        blocks = ours.reshape(-1, LAYOUTS[format.kind].size)
        wrong = (~blocks.isfinite()).any(-1).nonzero()[:, 0]
        assert torch.equal(blocks_not_finite(format.kind, written.codes), wrong)
        assert torch.equal(ours.nan_to_num(0.0), theirs.nan_to_num(0.0))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"])
def test_gguf_bytes_are_the_packages(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    x = numbers() / 100
    theirs = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType[kind])
    ours = FORMATS[f"gguf_{kind.lower()}"].quantize(x).codes
    peers.live_gguf(theirs, gguf.GGMLQuantizationType[kind])  # which is no judge where it cannot read its own
    assert torch.equal(torch.from_numpy(theirs), ours)


def test_ternary_is_the_papers() -> None:
    x = numbers()[:8]
    scale = x.abs().mean().clamp(min=1e-5)
    codes = (x / scale).round().clamp(-1, 1)
    packed = formats.TERNARY.quantize(x)
    assert torch.equal(unpack_bits(packed.codes, 2, COLUMNS).float() - 1, codes)
    torch.testing.assert_close(packed.scales[0], scale)


def test_a_block_beyond_float16_decodes_to_nan() -> None:
    x = torch.ones(1, 64)
    x[0, 40] = 70000.0
    decoded = FORMATS["gguf_q8_0"].fake_quantize(x)
    assert bool(decoded[0, 32:].isnan().all())
    assert not bool(decoded[0, :32].isnan().any())
