"""Products of sorted pairs with each expert's matrix, both in E4M3: the definition, the kernel, the op."""

from __future__ import annotations

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.kernels.codec.quantize_float8 import quantize_rows
from fewbits.kernels.product.grouped_float8 import (
    LARGE,
    SMALL,
    GroupedRows,
    GroupedTile,
    grouped_float8,
    grouped_float8_ref,
    launch,
)

E4M3 = torch.float8_e4m3fn
SIZES = {"one has none": (3, 0, 70, 1), "all on one": (0, 0, 150), "few": (1, 2)}


def problem(
    sizes: tuple[int, ...], N: int, K: int, r: int, dtype: torch.dtype, device: str, *, turned: bool
) -> GroupedRows:
    """Rows that lie apart, of which pairs share some; matrices turned or not, a branch whose B is turned."""
    P, E, generator = sum(sizes), len(sizes), torch.Generator().manual_seed(N + K + r)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    wide = torch.zeros(P, K + 16, dtype=E4M3)
    q, scale = quantize_rows(random(P, K))
    wide[:, :K] = q
    w = random(E, N, K)
    w_scale = (w.abs().amax() / 448).view(1, 1)
    w8 = (w / w_scale).to(E4M3)
    if turned:  # (E, N, K) with an expert's columns behind those of another
        w8 = w8.view(torch.uint8).permute(1, 0, 2).contiguous().view(E4M3).transpose(0, 1)
    rows = torch.randint(0, max(P, 1), (P,), generator=generator)
    t = random(P, r + 3).to(dtype)[:, :r].to(device) if r else None
    b = random(E, r, N).to(dtype).to(device).transpose(1, 2) if r else None
    ends = torch.tensor(sizes).cumsum(0).int()
    on_device = (one.to(device) for one in (wide, scale, w8, w_scale, ends, rows))
    wide, scale, w8, w_scale, ends, rows = on_device
    return GroupedRows(wide[:, :K], scale, w8, w_scale, ends, rows, t, b, dtype)


@pytest.mark.parametrize(
    "tile", [GroupedTile(64, 64, 64, 4, 3), SMALL, LARGE], ids=["tiny", "small", "large"]
)
@pytest.mark.parametrize(
    ("sizes", "N", "K", "r", "turned"),
    [("one has none", 80, 64, 16, True), ("all on one", 144, 176, 5, False), ("few", 16, 16, 0, True)],
)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(
    sizes: str,
    N: int,
    K: int,
    r: int,
    turned: bool,
    tile: GroupedTile,
    kernel_device: str,
    poisoned_memory: None,
) -> None:
    """Sums of at most 176 terms and one rounding.

    A GPU's E4M3 sums keep some 14 bits, cut off at each product of 32 terms: 2**-13 of the largest sums
    each time.
    """
    if tile is LARGE and kernel_device == "cuda" and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("the large tile needs 144 KiB of shared memory")
    for dtype in (torch.float32, torch.float16):
        one = problem(SIZES[sizes], N, K, r, dtype, kernel_device, turned=turned)
        for rows in (None, one.rows):
            o = one._replace(rows=rows)
            need = grouped_float8_ref(o)
            y = torch.empty_like(need)
            launch(o, y, tile)
            eps = torch.finfo(dtype).eps
            cut_off = -(-K // 32) * 2**-13 if kernel_device == "cuda" else 1e-5
            atol = max(4 * eps, cut_off) * float(need.abs().max())
            torch.testing.assert_close(y, need, rtol=4 * eps, atol=atol)


def test_the_definition_is_a_product_by_pairs() -> None:
    o = problem(SIZES["one has none"], 32, 48, 4, torch.float32, "cpu", turned=True)
    assert o.rows is not None and o.t is not None and o.b is not None
    experts = torch.repeat_interleave(torch.arange(4), torch.tensor(SIZES["one has none"]))
    x, w = (o.q.float() * o.scale)[o.rows], (o.w.float() * o.w_scale)[experts]
    need = torch.einsum("pnk,pk->pn", w, x) + torch.einsum("pnr,pr->pn", o.b[experts], o.t)
    got = grouped_float8(
        o.q, o.scale, o.w, o.w_scale, o.ends, rows=o.rows, branch=(o.t, o.b), dtype=torch.float32
    )
    torch.testing.assert_close(got, need, rtol=1e-5, atol=1e-4)


def test_no_pairs_at_all() -> None:
    o = problem((0, 0), 32, 16, 4, torch.bfloat16, "cpu", turned=False)
    assert grouped_float8(o.q, o.scale, o.w, o.w_scale, o.ends).shape == (0, 32)


def test_shapes_that_do_not_fit_are_refused() -> None:
    o = problem((2, 3), 32, 48, 4, torch.float32, "cpu", turned=False)
    assert o.t is not None and o.b is not None
    fine = {"q": o.q, "scale": o.scale, "w": o.w, "w_scale": o.w_scale, "ends": o.ends, "dtype": o.dtype}
    wrongs = [
        {"w": o.w[:, :20]}, {"w": o.w.float()}, {"scale": o.scale[:2]}, {"ends": o.ends[:1]},
        {"branch": (o.t[:2], o.b)}, {"branch": (o.t.half(), o.b)}, {"branch": (o.t, o.b[:, :16])},
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(BadInput, match="grouped_float8 takes q"):
            grouped_float8(**{**fine, **wrong})


def test_opcheck() -> None:
    o = problem((2, 0, 3), 32, 16, 4, torch.float32, "cpu", turned=True)
    for one in (o, o._replace(rows=None, t=None, b=None)):  # other checks cannot compare 8-bit floats
        torch.library.opcheck(
            torch.ops.fewbits.grouped_float8.default, tuple(one), test_utils=("test_faketensor",)
        )
