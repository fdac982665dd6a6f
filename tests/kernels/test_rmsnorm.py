"""RMSNorm: the definition, its gradients, the kernels against it, the op in the compiler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.decoder import rmsnorm as module
from fewbits.kernels.decoder.rmsnorm import launch_bwd, launch_fwd, rmsnorm, rmsnorm_backward_ref, rmsnorm_ref

EPS = 1e-5

# One rounding to the output's dtype is at most half a unit in its last place; before it, both sides work in
# float32, where the order of a sum of N terms and the 2-ulp rsqrt and division of the GPU move the last bits:
# 2^-20 covers N = 16384.
HALF_UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Two roundings apart at worst (each side rounds once, and a tie may fall either way)."""
    return {"rtol": 2 * HALF_UNIT[dtype] + 2.0**-19, "atol": 2.0**-19}


def operands(
    shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    x, dy = (torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(2))
    return x, torch.rand(shape[-1:], generator=generator).add(0.5).to(dtype).to(device), dy


# The definition.


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_definition_against_float64_formula(offset: float) -> None:
    x, w, _ = operands((5, 7, 33), torch.float64)
    y, r = rmsnorm_ref(x, w, EPS, offset)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (offset + w)
    torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
    assert r.shape == (5, 7)


def test_equals_transformers_bit_for_bit_in_float32() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, w, _ = operands((4, 96), torch.float32)
    for cls, offset in ((LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)):
        norm = cls(96, eps=EPS)
        norm.weight.data.copy_(w)
        assert torch.equal(rmsnorm(x, w, EPS, offset=offset), norm(x).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_round_once(dtype: torch.dtype) -> None:
    x, w, _ = operands((4, 96), dtype)
    exact = rmsnorm_ref(x.double(), w.double(), EPS)[0]
    torch.testing.assert_close(rmsnorm(x, w, EPS).double(), exact, rtol=HALF_UNIT[dtype] * 1.001, atol=1e-9)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 5), (1, 1), (4,)])
def test_gradients_by_finite_differences(shape: tuple[int, ...], offset: float) -> None:
    x, w, _ = operands(shape, torch.float64)
    assert torch.autograd.gradcheck(
        lambda a, b: rmsnorm(a, b, EPS, offset=offset), (x.requires_grad_(), w.requires_grad_())
    )


def test_backward_equals_autograd_of_the_definition() -> None:
    x, w, dy = operands((6, 40), torch.float32)
    xa, wa = x.clone().requires_grad_(), w.clone().requires_grad_()
    rmsnorm_ref(xa, wa, EPS, 1.0)[0].backward(dy)
    dx, dw = rmsnorm_backward_ref(dy, x, w, rmsnorm_ref(x, w, EPS, 1.0)[1], 1.0)
    torch.testing.assert_close(dx, xa.grad)
    torch.testing.assert_close(dw, wa.grad)


# The op.


def test_frozen_weight_costs_no_gradient() -> None:
    x, w, dy = operands((6, 40), torch.float32)
    x.requires_grad_()
    rmsnorm(x, w, EPS).backward(dy)
    assert x.grad is not None and w.grad is None
    r = rmsnorm_ref(x, w, EPS)[1]
    assert rmsnorm_backward_ref(dy, x.detach(), w, r, needs_dw=False)[1].numel() == 0


def test_only_the_weight_trains() -> None:
    x, w, dy = operands((6, 40), torch.float32)
    w.requires_grad_()
    rmsnorm(x, w, EPS).backward(dy)
    assert x.grad is None and w.grad is not None


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(rmsnorm(x, torch.ones(8), EPS).square().sum(), x, create_graph=True)
    with pytest.raises(Unsupported, match="can be differentiated once"):
        dx.sum().backward()


def test_mixed_dtypes_keep_xs() -> None:
    x, w, dy = operands((3, 16), torch.bfloat16)
    wf = w.float().requires_grad_()
    y = rmsnorm(x.requires_grad_(), wf, EPS)
    y.backward(dy)
    assert y.dtype == torch.bfloat16 and x.grad is not None and wf.grad is not None
    assert x.grad.dtype == torch.bfloat16 and wf.grad.dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, requires_grad=True)
    w = torch.ones(8, requires_grad=True)
    rmsnorm(x, w, EPS).sum().backward()
    assert x.grad is not None and x.grad.shape == shape
    assert w.grad is not None and torch.equal(w.grad, torch.zeros(8))


def test_nan_and_infinity_stay_in_their_row() -> None:
    x, w, _ = operands((3, 8), torch.float32)
    x[0, 3], x[1, 2] = float("nan"), float("inf")
    y = rmsnorm(x, w, EPS)
    assert y[0].isnan().all() and y[1, 2].isnan() and y[2].isfinite().all()


def test_wrong_weight_is_refused() -> None:
    with pytest.raises(BadInput, match=r"must have shape \(8,\)"):
        rmsnorm(torch.ones(2, 8), torch.ones(9), EPS)


def views(device: str) -> list[Tensor]:
    base = torch.randn(4, 6, 20, device=device)
    return [base, base[:, :, 3:16], base[:, ::2], base.transpose(0, 1), base.transpose(1, 2), base[..., ::2]]


@pytest.mark.parametrize("which", [0, 3, 4])
def test_opcheck(which: int) -> None:
    x = views("cpu")[which].requires_grad_()
    w = torch.rand(x.shape[-1]).requires_grad_()
    torch.library.opcheck(module._rmsnorm, (x, w, EPS, 1.0))
    y, r = rmsnorm_ref(x.detach(), w.detach(), EPS)
    args = (torch.randn_like(y), x.detach(), w.detach(), r, 1.0)
    torch.library.opcheck(module._rmsnorm_backward, (*args, True))
    torch.library.opcheck(module._rmsnorm_backward, (*args, False))


@pytest.mark.parametrize("trained", [True, False])
def test_the_op_and_the_short_way_on_a_cpu_agree(trained: bool) -> None:
    x, w, dy = operands((3, 5, 32), torch.bfloat16)
    results = []
    for f in (lambda a, b: rmsnorm(a, b, EPS, offset=1.0), lambda a, b: module._rmsnorm(a, b, EPS, 1.0)[0]):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_(trained)
        y = f(a, b)
        y.backward(dy)
        results.append((y, a.grad, b.grad))
    for short, op in zip(*results, strict=True):
        assert (short is None and op is None) or torch.equal(short, op)


@pytest.mark.parametrize("trained", [True, False])
def test_compiles_without_a_break(trained: bool) -> None:
    x, w, dy = operands((4, 32), torch.float32)

    def loss_and_gradients(f) -> list[Tensor | None]:
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_(trained)
        y = f(a, b)
        y.backward(dy)
        return [y, a.grad, b.grad]

    def block(a: Tensor, b: Tensor) -> Tensor:
        return rmsnorm(a * 2, b, EPS, offset=1.0) + a

    for eager, compiled in zip(
        loss_and_gradients(block),
        loss_and_gradients(torch.compile(block, backend="aot_eager", fullgraph=True)),
        strict=True,
    ):
        assert (eager is None and compiled is None) or torch.equal(eager, compiled)


# The kernels, on a GPU or under the interpreter.

SHAPES = [(1, 1), (3, 7), (5, 128), (2, 3, 129), (33, 257), (1, 4096), (2, 5001), (300, 64)]


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", list(HALF_UNIT), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(
    shape: tuple[int, ...], dtype: torch.dtype, offset: float, kernel_device: str, poisoned_memory: None
) -> None:
    x, w, dy = operands(shape, dtype, kernel_device)
    check_kernel(x, w, dy, offset)


def dx_tolerance(w: Tensor, dy: Tensor, r: Tensor, offset: float) -> dict[str, float]:
    """Dx is a difference and keeps the absolute error of its terms: `tolerance` times the largest."""
    largest = float((dy.float() * (w.float() + offset)).abs().max() * r.max())
    bound = tolerance(dy.dtype)
    return {"rtol": bound["rtol"], "atol": bound["atol"] * max(largest, 1.0)}


def check_kernel(x: Tensor, w: Tensor, dy: Tensor, offset: float) -> None:
    """Forward and backward kernel against the definition; every output element written."""
    y, r = launch_fwd(x, w, EPS, offset)
    y_ref, r_ref = rmsnorm_ref(x, w, EPS, offset)
    torch.testing.assert_close(y, y_ref, **tolerance(x.dtype))
    torch.testing.assert_close(r, r_ref, rtol=2.0**-19, atol=0)
    dx, dw = launch_bwd(dy, x, w, r, offset, True)
    dx_ref, dw_ref = rmsnorm_backward_ref(dy, x, w, r_ref, offset)
    torch.testing.assert_close(dx, dx_ref, **dx_tolerance(w, dy, r_ref, offset))
    # A sum of M products: its order moves it by up to sqrt(M) float32 units of its largest partial sum.
    M = x.numel() // x.shape[-1]
    torch.testing.assert_close(dw, dw_ref, rtol=2 * HALF_UNIT[w.dtype] + 2.0**-18, atol=2.0**-18 * M**0.5)
    dx_only, none = launch_bwd(dy, x, w, r, offset, False)
    assert torch.equal(dx_only, dx) and none.numel() == 0


@pytest.mark.parametrize("which", range(6))
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_takes_any_strides(which: int, kernel_device: str, poisoned_memory: None) -> None:
    x = views(kernel_device)[which]
    w = torch.rand(2 * x.shape[-1], device=kernel_device)[::2]
    check_kernel(x, w, torch.randn_like(x), 0.0)
    check_kernel(x, w, x.new_ones(()).expand(x.shape), 1.0)  # the gradient of a sum has strides of zero


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_with_a_wide_row(kernel_device: str, poisoned_memory: None) -> None:
    x, w, dy = operands((2, 16387), torch.float32, kernel_device)
    check_kernel(x, w, dy, 0.0)


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_takes_no_rows(kernel_device: str) -> None:
    x, w = torch.empty(0, 8, device=kernel_device), torch.ones(8, device=kernel_device)
    y, r = launch_fwd(x, w, EPS, 0.0)
    dx, dw = launch_bwd(y, x, w, r, 0.0, True)
    assert y.shape == dx.shape == (0, 8) and torch.equal(dw, torch.zeros_like(w))


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_refuses_a_row_beyond_its_tile(kernel_device: str) -> None:
    x = torch.ones(1, 65537, device=kernel_device)
    with pytest.raises(Unsupported, match="at most 65536"):
        launch_fwd(x, x[0], EPS, 0.0)


@pytest.mark.gpu
@pytest.mark.interpret
def test_float64_runs_the_definition(kernel_device: str) -> None:
    x, w, dy = operands((3, 8), torch.float64, kernel_device)
    y, r = launch_fwd(x, w, EPS, 0.0)
    assert torch.equal(y, rmsnorm_ref(x, w, EPS)[0])
    assert torch.equal(launch_bwd(dy, x, w, r, 0.0, True)[0], rmsnorm_backward_ref(dy, x, w, r)[0])


@pytest.mark.gpu
@pytest.mark.interpret
def test_weight_gradient_is_the_same_every_time(kernel_device: str) -> None:
    x, w, dy = operands((1000, 64), torch.float32, kernel_device)
    r = launch_fwd(x, w, EPS, 0.0)[1]
    first = launch_bwd(dy, x, w, r, 0.0, True)[1]
    assert all(torch.equal(first, launch_bwd(dy, x, w, r, 0.0, True)[1]) for _ in range(3))


# The op on a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(HALF_UNIT), ids=str)
def test_cuda_op_and_autograd(dtype: torch.dtype) -> None:
    x, w, dy = operands((2, 50, 4096), dtype, "cuda")
    xa, wa = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = rmsnorm(xa, wa, EPS)
    y.backward(dy)
    y_ref, r = rmsnorm_ref(x, w, EPS)
    dx, dw = rmsnorm_backward_ref(dy, x, w, r)
    torch.testing.assert_close(y, y_ref, **tolerance(dtype))
    torch.testing.assert_close(xa.grad, dx, **dx_tolerance(w, dy, r, 0.0))
    torch.testing.assert_close(wa.grad, dw, rtol=2 * HALF_UNIT[dtype] + 2.0**-18, atol=2.0**-15)


@pytest.mark.gpu
def test_cuda_opcheck_and_compile() -> None:
    x, w, _ = operands((4, 128), torch.bfloat16, "cuda")
    torch.library.opcheck(module._rmsnorm, (x.requires_grad_(), w.requires_grad_(), EPS, 0.0))
    compiled = torch.compile(lambda a, b: rmsnorm(a, b, EPS), fullgraph=True)
    assert torch.equal(compiled(x, w), rmsnorm(x, w, EPS))


@pytest.mark.gpu
def test_cuda_more_than_2_31_values() -> None:
    """Row offsets are 64-bit: the last row of a tensor beyond 2^31 values is right."""
    x = torch.ones(2**19 + 3, 4096, dtype=torch.bfloat16, device="cuda")
    x[-1] = 2
    w = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    y, r = launch_fwd(x, w, 0.0, 0.0)
    assert torch.equal(y[-1], torch.ones_like(y[-1])) and abs(r[-1] - 0.5) < 1e-6
    assert launch_bwd(y, x, w, r, 0.0, False)[0][-1].abs().max() < 1e-6


@pytest.mark.gpu
def test_cuda_current_stream() -> None:
    x, w, _ = operands((4096, 4096), torch.bfloat16, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = rmsnorm(x, w, EPS)
    stream.synchronize()
    torch.testing.assert_close(y, rmsnorm_ref(x, w, EPS)[0], **tolerance(torch.bfloat16))


@pytest.mark.multi
def test_cuda_second_device() -> None:
    x, w, _ = operands((8, 128), torch.float32, "cuda:1")
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(rmsnorm(x, w, EPS), rmsnorm_ref(x, w, EPS)[0], **tolerance(torch.float32))
