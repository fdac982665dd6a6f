"""Folders of HQQ's layers: loaded as they are, to the bit, by hqq's own layers where it is installed.

The files here are written from the documented layout one value at a time, so that no reader of ours is tested
by its own inverse.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits import FastLanguageModel
from fewbits.errors import BadCheckpoint, Unsupported
from fewbits.formats.hqq import from_hqq
from fewbits.formats.integer_offsets import OffsetInteger
from fewbits.nn.linear import QuantizedLinear
from tests import peers
from tests.models.loading import packed_state, same, save_tiny, tokenizer
from tests.models.test_foreign import step, write

SETTINGS = {"quant_method": "hqq", "skip_modules": ["lm_head"]}
PLACES = {
    4: (2, 4),
    2: (4, 6),
    1: (8, 7),
}  # parts of the rows that share a byte, and the first one's lowest bit
KINDS = {
    "4-1-float16": [],
    "3-0-float16": [],
    "2-1-bfloat16": ["slow"],
    "8-0-float32": ["slow"],
    "1-0-float32": ["slow"],
}


def letters(text: str) -> Tensor:
    return torch.tensor([ord(letter) for letter in text], dtype=torch.uint8)


def stored(codes: Tensor, bits: int) -> tuple[Tensor, str]:
    """Codes (rows, columns) in HQQ's bytes, and the packing's name."""
    rows, columns = codes.shape
    if bits == 8:
        return codes.to(torch.uint8), "8bit_u8"
    parts, first = (10, 27) if bits == 3 else PLACES[bits]
    height = -(-rows // parts)
    out = torch.zeros(height, columns, dtype=torch.int64)
    for row in range(rows):
        out[row % height] |= codes[row].long() << (first - bits * (row // height))
    if bits == 3:
        return out.int(), "3bit_32"
    return out.to(torch.uint8), f"{bits}bit_u8"


def hqq_writer(bits: int, axis: int, arithmetic: str, group: int = 32) -> Any:
    dtype = getattr(torch, arithmetic)

    def writer(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        matrix = weight.reshape(-1, group) if axis else weight.reshape(group, -1)
        low, high = matrix.amin(axis, keepdim=True), matrix.amax(axis, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).to(dtype)
        zero = (-low / scale.float()).to(dtype)
        codes = (matrix / scale.float() + zero.float()).round().clamp(0, 2**bits - 1)
        numbers, packing = stored(codes, bits)
        parts = {
            "W_q": numbers,
            "scale": scale,
            "zero": zero,
            "nbits": torch.tensor(bits, dtype=torch.int32),
            "group_size": torch.tensor(group, dtype=torch.int32),
            "axis": torch.tensor(axis, dtype=torch.int32),
            "shape": torch.tensor(weight.shape),
            "packing": letters(packing),
            "compute_dtype": letters(str(dtype)),
            "view_as_float": torch.tensor(0, dtype=torch.uint8),
            "quant_scale": torch.tensor(0, dtype=torch.uint8),
            "encoded_state_dict": torch.tensor(1),
        }
        return parts, ((codes.to(dtype) - zero) * scale).reshape(weight.shape)

    return writer


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[getattr(pytest.mark, m) for m in v]) for k, v in KINDS.items()]
)
def test_a_folder_of_hqq_is_used_as_it_was_saved(tmp_path: Path, kind: str) -> None:
    """Weights to the bit; loss and gradients those of a LoRA step over decoded weights; saved too."""
    bits, axis, arithmetic = kind.split("-")
    stands_for = write(tmp_path / "base", SETTINGS, hqq_writer(int(bits), int(axis), arithmetic))
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert layers.keys() == stands_for.keys() and len(layers) == 14
    for name, weight in stands_for.items():
        assert torch.equal(layers[name].dequantize(weight.dtype), weight), name
    ids = torch.tensor([[1, 5, 9]])
    assert model.generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape == (1, 6)
    model.save_pretrained(tmp_path / "ours")
    tokenizer().save_pretrained(tmp_path / "ours")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "ours")
    assert same(packed_state(again), packed_state(model))
    plain = save_tiny(tmp_path / "plain").float()
    for name, layer in layers.items():
        plain.get_submodule(name).weight.data = layer.dequantize(torch.float32)
    plain.save_pretrained(tmp_path / "plain")
    wide, _ = FastLanguageModel.from_pretrained(tmp_path / "plain", load_in_4bit=False, dtype=torch.float32)
    found, wanted = step(model), step(wide)
    assert found[0] == wanted[0] and len(wanted[1]) == 28
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("shape", [(64, 48), (7, 9), (5,)])
def test_blocks_across_a_tensor_are_rounded_by_columns(shape: tuple[int, ...]) -> None:
    """A merge packs again what was loaded, so that such formats round too; the last value fills up."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed = OffsetInteger(name="x", bits_of_codes=4, block=(1, 32), axis=0).quantize(x)
    flat = x.reshape(-1)
    columns = torch.cat([flat, flat[-1:].expand(-flat.numel() % 32)]).view(32, -1)
    low, high = columns.amin(0).clamp(max=0), columns.amax(0).clamp(min=0)
    scale = (high - low) / 15
    zero = -low / scale
    codes = (columns / scale + zero).round().clamp(0, 15)
    expected = ((codes - zero) * scale).reshape(-1)[: flat.numel()].view(shape)
    assert torch.equal(packed.dequantize(), expected)


@pytest.mark.parametrize("nbits", [8, 6, 5, 4, 3, 2, 1.58, 1])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_hqqs(nbits: float, axis: int, dtype: torch.dtype) -> None:
    """By its own layers, with groups, without, and with codes that are stored as floats."""
    core = pytest.importorskip("hqq.core.quantize")
    for group, as_float in ((64, False), (None, False), (64, nbits != 3)):
        linear = torch.nn.Linear(128, 192, bias=False)
        how = core.BaseQuantizeConfig(nbits=nbits, group_size=group, axis=axis, view_as_float=as_float)
        layer = core.HQQLinear(linear, how, compute_dtype=dtype, device="cpu", del_orig=False)
        parts = {k: torch.as_tensor(v) for k, v in layer.state_dict().items() if v is not None}
        ours = from_hqq(parts, "x", (192, 128), dtype).dequantize(dtype)
        found = peers.same_twice_or_skip("hqq", layer.dequantize, "a weight")
        assert torch.equal(found, ours), (group, as_float)


def test_what_does_not_fit_is_refused() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    parts, _ = hqq_writer(4, 1, "float16")("x", weight)
    one = torch.tensor(1)
    for changes, error, words in (
        ({"scale": parts["scale"][:5]}, BadCheckpoint, "scales holds 5 values instead of 128"),
        ({"W_q": parts["W_q"][:7]}, BadCheckpoint, "for 128 rows of 32"),
        ({"shape": torch.tensor([64, 32])}, BadCheckpoint, r"the layer is of \(64, 64\)"),
        ({"packing": letters("9bit")}, BadCheckpoint, "the packing is '9bit'"),
        ({"compute_dtype": letters("torch.int8")}, BadCheckpoint, "compute in 'torch.int8'"),
        ({"quant_zero": one}, Unsupported, "quantised themselves"),
        ({"group_size": torch.tensor(48)}, Unsupported, "over the ends of rows"),
    ):
        with pytest.raises(error, match=words):
            from_hqq({**parts, **changes}, "x", (64, 64), torch.float16)
    with pytest.raises(BadCheckpoint, match="'zero' is missing"):
        from_hqq({k: v for k, v in parts.items() if k != "zero"}, "x", (64, 64), torch.float16)
