"""The thin products of LoRA: definitions against autograd; kernels over slices, ranks, strides; ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.product import lora_reduce as module
from fewbits.kernels.product.lora_reduce import (
    lora_gradients,
    lora_reduce,
    lora_reduce_ref,
)
from fewbits.kernels.product.lora_reduce_triton import (
    ReduceSlice,
    ReduceTile,
    launch_reduce,
    splits_of,
)

HALF_UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape).to(dtype).to(device)


def close(out: Tensor, want: Tensor, terms: int) -> None:
    """Each side rounds once, after a sum of products of normal values in another order."""
    unit = HALF_UNIT[out.dtype]
    torch.testing.assert_close(out, want, rtol=2 * unit + 2.0**-20, atol=2.0**-18 * terms**0.5 + 1e-6)


def made(
    M: int,
    widths: tuple[int, ...],
    ranks: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    start: int = 0,
) -> tuple[Tensor, Tensor, list[ReduceSlice]]:
    """dy and xa with rows apart, and slices with a gap before the first."""
    dy = randn(M, start + sum(widths) + 8, dtype=dtype, device=device)
    xa = randn(M, sum(ranks) + 8, dtype=dtype, device=device)[:, : sum(ranks)]
    slices = []
    for N, r in zip(widths, ranks, strict=True):
        slices.append(ReduceSlice(start, randn(N, r, dtype=dtype, device=device), 0.5 + len(slices)))
        start += N
    return dy, xa, slices


# The definition.


def test_gradients_equal_autograd() -> None:
    """Of y_i = s_i (x A_i^T) B_i^T, in float64."""
    M, K, widths, ranks = 9, 12, (8, 4, 5), (3, 2, 3)
    dy, _, slices = made(M, widths, ranks, torch.float64, start=2)
    x = randn(M, K, dtype=torch.float64).requires_grad_()
    a = [randn(r, K, dtype=torch.float64).requires_grad_() for r in ranks]
    bs = [s.b.requires_grad_() for s in slices]
    xa = [s.scaling * (x @ a_i.t()) for s, a_i in zip(slices, a, strict=True)]
    loss = sum(
        (dy[:, s.start : s.start + s.b.shape[0]] * (h @ s.b.t())).sum()
        for s, h in zip(slices, xa, strict=True)
    )
    need = torch.autograd.grad(loss, [x, *a, *bs])
    with torch.no_grad():
        beside = torch.full((M, 20), torch.nan, dtype=torch.float64)
        t, da, dbs = lora_gradients(dy, x, torch.cat(xa, 1), slices, out=beside[:, 4:12])
        assert t.data_ptr() == beside[:, 4:].data_ptr() and beside[:, 12:].isnan().all()
        torch.testing.assert_close(t @ torch.cat(a), need[0])
        torch.testing.assert_close(da, torch.cat(need[1:4]))
        for db, want in zip(dbs, need[4:], strict=True):
            torch.testing.assert_close(db, want)
        assert lora_gradients(dy, None, torch.cat(xa, 1), slices).da is None


def test_what_does_not_fit_is_refused() -> None:
    dy, xa, slices = made(6, (8,), (3,))
    with pytest.raises(BadInput, match="8 or more"):
        lora_reduce(dy[:, :7], xa, slices)
    with pytest.raises(BadInput, match=r"xa and out \(M, 3\)"):
        lora_reduce(dy, xa[:, :2], slices)


def test_products_equal_the_definition() -> None:
    """What runs where the kernel is not the faster way."""
    dy, xa, slices = made(7, (8, 4), (3, 2))
    t = torch.full((7, 5), torch.nan)
    need_t, need_dbs = lora_reduce_ref(dy, xa, slices)
    dbs = [torch.full_like(s.b, torch.nan) for s in slices]
    module.thin_products(dy, xa, t, dbs, slices)
    for out, want in zip((t, *dbs), (need_t, *need_dbs), strict=True):
        close(out, want, 8)


def test_ops() -> None:
    dy, xa, slices = made(6, (8, 5), (3, 2))
    t = torch.zeros(6, 5)
    torch.library.opcheck(
        module._lora_reduce,
        (dy, xa, t, [torch.zeros_like(s.b) for s in slices], [s.b for s in slices], [0, 8], [1.0, 2.0]),
    )


def test_splits_fill_the_machine_with_few_shares() -> None:
    for tiles, slabs, programs in ((128, 16, 264), (128, 112, 264), (3, 1, 132), (1, 1, 1), (4096, 7, 132)):
        splits = splits_of(tiles, slabs, programs)
        assert 1 <= splits <= tiles
    assert splits_of(128, 16, 264) * 16 >= 200


# The kernels, on a GPU or under the interpreter.


def check_kernels(
    M: int,
    widths: tuple[int, ...],
    ranks: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    tile: ReduceTile,
    start: int = 0,
) -> None:
    dy, xa, slices = made(M, widths, ranks, dtype, device, start)
    need_t, need_dbs = lora_reduce_ref(dy, xa, slices)
    buffer = torch.full((M, sum(ranks) + 4), torch.nan, dtype=dtype, device=device)
    t = buffer[:, : sum(ranks)]
    for _ in range(2):
        dbs = [torch.full_like(s.b, torch.nan) for s in slices]
        launch_reduce(dy, xa, slices, t, dbs, tile)
        close(t, need_t, max(widths))
        for db, want in zip(dbs, need_dbs, strict=True):
            close(db, want, M)
    assert buffer[:, sum(ranks) :].isnan().all()
    again = [torch.full_like(s.b, torch.nan) for s in slices]
    launch_reduce(dy, xa, slices, t, again, tile)
    assert all(torch.equal(a, b) for a, b in zip(dbs, again, strict=True))


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernels_equal_the_definition(kernel_device: str, poisoned_memory: None) -> None:
    small = ReduceTile(16, 32, 4, 1)
    check_kernels(30, (64,), (16,), torch.float32, kernel_device, small)
    check_kernels(
        50, (64, 32, 37), (3, 16, 5), torch.float32, kernel_device, small._replace(splits=2), start=4
    )
    check_kernels(97, (64, 40), (3, 20), torch.float16, kernel_device, small._replace(splits=3))
    check_kernels(1, (32,), (1,), torch.float32, kernel_device, small)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [(16, 16, 16), (8, 3, 64)], ids=str)
def test_cuda_real_shapes(dtype: torch.dtype, ranks: tuple[int, int, int]) -> None:
    for tile in (ReduceTile(64, 128, 4, 3), ReduceTile(64, 256, 8, 2)):
        check_kernels(1000, (1024, 256, 200), ranks, dtype, "cuda", tile)


@pytest.mark.gpu
@pytest.mark.parametrize("b_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_ops(b_dtype: torch.dtype) -> None:
    dy, xa, slices = made(4096, (4096, 1024, 1024), (16, 16, 16), torch.bfloat16, "cuda")
    slices = [s._replace(b=s.b.to(b_dtype)) for s in slices]
    x = randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    t, da, dbs = lora_gradients(dy, x, xa, slices)
    need_t, need_dbs = lora_reduce_ref(dy, xa, [s._replace(b=s.b.bfloat16()) for s in slices])
    close(t, need_t, 4096)
    torch.testing.assert_close(da, t.t() @ x)
    for db, want in zip(dbs, need_dbs, strict=True):
        assert db.dtype == b_dtype
        close(db.bfloat16(), want, 4096)


@pytest.mark.multi
def test_cuda_second_device() -> None:
    dy, xa, slices = made(1024, (512,), (16,), torch.bfloat16, "cuda:1")
    t = torch.empty(1024, 16, dtype=torch.bfloat16, device="cuda:1")
    dbs = [torch.empty_like(slices[0].b)]
    launch_reduce(dy, xa, slices, t, dbs, ReduceTile(64, 128, 4, 3))
    close(dbs[0], lora_reduce_ref(dy, xa, slices)[1][0], 1024)
