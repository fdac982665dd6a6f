"""Sums of pairs' rows for each token: the definition, the kernel, the op."""

from __future__ import annotations

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.kernels.product.pair_sums import PairRows, launch, pair_sums, pair_sums_ref

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def problem(T: int, k: int, H: int, dtype: torch.dtype, device: str, apart: int = 0) -> PairRows:
    """Rows that lie ``apart`` columns apart, each pair of exactly one token, and weights of either sign."""
    generator = torch.Generator().manual_seed(T + 7 * k + 31 * H)
    wide = torch.randn(2, T * k, H + apart, generator=generator).to(dtype).to(device)
    wide[..., H:] = torch.nan
    x, extra = wide[..., :H]
    index = torch.randperm(T * k, generator=generator).view(T, k).to(device)
    weights = torch.randn(T, k, generator=generator).to(device)
    return PairRows(x, index, weights, extra)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("T", "k", "H", "apart"), [(5, 2, 64, 0), (3, 8, 48, 16), (2, 1, 1100, 4), (4, 3, 7, 0)]
)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(
    T: int, k: int, H: int, apart: int, dtype: torch.dtype, kernel_device: str, poisoned_memory: None
) -> None:
    rows = problem(T, k, H, dtype, kernel_device, apart)
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2.0**-7}[dtype]
    for weights in (None, rows.weights, rows.weights.to(dtype)):
        for extra in (None, rows.extra):
            y = torch.empty(T, H, dtype=dtype, device=kernel_device)
            launch(PairRows(rows.x, rows.pairs, weights, extra), y)
            need = pair_sums_ref(rows.x, rows.pairs, weights, extra)
            torch.testing.assert_close(y, need, rtol=tolerance, atol=4 * tolerance)


def test_one_rounding_of_the_sum_that_adapters_and_weights_are_in() -> None:
    rows = problem(6, 3, 16, torch.bfloat16, "cpu")
    y = pair_sums(rows.x, rows.pairs, rows.weights, extra=rows.extra)
    exact = ((rows.x.double() + rows.extra.double())[rows.pairs] * rows.weights.double()[..., None]).sum(1)
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).abs().max() <= exact.abs().max() * 2.0**-8
    double = pair_sums(rows.x.double(), rows.pairs, rows.weights.double(), extra=rows.extra.double())
    torch.testing.assert_close(double, exact)
    assert pair_sums(rows.x[:0], rows.pairs[:0]).shape == (0, 16)
    assert torch.equal(pair_sums(rows.x, rows.pairs[:, :0]), torch.zeros(6, 16, dtype=torch.bfloat16))


def test_shapes_that_do_not_fit_are_refused() -> None:
    rows = problem(6, 3, 16, torch.float32, "cpu")
    for wrong in (
        {"index": rows.pairs.flatten()},
        {"weights": rows.weights[:, :2]},
        {"extra": rows.extra[:, :8]},
        {"extra": rows.extra.double()},
    ):
        index = wrong.pop("index", rows.pairs)
        with pytest.raises(BadInput, match="pair_sums takes x"):
            pair_sums(rows.x, index, **wrong)


def test_opcheck() -> None:
    rows = problem(4, 2, 8, torch.float32, "cpu")
    torch.library.opcheck(torch.ops.fewbits.pair_sums.default, tuple(rows))
    torch.library.opcheck(torch.ops.fewbits.pair_sums.default, (rows.x, rows.pairs, None, None))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    rows = problem(300, 8, 2048, dtype, "cuda", 16)
    for weights, extra in ((None, None), (rows.weights, None), (rows.weights, rows.extra)):
        y = pair_sums(rows.x, rows.pairs, weights, extra=extra)
        need = pair_sums_ref(
            *(
                None if t is None else t.double() if t.is_floating_point() else t
                for t in (rows.x, rows.pairs, weights, extra)
            )
        )
        error = (y.double() - need).abs().max() / need.abs().max()
        assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        assert torch.equal(y, pair_sums(rows.x, rows.pairs, weights, extra=extra))
