"""The Triton path of prepared stochastic operands: streams as one INT8 product equal the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.kernels.stochastic import thermometer
from fewbits.kernels.stochastic.codes import stochastic_codes_ref

CASES = {
    "halve": (replace(STOCHASTIC, chunk_d=40), (128,), 70),
    "full": (Stochastic(chunk_d=32), (256,), 50),
    "whole": (Stochastic(halve_bipolar_stoc_len=True), (77,), 37),
    "rows": (replace(STOCHASTIC, chunk_d=40), (20, 0, 9), 91),
}


@pytest.mark.gpu
@pytest.mark.interpret
@pytest.mark.parametrize("name", CASES)
def test_streams_as_a_product(kernel_device: str, name: str) -> None:
    options, levels, D = CASES[name]
    a, b = torch.randn(2, 3, D, device=kernel_device), torch.randn(1, 18, D, device=kernel_device)
    a[0, 0] = b[0, 0] = 1.0
    operands = [part for x in (a, b) for part in options.quantize(x).parts.values()]
    index = None
    if len(levels) > 1:
        shape = (2, 3, operands[1].shape[2])
        index = torch.randint(0, len(levels), shape, dtype=torch.uint8, device=kernel_device)
    chunk = min(options.chunk_d or D, D)
    tables = thermometer.tables_of(options, levels, chunk, a.device)
    assert tables is not None
    y = torch.full((2, 3, 18), torch.nan, device=kernel_device)
    thermometer.launch(operands, tables, index, chunk, y)
    assert torch.equal(y, stochastic_codes_ref(*operands, options, levels, index))  # type: ignore[call-arg]
