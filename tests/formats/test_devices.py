"""Every device gives the same codes, scales and decoded values, bit for bit."""

from __future__ import annotations

import pytest
import torch

from fewbits.formats import FORMATS, GGUF_TYPES, Format
from fewbits.formats.gguf_layouts import LAYOUTS
from fewbits.formats.k_quants import Fields
from fewbits.formats.rounding import first_of_largest, random_words, sum_in_order


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
def test_cuda_equals_cpu(format: Format, seed: int | None) -> None:
    for shape in ((256, 512), (7, 130), (2, 3, 65), (1100, 1024)):
        x = torch.randn(shape)
        x.view(-1)[5] = torch.nan
        here, there = format.quantize(x, seed=seed), format.quantize(x.cuda(), seed=seed)
        # with two levels of scales the mean of the scales is summed in another order
        for name in list(here.parts) if format.contract.exact_scale else ["codes"]:
            a, b = here.parts[name], there.parts[name].cpu()
            if name == "scales" and a.dtype == torch.float32:  # the bits of a NaN are the device's own
                a, b = a.nan_to_num(-1.0), b.nan_to_num(-1.0)
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
        decoded = here.to("cuda").dequantize().cpu()
        assert torch.equal(decoded.nan_to_num(9.0), here.dequantize().nan_to_num(9.0))


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7FA00000, -0x400000, -1])
@pytest.mark.parametrize("name", GGUF_TYPES)
def test_the_bits_of_a_nan_do_not_reach_the_file(
    name: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GGUF's scales lie among the codes: another device's NaN in their place, and the same bytes."""
    format = FORMATS[name]
    kind = format.contract.names["gguf"]
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(0))
    x[0, 5] = torch.nan
    usual, pack = format.quantize(x), LAYOUTS[kind].pack
    other = torch.tensor(bits, dtype=torch.int32).view(torch.float32)

    def packed_there(fields: Fields) -> torch.Tensor:
        fields.d = torch.where(fields.d.isnan(), other, fields.d)
        assert bool(fields.d.isnan().any())
        return pack(fields)

    monkeypatch.setitem(LAYOUTS, kind, LAYOUTS[kind]._replace(pack=packed_there))
    assert torch.equal(format.quantize(x).codes, usual.codes)
    assert bool(usual.dequantize().isnan().any())


@pytest.mark.gpu
def test_random_words_are_the_same() -> None:
    assert torch.equal(random_words(100_003, 5, "cuda", offset=17).cpu(), random_words(100_003, 5, offset=17))


def test_sums_are_taken_in_one_order() -> None:
    """Halves are added: with numbers that round, another order gives other sums."""
    x = torch.tensor([[1e8, 1.0, -1e8, 3.0, 0.25]])
    assert sum_in_order(x, (-1,)).tolist() == [[(1e8 - 1e8) + (1.0 + 3.0) + 0.25]]
    whole = torch.randint(-50, 50, (3, 7, 1, 12)).float()
    assert torch.equal(sum_in_order(whole, (1, 3)), whole.sum((1, 3), keepdim=True))
    assert sum_in_order(torch.ones(2, 0), (1,)).tolist() == [[0.0], [0.0]]


def test_the_first_of_equal_magnitudes_is_taken() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, 0.0, 1.0]])
    assert first_of_largest(x).tolist() == [[1], [0], [3]]
