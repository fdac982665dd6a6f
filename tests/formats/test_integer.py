"""INT8 and INT4 against torchao's affine arithmetic."""

from __future__ import annotations

import pytest
import torch

from fewbits.formats import FORMATS, Integer
from fewbits.formats.blocks import from_blocks, to_blocks

ao = pytest.importorskip("torchao.quantization.quant_primitives")

INTEGERS = [f for f in FORMATS.values() if isinstance(f, Integer)]
each = pytest.mark.parametrize("format", INTEGERS, ids=lambda f: f.name)


def theirs(x: torch.Tensor, format: Integer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales, zero points, codes and decoded values of torchao, told to use the same range of codes."""
    rows, columns = format.block
    block = tuple(x.shape) if format.block == (0, 0) else (rows, columns or x.shape[1])
    low = -format.max_code - (1 if format.zero_point else 0)
    mapping = ao.MappingType.ASYMMETRIC if format.zero_point else ao.MappingType.SYMMETRIC
    limits = {"quant_min": low, "quant_max": format.max_code}
    scales, zero_points = ao.choose_qparams_affine(
        x, mapping, block, torch.int8, **limits, scale_dtype=torch.float32, zero_point_dtype=torch.int8
    )
    codes = ao.quantize_affine(x, block, scales, zero_points, torch.int8, **limits)
    decoded = ao.dequantize_affine(
        codes, block, scales, zero_points, torch.int8, **limits, output_dtype=torch.float32
    )
    return scales, zero_points, codes, decoded


def whole_codes(packed) -> torch.Tensor:
    if packed.format.bits == 8:
        return packed.codes
    low, high = (packed.codes & 15).to(torch.int8), (packed.codes >> 4).to(torch.int8)
    codes = torch.stack([low, high], dim=-1).flatten(-2)
    return torch.where(codes > 7, codes - 16, codes)[..., : packed.shape[-1]]


@each
@pytest.mark.parametrize("shift", [0.0, 0.7, 5.0])
def test_equals_torchao(format: Integer, shift: float) -> None:
    """The same float32 arithmetic in the same order, so everything is equal, bit for bit."""
    x = torch.randn(64, 256) + shift
    packed = format.quantize(x)
    scales, zero_points, codes, decoded = theirs(x, format)
    assert torch.equal(packed.scales.flatten(), scales.flatten())
    assert torch.equal(whole_codes(packed), codes)
    assert torch.equal(packed.dequantize(), decoded)
    if format.zero_point:
        assert torch.equal(packed.parts["zero_points"].flatten(), zero_points.flatten())


def test_sixteen_bit_input_is_near_torchao() -> None:
    """Torchao computes scales in x's dtype, we in float32.

    Its scale is off by 2**-8 relative at most in bfloat16, and so are its inverse and the product before
    rounding: a code moves by less than 127 * 3 * 2**-8 + 1 < 3.
    """
    format = FORMATS["int8_g64"]
    assert isinstance(format, Integer)
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    scales, _, codes, _ = theirs(x, format)
    packed = format.quantize(x)
    assert (packed.scales.flatten() / scales.flatten() - 1).abs().max() <= 2**-8
    assert (packed.codes.int() - codes.int()).abs().max() < 3


def test_the_shared_model_is_lossless_in_int8_groups_of_64(shared) -> None:
    """stories3m was published as symmetric int8 with groups of 64: its weights come back as they are."""
    safetensors = pytest.importorskip("safetensors.torch")
    weights = safetensors.load_file(shared / "data" / "models" / "stories3m" / "model.safetensors")
    weight = weights["model.layers.0.mlp.gate_proj.weight"]
    packed = FORMATS["int8_g64"].quantize(weight)
    # each value is code * scale rounded once, in the file and again here
    assert torch.allclose(packed.dequantize(), weight, rtol=2**-21, atol=0)


@pytest.mark.parametrize("shape", [(), (5,), (4, 6), (7, 130), (2, 3, 65), (2, 129, 130)])
@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 64), (128, 128)])
def test_blocks_both_ways(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    x = torch.randn(shape)
    blocks = to_blocks(x, block)
    assert torch.equal(from_blocks(blocks, shape, block), x)


def test_an_odd_axis_has_a_short_last_block() -> None:
    """The short block has a scale of its own, and the padding has no say in it."""
    x = torch.randn(3, 67)
    packed = FORMATS["int4_g64"].quantize(x)
    assert packed.codes.shape == (3, 34)
    assert torch.equal(packed.scales[:, 1], x[:, 64:].abs().amax(1) / 7)
    assert torch.equal(packed.dequantize()[:, :64], FORMATS["int4_g64"].quantize(x[:, :64]).dequantize())
