"""RMSNorm as a module; the op itself is tested in tests/kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fewbits.nn.norm import RMSNorm


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_is_its_formula_and_trains_the_weight_it_was_given(offset: float) -> None:
    weight = nn.Parameter(torch.randn(64))
    norm = RMSNorm(weight, 1e-6, offset)
    x = torch.randn(3, 5, 64)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (offset + weight)
    torch.testing.assert_close(norm(x), expected)
    norm(x).sum().backward()
    assert norm.weight is weight
    assert weight.grad is not None
    assert ("offset=1.0" in repr(norm)) == (offset == 1.0)
