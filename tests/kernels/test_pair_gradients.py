"""Gradients of pairs' inner values and weights: the definition, the kernel, the op."""

from __future__ import annotations

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.kernels.product.pair_gradients import (
    WeightedPairs,
    launch,
    pair_gradients,
    pair_gradients_ref,
)

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def problem(P: int, I: int, dtype: torch.dtype, device: str, apart: int = 0) -> WeightedPairs:
    generator = torch.Generator().manual_seed(P + 7 * I)
    wide = torch.randn(3, P, I + apart, generator=generator).to(dtype).to(device)
    wide[..., I:] = torch.nan
    z, u, extra = wide[..., :I]
    return WeightedPairs(z, u, torch.randn(P, generator=generator).to(device), extra)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("P", "I", "apart"), [(5, 64, 0), (7, 48, 16), (2, 2100, 4), (3, 4096, 0), (4, 5, 3)]
)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(
    P: int, I: int, apart: int, dtype: torch.dtype, kernel_device: str, poisoned_memory: None
) -> None:
    pairs = problem(P, I, dtype, kernel_device, apart)
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2.0**-7}[dtype]
    for weights in (pairs.weights, pairs.weights.to(dtype)):
        for extra in (None, pairs.extra):
            dz = torch.empty(P, I, dtype=dtype, device=kernel_device)
            dweights = torch.empty(P, device=kernel_device)
            launch(WeightedPairs(pairs.z, pairs.u, weights, extra), dz, dweights)
            need_dz, need_dweights = pair_gradients_ref(pairs.z, pairs.u, weights, extra)
            torch.testing.assert_close(dz, need_dz, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(dweights, need_dweights, rtol=1e-4, atol=1e-3)


def test_they_are_autograds() -> None:
    """Of y = c <z, u + extra>, row by row, in float64."""
    pairs = WeightedPairs(*(t.double() for t in problem(6, 16, torch.float32, "cpu")))
    z, weights = (t.clone().requires_grad_() for t in (pairs.z, pairs.weights))
    y = (weights * (z * (pairs.u + pairs.extra)).sum(1)).sum()
    for ours, theirs in zip(
        pair_gradients(*pairs[:3], extra=pairs.extra), torch.autograd.grad(y, (z, weights)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_no_pairs_and_shapes_that_do_not_fit() -> None:
    pairs = problem(6, 16, torch.bfloat16, "cpu")
    dz, dweights = pair_gradients(pairs.z[:0], pairs.u[:0], pairs.weights[:0])
    assert dz.shape == (0, 16) and dweights.shape == (0,) and dweights.dtype == torch.float32
    for wrong in (
        (pairs.u[:3], pairs.weights),
        (pairs.u, pairs.weights[:3]),
        (pairs.u.float(), pairs.weights),
    ):
        with pytest.raises(BadInput, match="pair_gradients takes z"):
            pair_gradients(pairs.z, *wrong)


def test_opcheck() -> None:
    pairs = problem(4, 8, torch.float32, "cpu")
    torch.library.opcheck(torch.ops.fewbits.pair_gradients.default, tuple(pairs))
    torch.library.opcheck(torch.ops.fewbits.pair_gradients.default, (*pairs[:3], None))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    pairs = problem(3000, 768, dtype, "cuda", 16)
    dz, dweights = pair_gradients(*pairs[:3], extra=pairs.extra)
    need_dz, need_dweights = pair_gradients_ref(*(t.double() for t in pairs))
    assert (dz.double() - need_dz).abs().max() / need_dz.abs().max() < 8e-3
    assert (dweights.double() - need_dweights).abs().max() / need_dweights.abs().max() < 1e-5
