"""Head and loss with 8-bit products: definition, the kernel that writes 8 bits, gradients, compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.loss import linear_cross_entropy_float8 as module
from fewbits.kernels.loss.cross_entropy_triton import Gradient8, launch
from fewbits.kernels.loss.linear_cross_entropy import linear_cross_entropy, rows_ref
from fewbits.kernels.loss.linear_cross_entropy_float8 import (
    HeadOperands,
    chunked_float8,
    head_operands,
    linear_cross_entropy_float8,
    linear_cross_entropy_float8_ref,
)
from fewbits.kernels.loss.rows_and_labels import LossTensors
from tests.kernels.test_linear_cross_entropy import each_option

# Two operands rounded to E4M3 (matmul_float8.py) move a logit, and with it softmax, by up to 0.0375 of the
# logits' norm; so is the tail of dh, whose product takes two such operands as well.
ROUNDING = 0.0375


def in_order(options: dict[str, Any]) -> tuple[float, float, float]:
    smoothing, z_loss, cap = (float(options.get(n, 0.0)) for n in ("label_smoothing", "z_loss", "soft_cap"))
    return smoothing, z_loss, cap


def operands(
    M: int, V: int, K: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden, weight and bias that train, and labels of which every third is ignored."""
    g = torch.Generator().manual_seed(M + V + K)
    h, w, b = (torch.randn(s, generator=g) for s in ((M, K), (V, K), (V,)))
    y = torch.randint(V, (M,), generator=g)
    y[::3] = -100
    leaves = (t.to(dtype).to(device).requires_grad_() for t in (h, w * K**-0.5, b))
    return *leaves, y.to(device)


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def gradient8(M: int, V: int, device: str = "cpu", dtype: torch.dtype = torch.float8_e4m3fn) -> Gradient8:
    q = torch.empty((M, V), dtype=dtype, device=device)
    return Gradient8(q, torch.empty((M, 1), device=device), torch.empty(M, device=device))


def decoded(found: Gradient8, y: Tensor) -> Tensor:
    kept = y >= 0
    dz = found.q.double() * found.scale
    return dz.scatter(1, y.where(kept, 0)[:, None], found.own.double().where(kept, 0.0)[:, None])


# The definition.


@each_option
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_gradient_in_8_bits_is_the_gradient(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Each value by half a step of its binade, or of the smallest binade; the label's not at all."""
    z, (*_, y) = torch.randn(33, 301) * 5, operands(33, 301, 1)
    z[4, 7], y[4] = 80.0, 7  # a label with a probability of 1
    z[5, 8], y[5] = 80.0, 9  # another
    loss, exact, factors = torch.empty(33), z.double(), torch.randn(33)
    found = gradient8(33, 301, dtype=dtype)
    rows_ref(z.clone(), y, factors, loss, -100, in_order(options), False, found)
    rows_ref(exact, y, factors.double(), loss.double(), -100, in_order(options), True)
    mantissa, smallest = (2.0**-4, 2.0**-10) if dtype == torch.float8_e4m3fn else (2.0**-3, 2.0**-17)
    atol = float(found.scale.abs().max()) * smallest + 1e-7
    torch.testing.assert_close(decoded(found, y), exact, rtol=mantissa + 1e-4, atol=atol)
    at = (y >= 0).nonzero()[:, 0]
    torch.testing.assert_close(found.own[at].double(), exact[at, y[at]], rtol=1e-5, atol=1e-6)
    largest = found.q[at].float().abs().amax(1)
    assert largest.isfinite().all() and not found.q[at, y[at]].float().any()
    if not options:  # the scale leaves nothing unused: at most one binade, where the label is not the top
        assert (
            largest[~torch.isin(at, torch.tensor([4]))] >= torch.finfo(dtype).max / 2.01
        ).float().mean() > 0.9


def test_the_tail_is_not_lost() -> None:
    """Many small probabilities beside the label's entry: one scale for both would round them all to zero."""
    V = 2**19
    z, y, loss, found = torch.zeros(1, V), torch.tensor([5]), torch.empty(1), gradient8(1, V)
    rows_ref(z, y, None, loss, -100, (0.0, 0.0, 0.0), False, found)
    assert float((found.q.double() * found.scale).sum()) == pytest.approx((V - 1) / V, rel=1e-3)
    assert not (torch.softmax(z, 1) * 448).to(torch.float8_e4m3fn).float().any()


@each_option
@pytest.mark.parametrize("in_8_bits", [True, False])
@pytest.mark.parametrize("shape", [(1, 16, 16), (7, 48, 32), (33, 304, 64)])
def test_close_to_exact(shape: tuple[int, int, int], in_8_bits: bool, options: dict[str, Any]) -> None:
    h, w, b, y = operands(*shape)
    y[0] = 3
    made = head_operands(w, gradient=in_8_bits)
    want = gradients(linear_cross_entropy(h, w, y, bias=b, **options), h, w, b)
    got = gradients(linear_cross_entropy_float8(h, w, y, made, bias=b, chunk_rows=8, **options), h, w, b)
    for g, e in zip(got, want, strict=True):
        assert g.dtype == e.dtype and error(g, e) <= 2 * ROUNDING
    for g in got[1:]:
        assert g.norm() > 0


@each_option
@pytest.mark.parametrize("in_8_bits", [True, False])
def test_chunks_equal_the_definition(in_8_bits: bool, options: dict[str, Any], poisoned_memory: None) -> None:
    h, w, b, y = (t.detach() for t in operands(37, 160, 32, torch.bfloat16))
    made = head_operands(w, gradient=in_8_bits)
    loss, dh = linear_cross_entropy_float8_ref(h, w, y, made, b, options=in_order(options))
    needs = (True, False, False)
    found = chunked_float8(rows_ref, LossTensors(h, w, y, b), made, -100, in_order(options), 8, needs)
    torch.testing.assert_close(found[0], loss)
    torch.testing.assert_close(found[1], dh)
    assert not found[2].numel() and not found[3].numel() and not dh[y == -100].any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("valid_rows", [None, 20])
def test_reductions_and_bounds(reduction: str, valid_rows: int | None) -> None:
    h, w, _, y = operands(24, 64, 32)
    made, factors = head_operands(w), torch.rand(24)
    results = []
    for f, extra in ((linear_cross_entropy, ()), (linear_cross_entropy_float8, (made,))):
        loss = f(h, w, y, *extra, reduction=reduction, valid_rows=valid_rows, chunk_rows=7)
        scale = factors if reduction == "none" else factors[0]
        results.append([loss, *gradients((loss * scale).sum(), h, w)])
    for want, got in zip(*results, strict=True):
        assert got.shape == want.shape and error(got.detach(), want.detach()) <= 2 * ROUNDING


def test_a_frozen_head_gets_no_gradient_and_no_rows_no_loss() -> None:
    h, w, b, y = operands(6, 32, 16)
    made = head_operands(w)
    loss = linear_cross_entropy_float8(h, w.detach(), y, made, bias=b.detach())
    assert gradients(loss, h)[1].norm() > 0
    ignored = linear_cross_entropy_float8(h, w, torch.full_like(y, -100), made, bias=b)
    assert all(not t.any() for t in gradients(ignored, h, w, b))
    empty = linear_cross_entropy_float8(h[:0], w, y[:0], made)
    assert empty == 0 and not gradients(empty, w)[1].any()


def test_refusals() -> None:
    h, w, _, y = operands(6, 32, 16)
    y[1] = 32
    with pytest.raises(BadInput, match="from 0 to 31"):
        linear_cross_entropy_float8(h, w, y, head_operands(w))
    h, w, _, y = operands(6, 40, 16)
    with pytest.raises(Unsupported, match="multiples of 16"):
        linear_cross_entropy_float8(h, w, y, head_operands(w))


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_autocast(master: torch.dtype) -> None:
    h, w, b, y = operands(40, 48, 32)
    w_master = w.detach().to(master).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy_float8(h, w_master, y, head_operands(w_master), bias=b, chunk_rows=16)
    got = gradients(loss, h, w_master, b)
    assert [g.dtype for g in got] == [torch.float32, torch.float32, master, torch.float32]
    for g, e in zip(got, gradients(linear_cross_entropy(h, w, y, bias=b), h, w, b), strict=True):
        assert error(g, e) <= 2 * ROUNDING


@pytest.mark.parametrize("in_8_bits", [True, False])
def test_compiles_without_a_break(in_8_bits: bool) -> None:
    h, w, b, y = operands(10, 32, 16)
    made = head_operands(w, gradient=in_8_bits)

    def f(h: Tensor, w: Tensor, b: Tensor, y: Tensor, made: HeadOperands) -> Tensor:
        return linear_cross_entropy_float8(h * 2, w, y, made, bias=b, valid_rows=8, soft_cap=5.0)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    results = (gradients(g(h, w, b, y, made), h, w, b) for g in (compiled, f))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("needs", "reduce", "in_8_bits"),
    [([True] * 3, True, True), ([True, False, False], True, False), ([False] * 3, False, True)],
)
def test_opcheck(needs: list[bool], reduce: bool, in_8_bits: bool) -> None:
    h, w, b, y = operands(6, 32, 16)
    made = head_operands(w, gradient=in_8_bits)
    w, b = (t if needs == [True] * 3 or not any(needs) else t.detach() for t in (w, b))
    before = [None if t is None else t.clone() for t in made]
    arguments = (h, w, y, b, None, -100, [0.1, 0.0, 3.0], 4, needs, reduce, *made)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(  # the fourth check cannot compare 8-bit floats
        module._linear_cross_entropy_float8, arguments, test_utils=checks
    )
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(made, before, strict=True) if a is not None)


# The kernel, on a GPU or under the interpreter.


@pytest.mark.gpu
@pytest.mark.interpret
@each_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 1), (5, 127), (4, 1000)], ids=str)
def test_kernel_equals_the_definition(
    shape: tuple[int, int],
    dtype: torch.dtype,
    options: dict[str, Any],
    kernel_device: str,
    poisoned_memory: None,
) -> None:
    M, V = shape
    z = (torch.randn(M, V) * 4).to(dtype).to(kernel_device)
    y = torch.randint(V, (M,), device=kernel_device)
    y[1] = -100
    factors = torch.rand(M, device=kernel_device) + 0.5
    for dloss, dense in ((None, False), (factors, True)):
        results = []
        for f in (launch, rows_ref):
            out, loss, found = z.clone(), torch.empty(M, device=kernel_device), gradient8(M, V, kernel_device)
            f(out, y, dloss, loss, -100, in_order(options), dense, found)
            assert dense or torch.equal(out, z)
            results.append((out.float(), loss, found.q.float() * found.scale, found.own, found.scale))
        (dz, loss, q, own, scale), (dz_ref, loss_ref, q_ref, own_ref, scale_ref) = results
        torch.testing.assert_close(loss, loss_ref, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own, own_ref, rtol=1e-4, atol=2**-19)
        torch.testing.assert_close(scale, scale_ref, rtol=1e-4, atol=2**-28)
        if (
            kernel_device == "cuda"
        ):  # sums and exponentials differ in their last bits: a few take another code
            assert error(q, q_ref) < 2**-6 if q_ref.any() else not q.any()
        bits = 2**-3 if kernel_device == "cuda" else 0.5  # on the way to float8 the interpreter loses carries
        steps = float(scale_ref.abs().max()) * 2.0**-9
        torch.testing.assert_close(q, q_ref, rtol=bits + 1e-3, atol=1.1 * steps)
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(dz, dz_ref, rtol=2 * unit + 2**-16, atol=2**-19)
        assert loss[1] == own[1] == scale[1] == 0 and not q[1].any()


@pytest.mark.gpu
@pytest.mark.interpret
@pytest.mark.parametrize("in_8_bits", [True, False])
def test_chunks_with_the_kernel(in_8_bits: bool, kernel_device: str, poisoned_memory: None) -> None:
    h, w, b, y = (t.detach() for t in operands(23, 304, 16, torch.bfloat16, kernel_device))
    made = head_operands(w, gradient=in_8_bits)
    for needs in ((True, True, True), (True, False, False), (False, False, False)):
        arguments = ((h, w, y, b, None), made, -100, (0.1, 1e-3, 5.0), 8, needs)
        for got, want in zip(
            chunked_float8(launch, *arguments), chunked_float8(rows_ref, *arguments), strict=True
        ):
            # Products of bfloat16 logits, and codes that the interpreter gets wrong where they carry.
            assert got.shape == want.shape and (not want.any() or error(got, want) < 2**-5)


@pytest.mark.gpu
@pytest.mark.parametrize("in_8_bits", [True, False])
@pytest.mark.parametrize("shape", [(300, 5008, 64), (1, 32, 16), (2049, 1024, 512)])
def test_cuda_op_and_autograd(shape: tuple[int, int, int], in_8_bits: bool) -> None:
    h, w, b, y = operands(*shape, torch.bfloat16, "cuda")
    y[0] = 1
    made = head_operands(w, gradient=in_8_bits)
    got = gradients(linear_cross_entropy_float8(h, w, y, made, bias=b, chunk_rows=128), h, w, b)
    hd, wd, bd = (t.detach().double().requires_grad_() for t in (h, w, b))
    want = gradients(linear_cross_entropy(hd, wd, y, bias=bd), hd, wd, bd)
    for g, e in zip(got, want, strict=True):
        assert error(g, e) <= 2 * ROUNDING


@pytest.mark.gpu
def test_the_sum_over_the_vocabulary_keeps_the_tail() -> None:
    """The tail's share is a direction that all rows of W have: an accumulator of 14 bits loses it."""
    V, K = 2**17, 64
    w = (torch.randn(V, K, device="cuda") + 1).bfloat16()
    h = (torch.randn(64, K, device="cuda") / 16).bfloat16().requires_grad_()
    y = torch.randint(V, (64,), device="cuda")
    (got,) = torch.autograd.grad(linear_cross_entropy_float8(h, w, y, head_operands(w), reduction="sum"), h)
    exact = h.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(linear_cross_entropy(exact, w.double(), y, reduction="sum"), exact)
    tail = w.double().mean(0).norm()  # beside it the label's row is as long
    assert (got.double() - want).mean(0).norm() < ROUNDING * tail


@pytest.mark.gpu
def test_cuda_waits_for_nothing() -> None:
    h, w, b, y = operands(300, 512, 64, torch.bfloat16, "cuda")
    n = torch.tensor(200, device="cuda")

    def step() -> None:
        loss = linear_cross_entropy_float8(h, w, y, head_operands(w), bias=b, num_items=n, valid_rows=250)
        loss.backward()

    step()  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
