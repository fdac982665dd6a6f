"""RMSNorm with what stands beside it in a decoder: the residual, float8 rows, the gradient round the norm."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.codec.quantize_float8 import quantize_rows_ref
from fewbits.kernels.decoder import rmsnorm as module
from fewbits.kernels.decoder.rmsnorm import (
    Normed,
    NormGradients,
    rmsnorm,
    rmsnorm_backward_ref,
    rmsnorm_backward_rows,
    rmsnorm_backward_rows_ref,
    rmsnorm_ref,
    rmsnorm_rows,
    rmsnorm_rows_ref,
)
from fewbits.kernels.decoder.rmsnorm_triton import (
    Float8Rows,
    NormedRows,
    RowOutputs,
    SumTile,
    launch_backward_rows,
    launch_rows,
)

EPS = 1e-5
HALF_UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
E4 = torch.float8_e4m3fn


def tolerance(dtype: torch.dtype, scale: float = 1.0) -> dict[str, float]:
    """As in test_rmsnorm.py: one rounding on each side, float32 before it; ``scale`` of the terms."""
    return {"rtol": 2 * HALF_UNIT[dtype] + 2.0**-19, "atol": 2.0**-19 * max(scale, 1.0)}


def operands(shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """x, residual, dy inside wider buffers, and w."""
    made = [torch.randn(shape[0], shape[1] + 3).to(dtype).to(device)[:, : shape[1]] for _ in range(3)]
    return [*made, torch.rand(shape[1]).add(0.5).to(dtype).to(device)]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dtype == E4 else torch.equal(a, b)


# The definition, which a CPU runs.


@pytest.mark.parametrize("keep_dense", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float8_alone_is_made_of_the_dtype_that_is_asked_for(
    dtype: torch.dtype | None, keep_dense: bool
) -> None:
    x, _, _, w = operands((64, 96), torch.float32)
    made = rmsnorm_rows(x, w, EPS, quantize=True, keep_dense=keep_dense, dtype=dtype)
    y, _ = rmsnorm_ref(x, w, EPS)
    q, scale = quantize_rows_ref(y if dtype is None else y.to(dtype))
    assert made.q is not None and same(made.q, q) and torch.equal(made.scale, scale)
    assert (made.y is not None) == keep_dense


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_forward_is_the_sum_of_its_parts(dtype: torch.dtype) -> None:
    x, residual, _, w = operands((5, 24), dtype)
    made = rmsnorm_rows(x, w, EPS, offset=1.0, residual=residual, quantize=True)
    assert made.summed is not None and torch.equal(made.summed, x + residual)
    y, r = rmsnorm_ref(x + residual, w, EPS, 1.0)
    assert made.y is not None and torch.equal(made.y, y) and torch.equal(made.r, r)
    q, scale = quantize_rows_ref(y)
    assert made.q is not None and same(made.q, q) and torch.equal(made.scale, scale)
    plain = rmsnorm_rows(x, w, EPS)
    assert torch.equal(plain.y, rmsnorm(x, w, EPS))
    assert plain.q is None and plain.scale is None and plain.summed is None
    only = rmsnorm_rows(x, w, EPS, quantize=True, keep_dense=False)
    assert only.y is None and only.q is not None and same(only.q, quantize_rows_ref(plain.y)[0])


def test_the_result_in_16_bits_of_float32() -> None:
    """As under autocast: rounded once, and the float8 rows are those of what was rounded."""
    x, _, _, w = operands((5, 24), torch.float32)
    y = rmsnorm_ref(x, w, EPS)[0].bfloat16()
    made = rmsnorm_rows(x, w, EPS, quantize=True, dtype=torch.bfloat16)
    assert made.y is not None and made.y.dtype == torch.bfloat16 and torch.equal(made.y, y)
    q, scale = quantize_rows_ref(y)
    assert made.q is not None and same(made.q, q) and torch.equal(made.scale, scale)


def test_gradients_equal_autograds() -> None:
    x, residual, dy, w = operands((5, 24), torch.float64)
    x, residual, w = (t.clone().requires_grad_() for t in (x, residual, w))
    summed = x + residual
    y = rmsnorm_ref(summed, w, EPS)[0]
    (y + 2 * summed).backward(dy)
    r = rmsnorm_ref(summed.detach(), w, EPS)[1].detach()
    made = rmsnorm_backward_rows(
        dy, NormedRows(summed.detach(), w.detach(), r), residual=2 * dy, needs_dw=True
    )
    torch.testing.assert_close(made.dx, x.grad)
    torch.testing.assert_close(made.dx, residual.grad)
    torch.testing.assert_close(made.dw, w.grad)


def test_the_residual_is_added_before_the_one_rounding() -> None:
    x, residual, dy, w = operands((5, 24), torch.bfloat16)
    r = rmsnorm_ref(x, w, EPS)[1]
    made = rmsnorm_backward_rows(dy, NormedRows(x, w, r), residual=residual, quantize=True)
    exact = rmsnorm_backward_ref(dy.double(), x.double(), w.double(), r.double())[0] + residual.double()
    torch.testing.assert_close(made.dx.double(), exact, rtol=2.0**-8 * 1.001, atol=1e-6)
    assert made.dw is None and made.q is not None and same(made.q, quantize_rows_ref(made.dx)[0])


@pytest.mark.parametrize("over", ["dy", "x", "residual"])
def test_dx_may_lie_over_an_operand(over: str) -> None:
    x, residual, dy, w = (t.contiguous() for t in operands((5, 24), torch.float32))
    r = rmsnorm_ref(x, w, EPS)[1]
    need = rmsnorm_backward_rows(dy, NormedRows(x, w, r), residual=residual).dx
    out = {"dy": dy, "x": x, "residual": residual}[over]
    made = rmsnorm_backward_rows(dy, NormedRows(x, w, r), residual=residual, out=out)
    assert made.dx is out and torch.equal(out, need)


def test_what_does_not_fit_is_refused() -> None:
    x, w = torch.ones(4, 6), torch.ones(6)
    with pytest.raises(BadInput, match="contiguous rows"):
        rmsnorm_rows(torch.ones(6, 4).t(), w, EPS)
    with pytest.raises(BadInput, match="contiguous rows"):
        rmsnorm_rows(x, w, EPS, residual=torch.ones(4, 5))
    with pytest.raises(BadInput, match=r"must have shape \(6,\)"):
        rmsnorm_rows(x, torch.ones(5), EPS)
    with pytest.raises(BadInput, match="computes nothing"):
        rmsnorm_rows(x, w, EPS, keep_dense=False)
    with pytest.raises(BadInput, match="out must be"):
        rmsnorm_backward_rows(x, NormedRows(x, w, torch.ones(4)), out=torch.ones(4, 12)[:, ::2])


def test_opcheck_and_compile() -> None:
    x, residual, dy, w = operands((4, 16), torch.float32)
    y, r, summed = torch.empty(4, 16), torch.empty(4), torch.empty(4, 16)
    torch.library.opcheck(module._rmsnorm_rows, (x, w, EPS, 1.0, residual, y, None, None, r, summed))
    args = (dy, x, w, torch.ones(4), 0.0, residual, y, torch.empty(16), None, None)
    torch.library.opcheck(module._rmsnorm_backward_rows, args)

    def block(x: Tensor) -> list[Tensor]:
        made = rmsnorm_rows(x * 2, w, EPS, residual=residual, quantize=True)
        back = rmsnorm_backward_rows(dy, NormedRows(made.summed, w, made.r), needs_dw=True)
        return [made.y, made.q.float(), made.scale, made.summed, back.dx, back.dw]

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(block(x), compiled(x), strict=True))


# The kernels, on a GPU or under the interpreter.


def check(made: Tensor | None, need: Tensor | None, close: dict[str, float]) -> None:
    assert (made is None) == (need is None)
    if made is not None and need is not None:
        torch.testing.assert_close(made, need, **close)


def check_float8(float8: Float8Rows, dense: Tensor) -> None:
    """What quantize_rows makes of the kernel's own dense result: bit for bit on a GPU."""
    q, scale = quantize_rows_ref(dense)
    assert torch.equal(float8.scale, scale)
    if dense.is_cuda:
        assert same(float8.q, q)
    else:  # the interpreter may lose a carry
        torch.testing.assert_close(float8.q.float(), q.float(), rtol=0.5, atol=2.0**-6)


def forward(x: Tensor, w: Tensor, residual: Tensor | None, dense: bool = True) -> tuple[Normed, Float8Rows]:
    """The kernel's results, into memory of NaN."""
    nan = torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
    float8 = Float8Rows(nan.to(E4), torch.full((x.shape[0], 1), torch.nan, device=x.device))
    y, summed = nan.clone() if dense else None, None if residual is None else nan.clone()
    r = torch.full((x.shape[0],), torch.nan, device=x.device)
    launch_rows(x, w, EPS, 1.0, RowOutputs(y, r, summed, float8), residual=residual)
    return Normed(y, *float8, r, summed), float8


@pytest.mark.parametrize("dtype", list(HALF_UNIT), ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (33, 257), (5, 4096)], ids=str)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernels_equal_the_definition(shape: tuple[int, int], dtype: torch.dtype, kernel_device: str) -> None:
    x, residual, dy, w = operands(shape, dtype, kernel_device)
    for extra in (None, residual):
        made, float8 = forward(x, w, extra)
        need = rmsnorm_rows_ref(x, w, EPS, 1.0, extra)
        if kernel_device == "cuda" or dtype != torch.bfloat16:  # the interpreter cuts bfloat16 off
            check(made.summed, need.summed, {"rtol": 0, "atol": 0})
            check(made.y, need.y, tolerance(dtype))
            torch.testing.assert_close(made.r, need.r, rtol=2.0**-19, atol=0)
        assert made.y is not None
        check_float8(float8, made.y)
        only, float8_only = forward(x, w, extra, dense=False)
        assert same(float8_only.q, float8.q) and torch.equal(only.r, made.r)
    check_backward(x, dy, w, residual)


def backward(
    x: Tensor, dy: Tensor, w: Tensor, r: Tensor, residual: Tensor | None, needs_dw: bool
) -> tuple[NormGradients, Float8Rows]:
    nan = torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
    float8 = Float8Rows(nan.to(E4), torch.full((x.shape[0], 1), torch.nan, device=x.device))
    tile = SumTile(2, 2) if needs_dw else None
    dw = launch_backward_rows(
        dy, NormedRows(x, w, r, 1.0), nan, needs_dw=needs_dw, residual=residual, float8=float8, sum_tile=tile
    )
    return NormGradients(nan, dw, *float8), float8


def check_backward(x: Tensor, dy: Tensor, w: Tensor, residual: Tensor) -> None:
    r = rmsnorm_ref(x, w, EPS, 1.0)[1]
    largest = float((dy.float() * (w.float() + 1)).abs().max() * r.max())
    for extra, needs_dw in itertools.product((None, residual), (False, True)):
        made, float8 = backward(x, dy, w, r, extra, needs_dw)
        need = rmsnorm_backward_rows_ref(dy, x, w, r, 1.0, extra, needs_dw)
        if x.is_cuda or x.dtype != torch.bfloat16:
            check(made.dx, need.dx, tolerance(x.dtype, largest))
            check(made.dw, need.dw, {"rtol": 2 * HALF_UNIT[w.dtype] + 2.0**-18, "atol": 2.0**-16})
        check_float8(float8, made.dx)


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernels_between_float32_and_16_bits(kernel_device: str) -> None:
    """Under autocast: x, the weight and dx in float32, y and dy in float16."""
    x, residual, dy, w = operands((5, 70), torch.float32, kernel_device)
    y = torch.full((5, 70), torch.nan, dtype=torch.float16, device=kernel_device)
    r, dx = torch.full((5,), torch.nan, device=kernel_device), torch.full((5, 70), torch.nan).to(x)
    launch_rows(x, w, EPS, 1.0, RowOutputs(y, r))
    need = rmsnorm_rows_ref(x, w, EPS, 1.0, dtype=torch.float16)
    check(y, need.y, tolerance(torch.float16))
    dw = launch_backward_rows(dy.half(), NormedRows(x, w, r, 1.0), dx, needs_dw=True, residual=residual)
    back = rmsnorm_backward_rows_ref(dy.half(), x, w, need.r, 1.0, residual, True)
    check(dx, back.dx, tolerance(torch.float32, 8.0))
    check(dw, back.dw, {"rtol": 2.0**-18, "atol": 2.0**-16})


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1024, 2048, 4096, 5120, 8192])
def test_cuda_real_widths(N: int) -> None:
    x, residual, dy, w = operands((700, N), torch.bfloat16, "cuda")
    made = rmsnorm_rows(x, w, EPS, residual=residual, quantize=True)
    need = rmsnorm_rows_ref(x, w, EPS, 0.0, residual)
    assert torch.equal(made.summed, need.summed)
    torch.testing.assert_close(made.y, need.y, **tolerance(torch.bfloat16))
    check_float8(Float8Rows(made.q, made.scale), made.y)
    plain = rmsnorm_rows(made.summed, w, EPS)
    torch.testing.assert_close(plain.y, made.y, **tolerance(torch.bfloat16))  # summed in another order
    back = rmsnorm_backward_rows(
        dy, NormedRows(made.summed, w, made.r), residual=residual, needs_dw=True, quantize=True
    )
    back_ref = rmsnorm_backward_rows_ref(dy, made.summed, w, need.r, 0.0, residual, True)
    torch.testing.assert_close(back.dx, back_ref.dx, **tolerance(torch.bfloat16, 8.0))
    torch.testing.assert_close(back.dw, back_ref.dw, rtol=2.0**-7, atol=2.0**-13)
    check_float8(Float8Rows(back.q, back.scale), back.dx)
    over = rmsnorm_backward_rows(dy, NormedRows(made.summed, w, made.r), residual=made.y, out=made.y)
    assert over.dx.isfinite().all()


@pytest.mark.gpu
def test_cuda_float64_nothing_and_the_compiler() -> None:
    x, residual, dy, w = operands((6, 40), torch.float64, "cuda")
    made = rmsnorm_rows(x, w, EPS, residual=residual, quantize=True)
    assert torch.equal(made.y, rmsnorm_rows_ref(x, w, EPS, 0.0, residual).y)
    assert rmsnorm_backward_rows(dy, NormedRows(x, w, made.r), needs_dw=True).dw.shape == (40,)
    none = torch.empty(0, 8, device="cuda")
    empty = rmsnorm_rows(none, none.new_ones(8), EPS, quantize=True)
    assert (
        rmsnorm_backward_rows(none, NormedRows(none, none.new_ones(8), empty.r), needs_dw=True).dw.eq(0).all()
    )
    x, _, _, w = operands((6, 40), torch.float32, "cuda")
    compiled = torch.compile(lambda a: rmsnorm_rows(a, w, EPS).y, fullgraph=True)
    assert torch.equal(compiled(x), rmsnorm_rows(x, w, EPS).y)
