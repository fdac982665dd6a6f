"""NF4 and FP4 against bitsandbytes on the CPU, bit for bit, and its saved layout.

Golden vectors first (make_golden.py says how they came about); beside the live library, codes and scales, and
what these say by plain arithmetic; its own decoding only where it agrees with them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fewbits.errors import BadCheckpoint, Unsupported
from fewbits.formats import FORMATS, FP4_VALUES, INT8, NF4_VALUES, Codebook
from fewbits.formats.bitsandbytes import from_bitsandbytes, swap_nibbles, to_bitsandbytes
from fewbits.formats.codebook import dynamic_map, quantize_dynamic
from tests import peers

try:
    import bitsandbytes.functional as bnb
except ImportError:
    bnb = None

live = pytest.mark.skipif(bnb is None, reason="needs bitsandbytes")
GOLDEN = load_file(Path(__file__).with_name("golden") / "bitsandbytes.safetensors")

SHAPES = [(64,), (192, 192), (33, 65), (7,), (5, 64), (3, 64, 130), (300, 1000)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def ours(kind: str, double: bool, block: int = 64) -> Codebook:
    format = FORMATS[kind + ("_dq" if double else "")]
    assert isinstance(format, Codebook)
    return dataclasses.replace(format, block=block)


def theirs(x: torch.Tensor, kind: str, double: bool, block: int = 64):
    return bnb.quantize_4bit(x, blocksize=block, quant_type=kind, compress_statistics=double)


def assert_same(x: torch.Tensor, kind: str, double: bool, block: int) -> None:
    codes, state = theirs(x, kind, double, block)
    packed = ours(kind, double, block).quantize(x)
    assert torch.equal(swap_nibbles(packed.codes).flatten(), codes.flatten())
    assert torch.equal(packed.scales.flatten(), state.absmax.flatten())
    if double:
        assert torch.equal(packed.parts["scale_scales"], state.state2.absmax)
        assert torch.equal(packed.parts["scale_offset"][0], state.offset)
    assert torch.equal(packed.dequantize(), peers.bitsandbytes_decoded(codes, state))


@pytest.mark.parametrize("case", sorted({key.rpartition(".")[0] for key in GOLDEN if key.count(".") > 1}))
def test_equals_golden_vectors(case: str) -> None:
    name, kind, block = case.split(".")
    golden = {key.removeprefix(f"{case}."): GOLDEN[key] for key in GOLDEN if key.startswith(f"{case}.")}
    packed = ours(kind.removesuffix("_dq"), kind.endswith("_dq"), int(block)).quantize(GOLDEN[f"{name}.x"])
    assert torch.equal(swap_nibbles(packed.codes).flatten(), golden["stored"])
    if kind.endswith("_dq"):
        assert torch.equal(packed.scales.flatten(), golden["scale_codes"])
        assert torch.equal(packed.parts["scale_scales"], golden["scale_scales"])
        assert torch.equal(packed.parts["scale_offset"], golden["offset"])
    else:
        assert torch.equal(packed.scales.flatten(), golden["absmax"])
    assert torch.equal(packed.dequantize(), golden["decoded"])


def test_golden_vectors_begin_as_by_hand() -> None:
    """One value worked out: the first of the first block of 64."""
    x, stored = GOLDEN["whole.x"], GOLDEN["whole.nf4.64.stored"]
    largest = max(abs(value) for value in x.flatten()[:64].tolist())
    nearest = min(range(16), key=lambda code: abs(x[0, 0].item() / largest - NF4_VALUES[code]))
    assert stored[0].item() >> 4 == nearest
    assert GOLDEN["whole.nf4.64.absmax"][0].item() == largest
    assert GOLDEN["whole.nf4.64.decoded"][0, 0].item() == pytest.approx(
        NF4_VALUES[nearest] * largest, rel=1e-7
    )


@live
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 128), (31, 96), (192, 192)], ids=str)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_equals_live_decoding(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    for double in (False, True):
        for block in (64, 128):
            x = torch.randn(shape).to(dtype)
            packed = ours(kind, double, block).quantize(x)
            assert torch.equal(packed.dequantize(), peers.live_bitsandbytes(*theirs(x, kind, double, block)))


@live
def test_a_peer_that_decodes_wrongly_is_no_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bitsandbytes does with AVX512-BF16: one wrong value is enough; a right peer is compared with."""
    codes, state = theirs(torch.randn(31, 96), "nf4", False, 128)
    right = peers.bitsandbytes_decoded(codes, state)
    wrong = right.clone()
    wrong[30, 95] += 1e-6
    monkeypatch.setattr(bnb, "dequantize_4bit", lambda *_: right)
    assert torch.equal(peers.live_bitsandbytes(codes, state), right)
    monkeypatch.setattr(bnb, "dequantize_4bit", lambda *_: wrong)
    with pytest.raises(pytest.skip.Exception, match=r"nf4 in blocks of 128.*, 1 of 2976 values differ"):
        peers.live_bitsandbytes(codes, state)


@live
def test_tables_are_the_same() -> None:
    assert torch.equal(torch.tensor(NF4_VALUES), bnb.get_4bit_type("nf4", "cpu"))
    assert torch.equal(torch.tensor(FP4_VALUES), bnb.get_4bit_type("fp4", "cpu"))
    assert torch.equal(torch.tensor(dynamic_map()), bnb.create_dynamic_map())


@live
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_bitsandbytes(kind: str, double: bool, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        for block in (32, 64, 128, 1024):
            assert_same(torch.randn(shape).to(dtype), kind, double, block)


@live
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_ties_and_neighbours_of_ties(kind: str) -> None:
    """Values on, just above and just below every threshold, in blocks whose scale is exactly 1."""
    table = bnb.get_4bit_type(kind, "cpu").sort().values
    edge = (table[:-1] + table[1:]) / 2
    values = torch.cat([edge, edge.nextafter(torch.tensor(2.0)), edge.nextafter(torch.tensor(-2.0)), table])
    x = torch.cat([torch.ones(1), values, torch.ones(2)])
    assert x.numel() == 64
    assert_same(x, kind, False, 64)


@live
def test_zero_blocks_and_zero_tails() -> None:
    x = torch.zeros(200)
    x[:64] = torch.randn(64)
    for kind in ("nf4", "fp4"):
        assert_same(x, kind, False, 64)
        assert_same(x, kind, True, 64)


@live
def test_dynamic_map_on_a_dense_line() -> None:
    """The 8-bit codes of scales, where bitsandbytes goes through a table of 65536 entries."""
    line = torch.cat([torch.linspace(-1, 1, 255 * 400), torch.linspace(-3e-4, 3e-4, 255 * 100)]).view(-1, 255)
    x = torch.cat([line, torch.ones(len(line), 1)], dim=1).flatten()
    codes, state = bnb.quantize_blockwise(x, blocksize=256)
    our_codes, our_scales = quantize_dynamic(x, 256)
    assert torch.equal(our_codes, codes)
    assert torch.equal(our_scales, state.absmax)


@live
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(64, 128), (31, 96), (12, 130)])
def test_saved_layout_both_ways(kind: str, double: bool, shape: tuple[int, int]) -> None:
    """Their saved tensors load here; ours equal theirs, and load there."""
    x = torch.randn(shape, dtype=torch.bfloat16)
    codes, state = theirs(x, kind, double)
    saved = {"weight": codes} | {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}
    packed = from_bitsandbytes(saved)
    direct = ours(kind, double).quantize(x)
    assert packed.format == direct.format
    assert packed.shape == shape
    assert packed.dtype == torch.bfloat16
    for name, part in direct.parts.items():
        assert torch.equal(packed.parts[name], part), name

    written = to_bitsandbytes(packed)
    assert written.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(written[name], tensor), name
    state_dict = {k.removeprefix("weight."): v for k, v in written.items() if k != "weight"}
    back = bnb.QuantState.from_dict(state_dict, torch.device("cpu"))
    assert torch.equal(peers.bitsandbytes_decoded(written["weight"], back), packed.dequantize())
    assert torch.equal(peers.live_bitsandbytes(written["weight"], back), packed.dequantize())


@live
def test_other_storage_type_and_other_8bit_map() -> None:
    x = torch.randn(64, 128)
    codes, state = theirs(x, "nf4", True)
    saved = {"weight": codes} | {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}
    saved["weight"] = codes.flatten().view(torch.bfloat16)[:, None]
    other = saved["weight.nested_quant_map"].clone()
    other[0] = -1.0
    saved["weight.nested_quant_map"] = other
    packed = from_bitsandbytes(saved)
    assert isinstance(packed.format, Codebook)
    assert packed.format.scale_table == tuple(other.tolist())
    state.state2.code[0] = -1.0
    assert torch.equal(packed.dequantize(), peers.bitsandbytes_decoded(codes, state))
    assert torch.equal(packed.dequantize(), peers.live_bitsandbytes(codes, state))


def test_damaged_states_are_refused() -> None:
    x = torch.randn(64, 128)
    saved = to_bitsandbytes(ours("nf4", True).quantize(x))
    with pytest.raises(BadCheckpoint, match="no bitsandbytes 4-bit state"):
        from_bitsandbytes({"weight": saved["weight"]})
    with pytest.raises(BadCheckpoint, match="damaged"):
        from_bitsandbytes({k: v for k, v in saved.items() if k != "weight.absmax"})
    with pytest.raises(BadCheckpoint, match="instead of"):
        from_bitsandbytes(saved | {"weight": saved["weight"][:-1]})
    with pytest.raises(BadCheckpoint, match="damaged"):
        from_bitsandbytes(saved | {"weight.quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)})
    with pytest.raises(Unsupported, match="table"):
        from_bitsandbytes(saved | {"weight.quant_map": torch.linspace(-1, 1, 16)})
    with pytest.raises(Unsupported, match="int8"):
        to_bitsandbytes(INT8.quantize(x))
    with pytest.raises(Unsupported, match="float64"):
        to_bitsandbytes(ours("nf4", False).quantize(x.double()))
