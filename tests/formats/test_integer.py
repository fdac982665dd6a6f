"""INT8 and INT4 against torchao's affine arithmetic: its golden vectors (make_golden.py), and itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fewbits.formats import FORMATS, Integer
from fewbits.formats.blocks import from_blocks, to_blocks
from tests import peers
from tests.formats.make_golden import INTEGERS, torchao_numbers

try:
    import torchao.quantization.quant_primitives as ao
except ImportError:
    ao = None

live = pytest.mark.skipif(ao is None, reason="needs torchao")
GOLDEN = load_file(Path(__file__).with_name("golden") / "torchao.safetensors")

each = pytest.mark.parametrize("format", INTEGERS, ids=lambda f: f.name)


def whole_codes(packed) -> torch.Tensor:
    if packed.format.bits == 8:
        return packed.codes
    low, high = (packed.codes & 15).to(torch.int8), (packed.codes >> 4).to(torch.int8)
    codes = torch.stack([low, high], dim=-1).flatten(-2)
    return torch.where(codes > 7, codes - 16, codes)[..., : packed.shape[-1]]


def decoded_by_hand(x, format: Integer, scales, zero_points, codes) -> torch.Tensor:
    """Codes less their zero points, times their scales."""
    rows, columns = x.shape if format.block == (0, 0) else format.block
    columns = columns or x.shape[1]

    def spread(parts: torch.Tensor) -> torch.Tensor:
        grid = parts.view(x.shape[0] // rows, x.shape[1] // columns)
        return grid.repeat_interleave(rows, 0).repeat_interleave(columns, 1).float()

    shifted = codes.float() - (spread(zero_points) if format.zero_point else 0)
    return shifted * spread(scales)


def live_or_skip(x: torch.Tensor, format: Integer) -> tuple[torch.Tensor, ...]:
    """torchao's numbers, where it decodes as its own codes and scales say."""
    scales, zero_points, codes, decoded = torchao_numbers(x, format)
    need = decoded_by_hand(x, format, scales, zero_points, codes)
    peers.same_or_skip("torchao", decoded, need, f"{tuple(x.shape)} {format.name}")
    return scales, zero_points, codes, decoded


@pytest.mark.parametrize("name", sorted({key.partition(".")[0] for key in GOLDEN} - {"x"}))
def test_equals_golden_vectors(name: str) -> None:
    packed = FORMATS[name].quantize(GOLDEN["x"])
    assert torch.equal(packed.scales.flatten(), GOLDEN[f"{name}.scales"])
    assert torch.equal(whole_codes(packed), GOLDEN[f"{name}.codes"])
    assert torch.equal(packed.dequantize(), GOLDEN[f"{name}.decoded"])
    if f"{name}.zero_points" in GOLDEN:
        assert torch.equal(packed.parts["zero_points"].flatten(), GOLDEN[f"{name}.zero_points"])


@live
def test_a_peer_that_decodes_wrongly_is_no_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    format, x = FORMATS["int8_g64"], torch.randn(4, 128)
    live_or_skip(x, format)
    right = ao.dequantize_affine
    monkeypatch.setattr(ao, "dequantize_affine", lambda *a, **k: right(*a, **k) + 1e-6)
    with pytest.raises(pytest.skip.Exception, match=r"torchao .*int8_g64, 512 of 512 values differ"):
        live_or_skip(x, format)


@live
@each
@pytest.mark.parametrize("shift", [0.0, 0.7, 5.0])
def test_equals_torchao(format: Integer, shift: float) -> None:
    """The same float32 arithmetic in the same order, so everything is equal, bit for bit."""
    x = torch.randn(64, 256) + shift
    packed = format.quantize(x)
    scales, zero_points, codes, decoded = live_or_skip(x, format)
    assert torch.equal(packed.scales.flatten(), scales.flatten())
    assert torch.equal(whole_codes(packed), codes)
    assert torch.equal(packed.dequantize(), decoded)
    if format.zero_point:
        assert torch.equal(packed.parts["zero_points"].flatten(), zero_points.flatten())


@live
def test_sixteen_bit_input_is_near_torchao() -> None:
    """Torchao computes scales in x's dtype, we in float32.

    Its scale is off by 2**-8 relative at most in bfloat16, and so are its inverse and the product before
    rounding: a code moves by less than 127 * 3 * 2**-8 + 1 < 3.
    """
    format = FORMATS["int8_g64"]
    assert isinstance(format, Integer)
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    scales, _, codes, _ = torchao_numbers(x, format)
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
