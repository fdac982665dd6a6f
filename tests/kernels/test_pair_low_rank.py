"""What adapters add to pairs' rows: the definition, the kernel, the op."""

from __future__ import annotations

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.kernels.product.pair_low_rank import (
    LowRankPairs,
    launch,
    pair_low_rank,
    pair_low_rank_ref,
)

SIZES = {"one has none": (3, 0, 70, 1), "all on one": (0, 0, 90), "few": (1, 2)}


def problem(sizes: tuple[int, ...], r: int, N: int, dtype: torch.dtype, device: str) -> LowRankPairs:
    """Rows that lie apart."""
    P, generator = sum(sizes), torch.Generator().manual_seed(r + N)

    def apart(columns: int) -> torch.Tensor:
        wide = torch.randn(P, columns + 8, generator=generator).to(device, dtype)
        wide[:, columns:] = torch.nan
        return wide[:, :columns]

    ends = torch.tensor(sizes, device=device).cumsum(0).int()
    a = torch.randn(len(sizes), r, N, generator=generator).to(device)
    return LowRankPairs(apart(N), apart(r), a, ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter's products
@pytest.mark.parametrize(
    ("sizes", "r", "N"), [("one has none", 16, 32), ("all on one", 5, 144), ("few", 72, 16)]
)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(
    sizes: str, r: int, N: int, dtype: torch.dtype, kernel_device: str
) -> None:
    """Sums of r terms in float32 in another order, then one rounding, which may fall to either side."""
    one = problem(SIZES[sizes], r, N, dtype, kernel_device)
    y, need = one._replace(y=one.y.clone()), one._replace(y=one.y.clone())
    launch(y)
    pair_low_rank_ref(need)
    eps = torch.finfo(dtype).eps
    sums = r * torch.finfo(torch.float32).eps * float(one.t.abs().max() * one.a.abs().max())
    torch.testing.assert_close(y.y, need.y, rtol=eps, atol=2 * sums)


def test_rows_between_others_stay_and_autograd_says_the_same() -> None:
    one = problem(SIZES["one has none"], 4, 6, torch.float64, "cpu")
    experts = torch.repeat_interleave(torch.arange(4), torch.tensor(SIZES["one has none"]))
    need = one.y + torch.einsum("pr,prn->pn", one.t, one.a[experts].double())
    torch.testing.assert_close(pair_low_rank(*one), need)
    assert one.y._base is not None and one.y._base[:, 6:].isnan().all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    y, t, a, ends = problem((2, 3), 4, 8, torch.float32, "cpu")
    for wrong in (
        (y, t[:3], a, ends),
        (y, t.double(), a, ends),
        (y, t, a[:1], ends),
        (y, t, a[..., 1:], ends),
    ):
        with pytest.raises(BadInput, match="pair_low_rank takes"):
            pair_low_rank(*wrong)


def test_opcheck() -> None:
    y, t, a, ends = problem((2, 0, 3), 4, 8, torch.float32, "cpu")
    torch.library.opcheck(torch.ops.fewbits.pair_low_rank.default, (y.contiguous(), t.contiguous(), a, ends))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    one = problem((700, 0, 1, 1300), 16, 2048, dtype, "cuda")
    need = one._replace(y=one.y.clone())
    pair_low_rank(*one)
    pair_low_rank_ref(need)
    # bfloat16: one rounding of the same sum on either side
    assert (one.y - need.y).abs().max() / need.y.abs().max() < {torch.float32: 1e-5}.get(dtype, 2**-8)
