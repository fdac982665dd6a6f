"""Sums of outer products over each expert's pairs: the definition, the kernel, the op."""

from __future__ import annotations

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.kernels.product.pair_outer import OuterPairs, launch, pair_outer, pair_outer_ref

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SIZES = {"one has none": (3, 0, 70, 1), "all on one": (0, 0, 90), "few": (1, 2)}


def problem(sizes: tuple[int, ...], r: int, N: int, dtype: torch.dtype, device: str) -> OuterPairs:
    """Rows that lie apart, of which pairs share some, and weights of either sign."""
    P, generator = sum(sizes), torch.Generator().manual_seed(r + N)

    def apart(rows: int, columns: int) -> torch.Tensor:
        wide = torch.randn(rows, columns + 8, generator=generator).to(dtype).to(device)
        wide[:, columns:] = torch.nan
        return wide[:, :columns]

    ends = torch.tensor(sizes, device=device).cumsum(0).int()
    rows = torch.randint(0, P, (P,), generator=generator).to(device)
    weights = torch.randn(P, generator=generator).to(device)
    return OuterPairs(apart(P, r), apart(P, N), ends, rows, weights, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter's products
@pytest.mark.parametrize(
    ("sizes", "r", "N"), [("one has none", 16, 32), ("all on one", 5, 144), ("few", 72, 16)]
)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(
    sizes: str, r: int, N: int, dtype: torch.dtype, kernel_device: str, poisoned_memory: None
) -> None:
    """Sums of at most 90 terms in float32; t is rounded in both, and may fall to either side of a tie."""
    pairs = problem(SIZES[sizes], r, N, dtype, kernel_device)
    for rows, weights in ((None, None), (pairs.rows, None), (pairs.rows, pairs.weights.to(dtype))):
        one = pairs._replace(rows=rows, weights=weights)
        y = torch.empty(len(pairs.ends), r, N, dtype=torch.float32, device=kernel_device)
        launch(one, y)
        eps = torch.finfo(dtype).eps if weights is not None else 1e-6
        torch.testing.assert_close(y, pair_outer_ref(*one), rtol=1e-5, atol=max(8 * eps, 2e-5))


def test_the_gradient_of_matrices_between_sorted_rows() -> None:
    """Autograd gives the same of each expert's product."""
    pairs = problem(SIZES["one has none"], 4, 6, torch.float64, "cpu")
    a = torch.randn(4, 4, 6, dtype=torch.float64, requires_grad=True)
    experts = torch.repeat_interleave(torch.arange(4), torch.tensor(SIZES["one has none"]))
    out = torch.einsum("prn,pn->pr", a[experts], pairs.x[pairs.rows])
    (out * pairs.t * 0.5 * pairs.weights.double()[:, None]).sum().backward()
    y = pair_outer(*pairs[:3], rows=pairs.rows, weights=pairs.weights, scaling=0.5)
    torch.testing.assert_close(y, a.grad)
    assert not pair_outer(pairs.t[:0], pairs.x[:0], torch.zeros(4, dtype=torch.int32)).any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    pairs = problem((2, 3), 4, 8, torch.float32, "cpu")
    for wrong in ({"rows": pairs.rows[:3]}, {"weights": pairs.weights[:3]}, {"x": pairs.x.double()}):
        x = wrong.pop("x", pairs.x)
        with pytest.raises(BadInput, match="pair_outer takes t"):
            pair_outer(pairs.t, x, pairs.ends, **wrong)


def test_opcheck() -> None:
    pairs = problem((2, 0, 3), 4, 8, torch.float32, "cpu")
    torch.library.opcheck(torch.ops.fewbits.pair_outer.default, tuple(pairs))
    torch.library.opcheck(torch.ops.fewbits.pair_outer.default, (*pairs[:3], None, None, 1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    pairs = problem((700, 0, 1, 1300), 32, 2048, dtype, "cuda")
    args, named = pairs[:3], {"rows": pairs.rows, "weights": pairs.weights, "scaling": 0.5}
    y, need = pair_outer(*args, **named), pair_outer_ref(*pairs)
    assert (y - need).abs().max() / need.abs().max() < {torch.float32: 1e-5}.get(dtype, 2e-3)
    assert torch.equal(y, pair_outer(*args, **named))
