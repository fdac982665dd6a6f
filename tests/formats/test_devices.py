"""Every device gives the same codes, scales and decoded values, bit for bit."""

from __future__ import annotations

import pytest
import torch

from fewbits.formats import FORMATS, Format
from fewbits.formats.rounding import random_words


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


@pytest.mark.gpu
def test_random_words_are_the_same() -> None:
    assert torch.equal(random_words(100_003, 5, "cuda", offset=17).cpu(), random_words(100_003, 5, offset=17))
