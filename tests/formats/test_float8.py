"""FP8 against torch's own casts."""

from __future__ import annotations

import pytest
import torch

from fewbits.formats import E4M3, E4M3_1X128, E4M3_128X128, E4M3_ROW, E5M2, E5M2_ROW, FORMATS, Float8
from fewbits.formats.rounding import random_uniform

FLOATS = [f for f in FORMATS.values() if isinstance(f, Float8)]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("format", FLOATS, ids=lambda f: f.name)
def test_codes_are_torchs_casts_given_the_scale(format: Float8) -> None:
    x = torch.randn(256, 384)
    packed = format.quantize(x)
    scales = packed.scales
    if format.block[1]:
        scales = scales.repeat_interleave(128, 1)
        scales = scales.repeat_interleave(128, 0) if format.block[0] == 128 else scales
    scaled = x * (1.0 / scales)
    assert torch.equal(
        bits(packed.codes), bits(scaled.clamp(-format.largest, format.largest).to(format.torch_dtype))
    )
    assert torch.equal(packed.dequantize(), packed.codes.float() * scales)


def test_scales() -> None:
    x = torch.randn(256, 384)
    assert torch.equal(E4M3.quantize(x).scales, (x.abs().max() / 448)[None])
    assert torch.equal(E5M2.quantize(x).scales, (x.abs().max() / 57344)[None])
    assert torch.equal(E4M3_ROW.quantize(x).scales, x.abs().amax(1, keepdim=True) / 448)
    assert torch.equal(E5M2_ROW.quantize(x).scales, x.abs().amax(1, keepdim=True) / 57344)
    assert torch.equal(E4M3_1X128.quantize(x).scales, x.view(256, 3, 128).abs().amax(2) / 448)
    assert torch.equal(E4M3_128X128.quantize(x).scales, x.view(2, 128, 3, 128).abs().amax((1, 3)) / 448)


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
def test_every_code_decodes_and_requantises_to_itself(format: Float8) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(format.torch_dtype)
    finite = codes[codes.float().isfinite()]
    packed = format.quantize(finite.float())
    assert packed.scales.item() == 1.0
    assert torch.equal(bits(packed.codes), bits(finite))


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
def test_stochastic_rounding_takes_a_neighbour(format: Float8) -> None:
    """Between two neighbouring codes, subnormals included, both are taken, and nothing else."""
    codes = torch.arange(128, dtype=torch.uint8).view(format.torch_dtype).float()
    codes = codes[codes.isfinite()]
    low, high = codes[:-1], codes[1:]
    x = torch.stack([low + (high - low) * t for t in (0.25, 0.5, 0.75)] * 20)
    x = torch.cat([x, torch.full((len(x), 1), format.largest)], dim=1)
    rounded = format.quantize(x, seed=11).dequantize()[:, :-1]
    assert ((rounded == low) | (rounded == high)).all()
    assert (rounded == low).any(0).all()
    assert (rounded == high).any(0).all()
    whole = torch.cat([codes, -codes])
    assert torch.equal(format.quantize(whole, seed=3).dequantize(), whole)


def test_uniform_numbers_keep_the_tensors_positions_under_padding() -> None:
    """A short last block is filled up for the arithmetic; the random bits are those of the real positions."""
    x = torch.randn(3, 130)
    packed = E4M3_1X128.quantize(x, seed=4)
    u = random_uniform((3, 130), 4)
    row = E4M3_1X128._round_stochastic(x[:, :128] / packed.scales[:, :1], u[:, :128])
    # x * (1 / s) and x / s may differ in the last bit, which changes a rounding with probability 2**-20 each
    assert ((packed.codes[:, :128].float() != row).sum() <= 1).item()
