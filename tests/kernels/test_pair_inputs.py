"""Rows of pairs with an adapter's inner values beside them: the definition, the kernel, the op."""

from __future__ import annotations

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.kernels.product.pair_inputs import (
    COMPILE_CASES,
    PairInputs,
    columns_at_once,
    launch,
    pair_inner,
    pair_inputs,
    pair_inputs_ref,
)

SIZES = {"one has none": (3, 0, 70, 1), "all on one": (0, 0, 90), "few": (1, 2)}


def problem(sizes: tuple[int, ...], r: int, K: int, dtype: torch.dtype, device: str, room: int) -> PairInputs:
    """Rows that lie apart, of which pairs share some."""
    P, generator = sum(sizes), torch.Generator().manual_seed(r + K)
    wide = torch.randn(P, K + 8, generator=generator).to(dtype).to(device)
    wide[:, K:] = torch.nan
    a = torch.randn(len(sizes), r, K, generator=generator, dtype=torch.float32).to(device)
    rows = torch.randint(0, P, (P,), generator=generator).to(device)
    ends = torch.tensor(sizes, device=device).cumsum(0).int()
    return PairInputs(wide[:, :K], a, ends, rows, 0.5, room, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter's products
@pytest.mark.parametrize(
    ("sizes", "r", "K", "room"),
    [("one has none", 16, 32, 16), ("all on one", 5, 144, 8), ("few", 72, 16, 72)],
)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(
    sizes: str, r: int, K: int, room: int, dtype: torch.dtype, kernel_device: str, poisoned_memory: None
) -> None:
    """Sums of at most 144 terms in float32, and one rounding; rows are copied as they are."""
    pairs = problem(SIZES[sizes], r, K, dtype, kernel_device, room)
    for rows in (None, pairs.rows):
        for a in (pairs.a, pairs.a.to(dtype)):
            one = pairs._replace(rows=rows, a=a)
            wide, inner = (torch.empty_like(t) for t in pair_inputs_ref(*one))
            launch(one, wide, inner)
            need_wide, need_inner = pair_inputs_ref(*one)
            assert torch.equal(wide[:, :K], need_wide[:, :K]) and torch.equal(wide[:, K : K + r], inner)
            assert not wide[:, K + r :].any()
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(inner, need_inner, rtol=4 * eps, atol=max(8 * eps, 1e-5))
            alone = one._replace(alone=True, room=0)
            again = torch.empty_like(inner)
            launch(alone, inner.new_empty(len(inner), 0), again)
            assert torch.equal(again, inner)


def test_one_product_with_both_matrices_side_by_side() -> None:
    pairs = problem(SIZES["one has none"], 4, 6, torch.float64, "cpu", 8)
    w, b = torch.randn(4, 5, 6, dtype=torch.float64), torch.randn(4, 5, 4, dtype=torch.float64)
    wide, inner = pair_inputs(pairs.x, pairs.a, pairs.ends, rows=pairs.rows, scaling=0.5, room=8)
    beside = torch.cat([w, b, torch.randn(4, 5, 4, dtype=torch.float64)], 2)
    experts = torch.repeat_interleave(torch.arange(4), torch.tensor(SIZES["one has none"]))
    whole = (w + 0.5 * b @ pairs.a.double())[experts]
    need = torch.einsum("pnk,pk->pn", whole, pairs.x[pairs.rows])
    torch.testing.assert_close(torch.einsum("pnk,pk->pn", beside[experts], wide), need)
    assert inner.shape == (74, 4)


def test_shapes_that_do_not_fit_are_refused() -> None:
    pairs = problem((2, 3), 4, 8, torch.float32, "cpu", 8)
    for wrong in ({"room": 2}, {"a": pairs.a[:1]}, {"a": pairs.a[:, :, :4]}):
        given = {"x": pairs.x, "a": pairs.a, "ends": pairs.ends, "room": 8} | wrong
        with pytest.raises(BadInput, match="pair_inputs takes x"):
            pair_inputs(**given)
    with pytest.raises(BadInput, match="pair_inner takes x"):
        pair_inner(pairs.x, pairs.a[:1], pairs.ends)


def test_inner_values_alone_are_those_beside_the_rows() -> None:
    pairs = problem(SIZES["one has none"], 5, 16, torch.float32, "cpu", 8)
    for rows in (None, pairs.rows):
        _, inner = pair_inputs(pairs.x, pairs.a, pairs.ends, rows=rows, scaling=0.5, room=8)
        assert torch.equal(pair_inner(pairs.x, pairs.a, pairs.ends, rows=rows, scaling=0.5), inner)


def test_opcheck() -> None:
    pairs = problem((2, 0, 3), 4, 8, torch.float32, "cpu", 8)
    torch.library.opcheck(torch.ops.fewbits.pair_inputs.default, tuple(pairs))
    torch.library.opcheck(torch.ops.fewbits.pair_inputs.default, (*pairs[:3], None, 1.0, 8, False))
    torch.library.opcheck(torch.ops.fewbits.pair_inputs.default, (*pairs[:4], 1.0, 0, True))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [32, 64, 128, 256])
def test_any_number_of_inner_values_fits_into_the_smallest_shared_memory(ranks: int) -> None:
    pytest.importorskip("triton")
    from tests.kernels.machine_code import build

    of_ranks = [c for c in COMPILE_CASES if c.constants["BLOCK_R"] == ranks and c.constants["EVEN_K"]]
    assert {c.constants["BLOCK_K"] for c in of_ranks} == {columns_at_once(ranks)}
    assert all(build(case, 89).metadata.shared <= 99 * 1024 for case in of_ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("r", [16, 32, 200])
def test_on_a_gpu(dtype: torch.dtype, r: int) -> None:
    pairs = problem((700, 0, 1, 1300), r, 2048, dtype, "cuda", r + 8)
    named = {"rows": pairs.rows, "scaling": 0.5, "room": r + 8}
    wide, inner = pair_inputs(*pairs[:3], **named)
    need_wide, need = pair_inputs_ref(*pairs)
    assert torch.equal(wide[:, :2048], need_wide[:, :2048]) and not wide[:, 2048 + r :].any()
    assert torch.equal(wide[:, 2048 : 2048 + r], inner)
    assert (inner - need).abs().max() / need.abs().max() < {torch.float32: 1e-5}.get(dtype, 8e-3)
    assert torch.equal(inner, pair_inputs(*pairs[:3], **named)[1])
