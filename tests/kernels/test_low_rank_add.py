"""low_rank_add_: the definition against plain products, the kernel against the definition, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.decoder.gated_activation_triton import LowRank
from fewbits.kernels.decoder.low_rank_add import launch, low_rank_add_, low_rank_add_ref


def operands(
    M: int, N: int, r: int, dtype: torch.dtype, device: str = "cpu", *, transposed: bool = False
) -> tuple[Tensor, LowRank, Tensor]:
    """z in rows that lie apart with poison between them, a branch whose x is a slice, a residual."""
    z = torch.full((M, N + 7), float("nan"), device=device, dtype=dtype)[:, :N]
    z.copy_(torch.randn(M, N))
    x = torch.randn(M, r + 3, device=device).to(dtype)[:, 1 : r + 1]
    w = (
        torch.randn(r, N, device=device).to(dtype).t()
        if transposed
        else torch.randn(N, r, device=device).to(dtype)
    )
    return z, LowRank(x, w), torch.randn(M, N, device=device).to(dtype)


def sum_of_sizes(z: Tensor, branch: LowRank | None, residual: Tensor | None) -> Tensor:
    terms = z.abs() if residual is None else z.abs() + residual.abs()
    return terms if branch is None else terms + branch.x.abs() @ branch.w.abs().t()


def check(M: int, N: int, r: int, dtype: torch.dtype, device: str, transposed: bool) -> None:
    z, branch, residual = operands(M, N, r, dtype, device, transposed=transposed)
    for b, res in ((branch, residual), (branch, None), (None, residual)):
        want, got = low_rank_add_ref(z, b, res), z.clone(memory_format=torch.preserve_format)
        launch(got, b, res)
        if dtype == torch.float32:  # sums of r products in two orders, each off by r + 2 roundings at most
            terms = sum_of_sizes(z, b, res)
            assert ((got - want).abs() <= 2 * (r + 2) * 2.0**-24 * terms).all()
        else:
            one_rounding = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
            torch.testing.assert_close(got.float(), want.float(), rtol=one_rounding, atol=one_rounding)


def test_definition() -> None:
    z, branch, residual = operands(5, 9, 3, torch.float64)
    want = z + branch.x @ branch.w.t() + residual
    assert low_rank_add_(z, branch, residual) is z
    torch.testing.assert_close(z, want)


@pytest.mark.interpret
@pytest.mark.parametrize(("M", "N", "r"), [(32, 128, 16), (37, 70, 5), (1, 3, 1), (130, 40, 33)])
@pytest.mark.parametrize("transposed", [False, True])
def test_kernel(M: int, N: int, r: int, transposed: bool, kernel_device: str) -> None:
    check(M, N, r, torch.float32, kernel_device, transposed)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "N", "r"), [(8192, 4096, 16), (8192, 4096, 48), (777, 1000, 7), (300, 129, 128)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_on_gpu(M: int, N: int, r: int, dtype: torch.dtype) -> None:
    for transposed in (False, True):
        check(M, N, r, dtype, "cuda", transposed)


def test_what_does_not_fit_is_refused() -> None:
    z, branch, residual = operands(5, 9, 3, torch.float32)
    with pytest.raises(BadInput, match="contiguous rows"):
        low_rank_add_(z, branch, residual[:, :8])
    with pytest.raises(BadInput, match="low-rank branch"):
        low_rank_add_(z, LowRank(branch.x, branch.w[:4]), residual)
    with pytest.raises(Unsupported, match="rank 128"):
        low_rank_add_(z, LowRank(torch.randn(5, 129), torch.randn(9, 129)), residual)
