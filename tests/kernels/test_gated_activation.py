"""SwiGLU and GeGLU: the definition, its gradients, the kernels with low-rank branches, the ops."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.decoder import gated_activation as module
from fewbits.kernels.decoder.gated_activation import (
    ACTIVATIONS,
    LowRank,
    Quantized8,
    gated_activation,
    gated_activation_backward_into,
    gated_activation_backward_ref,
    gated_activation_into,
    gated_activation_ref,
)
from fewbits.kernels.decoder.gated_activation_triton import GatedOutputs, GatedTile, launch_bwd, launch_fwd

# One rounding of the output on each side; before it float32, with a 2-ulp exp and division on a GPU, and a
# sum of r products in another order.
HALF_UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


E4 = torch.float8_e4m3fn


def same_codes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2 * HALF_UNIT[dtype] + 2.0**-18, "atol": 2.0**-17}


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape).to(dtype).to(device)


def exact(activation: str, e: Tensor) -> Tensor:
    return {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }[activation](e)


# The definition.


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_definition_equals_torch(activation: str) -> None:
    e, u = randn(5, 33, dtype=torch.float64) * 4, randn(5, 33, dtype=torch.float64)
    h = gated_activation_ref(e, u, activation)
    torch.testing.assert_close(h, exact(activation, e) * u, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_by_finite_differences(activation: str) -> None:
    e, u = (randn(3, 5, dtype=torch.float64).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: gated_activation(a, b, activation=activation), (e, u))
    both = randn(2, 3, 8, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: gated_activation(a, activation=activation), (both,))


def test_far_arguments_stay_finite() -> None:
    e = torch.tensor([-1e4, -200.0, -30.0, 0.0, 30.0, 1e4])
    for activation in ACTIVATIONS:
        de, du, h = gated_activation_backward_ref(torch.ones(6), e, torch.ones(6), activation)
        torch.testing.assert_close(h, exact(activation, e))
        assert de.isfinite().all() and du.isfinite().all()


def test_low_rank_is_added_before_the_one_rounding() -> None:
    e, u = (randn(4, 6, dtype=torch.bfloat16) for _ in range(2))
    branch = LowRank(randn(4, 3, dtype=torch.bfloat16), randn(6, 3, dtype=torch.bfloat16))
    h = gated_activation_ref(e, u, "silu", branch, branch)
    add = branch.x.double() @ branch.w.double().t()
    need = F.silu(e.double() + add) * (u.double() + add)
    torch.testing.assert_close(h.double(), need, rtol=2.0**-8 * 1.001, atol=1e-6)


# The ops on a CPU.


def test_side_by_side_equals_apart() -> None:
    gate_up = randn(2, 4, 12).requires_grad_()
    h = gated_activation(gate_up)
    h.backward(torch.ones_like(h))
    gate, up = (t.detach().requires_grad_() for t in gate_up.chunk(2, -1))
    apart = gated_activation(gate, up)
    apart.backward(torch.ones_like(apart))
    assert torch.equal(h, apart) and torch.equal(gate_up.grad, torch.cat([gate.grad, up.grad], -1))


def test_into_buffers_on_a_cpu() -> None:
    gate, up = randn(4, 12).chunk(2, -1)
    amax = torch.zeros(4)
    h = gated_activation_into(gate, up, torch.empty(4, 6), amax=amax)
    assert torch.equal(h, gated_activation_ref(gate, up, "silu")) and torch.equal(amax, h.abs().amax(1))
    dh = randn(4, 6)
    de, du, _ = gated_activation_backward_ref(dh, gate, up, "silu")
    again = torch.empty(4, 6)
    gated_activation_backward_into(dh, gate, up, GatedOutputs(gate, up, again))
    assert torch.equal(gate, de) and torch.equal(up, du) and torch.equal(again, h)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.ones(4, 6)
    with pytest.raises(BadInput, match="no gated activation 'relu'; known: silu"):
        gated_activation(x, activation="relu")
    with pytest.raises(BadInput, match="even width"):
        gated_activation(torch.ones(4, 5))
    with pytest.raises(BadInput, match="must agree"):
        gated_activation(x, x.bfloat16())
    with pytest.raises(BadInput, match="contiguous rows"):
        gated_activation_into(x, x, torch.ones(6, 4).t())
    with pytest.raises(BadInput, match=r"x \(4, r\) and w \(6, r\)"):
        gated_activation_into(x, x, x, low_rank_up=LowRank(torch.ones(4, 2), torch.ones(2, 6)))
    with pytest.raises(Unsupported, match="rank 128 at most"):
        gated_activation_into(x, x, x, low_rank_gate=LowRank(torch.ones(4, 129), torch.ones(6, 129)))
    with pytest.raises(BadInput, match="amax must be"):
        gated_activation_into(x, x, x, amax=torch.zeros(5))


@pytest.mark.parametrize("fused", [True, False])
def test_opcheck(fused: bool) -> None:
    e, u = randn(3, 8).requires_grad_(), None if fused else randn(3, 8).requires_grad_()
    torch.library.opcheck(module._gated_activation, (e, u, "silu"))
    dh, plain = randn(3, 4 if fused else 8), None if u is None else u.detach()
    torch.library.opcheck(module._gated_activation_backward, (dh, e.detach(), plain, "gelu"))
    branch = (randn(3, 2), randn(8, 2))
    x = [randn(3, 8) for _ in range(6)]
    torch.library.opcheck(
        module._gated_activation_into,
        (x[0], x[1], "gelu_tanh", *branch, None, None, x[2], torch.zeros(3), None, None, None),
    )
    torch.library.opcheck(
        module._gated_activation_backward_into,
        (*x[:3], "silu", None, None, *branch, *branch, x[3], x[4], None if fused else x[5], *[None] * 4),
    )


def test_compiles_without_a_break() -> None:
    e = randn(4, 8)

    def run(f) -> list[Tensor]:
        x = e.clone().requires_grad_()
        h = f(x)
        h.sum().backward()
        return [h.detach(), x.grad]

    def block(x: Tensor) -> Tensor:
        return gated_activation(x * 2) + x[:, :4]

    eager, compiled = run(block), run(torch.compile(block, backend="aot_eager", fullgraph=True))
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_float8_outputs_on_a_cpu() -> None:
    """Codes of the rounded outputs under the given scale; what is beyond is cut, its magnitude recorded."""
    gate, up, dh = (randn(4, 6, dtype=torch.bfloat16) for _ in range(3))
    up[0, 0] = 1e4
    h = gated_activation_ref(gate, up, "silu")
    q = Quantized8(torch.empty(4, 6).to(E4), torch.tensor([100.0]), torch.tensor([0.5]))
    assert gated_activation_into(gate, up, None, quantized=q) is None
    assert same_codes(q.q, (h.float() * 100).clamp(-448, 448).to(E4))
    assert q.amax == max(0.5, h.abs().max())
    de, du, _ = gated_activation_backward_ref(dh, gate, up, "silu")
    q = Quantized8(torch.empty(4, 12).to(E4), torch.tensor([10.0]), torch.zeros(1))
    gated_activation_backward_into(dh, gate, up, GatedOutputs(None, None, quantized=q))
    both = torch.cat([de, du], 1)
    assert same_codes(q.q, (both.float() * 10).clamp(-448, 448).to(E4)) and q.amax == both.abs().max()
    gate[1, 1] = torch.inf
    gated_activation_into(gate, up, None, quantized=Quantized8(q.q[:, :6], q.inverse_scale, q.amax))
    assert q.q[1, 1].float().isnan() and q.amax.isinf()


def test_wrong_float8_outputs_are_refused() -> None:
    x, one = torch.ones(4, 6), torch.ones(1)
    with pytest.raises(BadInput, match="neither 16-bit nor float8"):
        gated_activation_into(x, x, None)
    with pytest.raises(BadInput, match="both or not at all"):
        gated_activation_backward_into(x, x, x, GatedOutputs(x, None))
    with pytest.raises(BadInput, match=r"q \(4, 12\) of float8_e4m3fn"):
        wrong = GatedOutputs(x, x, quantized=Quantized8(x.to(E4), one, one))
        gated_activation_backward_into(x, x, x, wrong)
    with pytest.raises(BadInput, match=r"amax \(1,\)"):
        gated_activation_into(x, x, x, quantized=Quantized8(x.to(E4), one, one[0]))


# The kernels, on a GPU or under the interpreter.


def poisoned(M: int, I: int, dtype: torch.dtype, device: str) -> Tensor:
    """(M, I) of NaN inside a wider buffer."""
    return torch.full((M, I + 5), torch.nan, dtype=dtype, device=device)[:, :I]


def branches(M: int, I: int, ranks: tuple[int, ...], dtype: torch.dtype, device: str) -> list[LowRank | None]:
    """One each for e, u, dh; rank 0 is none. w lies once by rows, once by columns."""
    made: list[LowRank | None] = []
    for i, r in enumerate(ranks):
        x = randn(M, r + 3, dtype=dtype, device=device)[:, :r]
        w = randn(I, r, dtype=dtype, device=device) if i < 2 else randn(r, I, dtype=dtype, device=device).t()
        made.append(LowRank(x, w) if r else None)
    return made


def check_kernels(
    M: int,
    I: int,
    dtype: torch.dtype,
    activation: str,
    ranks: tuple[int, ...],
    device: str,
    tile: GatedTile | None = None,
) -> None:
    gate_up, dh = randn(M, 2 * I + 3, dtype=dtype, device=device), randn(M, I, dtype=dtype, device=device)
    e, u = gate_up[:, :I], gate_up[:, I : 2 * I]
    low = branches(M, I, ranks, dtype, device)
    de_ref, du_ref, h_ref = gated_activation_backward_ref(dh, e, u, activation, *low)
    scale = max(1.0, sum(r for r in ranks) ** 1.5)  # cancellation in a sum of larger products
    close = tolerance(dtype) | {"atol": tolerance(dtype)["atol"] * scale}
    h, amax = poisoned(M, I, dtype, device), torch.zeros(M, device=device)
    launch_fwd(e, u, activation, (low[0], low[1]), h, amax, tile)
    torch.testing.assert_close(h, h_ref, **close)
    assert torch.equal(amax, h.abs().amax(1).float())
    outputs = tuple(poisoned(M, I, dtype, device) for _ in range(3))
    amax.zero_()
    launch_bwd(dh, e, u, activation, tuple(low), GatedOutputs(*outputs, amax), tile)
    for out, need in zip(outputs, (de_ref, du_ref, h_ref), strict=True):
        torch.testing.assert_close(out, need, **close)
    assert torch.equal(amax, torch.maximum(outputs[0].abs().amax(1), outputs[1].abs().amax(1)).float())
    launch_bwd(dh, e, u, activation, tuple(low), GatedOutputs(e, u), tile)  # in place
    assert torch.equal(e, outputs[0]) and torch.equal(u, outputs[1])
    assert gate_up[:, 2 * I :].isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernels_equal_the_definition(activation: str, kernel_device: str) -> None:
    wide = (16 if kernel_device == "cuda" else 3, 1024)
    for shape, dtype in zip([(3, 7), (17, 129), wide], itertools.cycle(HALF_UNIT), strict=False):
        check_kernels(*shape, dtype, activation, (0, 0, 0), kernel_device)


@pytest.mark.parametrize("ranks", [(16, 16, 16), (8, 0, 3), (0, 40, 0), (1, 128, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernels_add_low_rank_branches(
    ranks: tuple[int, ...], dtype: torch.dtype, kernel_device: str
) -> None:
    if kernel_device == "cpu" and dtype == torch.bfloat16:
        dtype = torch.float16  # the interpreter multiplies bfloat16's bits
    shapes = [(64, 128), (19, 70)]
    if kernel_device == "cpu":  # the interpreter takes its time
        even = (64, 128) if ranks == (16, 16, 16) else (16, 64)
        shapes = [even if dtype == torch.float16 else (19, 70)]
    for shape in shapes:
        check_kernels(*shape, dtype, "silu", ranks, kernel_device)


@pytest.mark.parametrize("tile", [GatedTile(16, 64, 4, steps=3), GatedTile(32, 128, 4, 2, 2)], ids=str)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernels_take_several_tiles(tile: GatedTile, kernel_device: str) -> None:
    rows, columns = tile.block_m * tile.steps, tile.block_i  # of one program
    for shape in [(2 * rows, columns), (rows + 5, columns + 36)]:
        check_kernels(*shape, torch.float32, "silu", (16, 16, 16), kernel_device, tile)


@pytest.mark.parametrize("ranks", [(0, 0, 0), (16, 16, 16)], ids=str)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernels_write_float8(ranks: tuple[int, ...], kernel_device: str) -> None:
    """Codes of what the same kernel writes in 16 bits, with and without writing it."""
    dtype = torch.float16 if kernel_device == "cpu" else torch.bfloat16
    tile = GatedTile(16, 64, 4, steps=3)
    for M, I in [(53, 70), (48, 128)]:
        e, u, dh = (randn(M, I, dtype=dtype, device=kernel_device) for _ in range(3))
        low = branches(M, I, ranks, dtype, kernel_device)
        inverse = torch.tensor([60.0], device=kernel_device)
        for dense in (True, False):
            h, de, du = (poisoned(M, I, dtype, kernel_device) for _ in range(3))
            q = poisoned(M, I, dtype, kernel_device).to(E4), poisoned(M, 2 * I, dtype, kernel_device).to(E4)
            largest = torch.full((2, 1), 0.25, device=kernel_device)
            outputs = [Quantized8(q[i], inverse, largest[i]) for i in range(2)]
            launch_fwd(e, u, "silu", tuple(low[:2]), h if dense else None, None, tile, outputs[0])
            both = (de, du) if dense else (None, None)
            into = GatedOutputs(*both, quantized=outputs[1])
            launch_bwd(dh, e, u, "silu", tuple(low), into, tile)
            if dense:
                need = h, torch.cat([de, du], 1)
            for codes, values, amax in zip(q, need, largest, strict=True):
                expected = (values.float() * inverse).clamp(-448, 448).to(E4)
                if kernel_device == "cuda":
                    assert same_codes(codes, expected)
                else:  # the interpreter may lose a carry on the way to float8
                    torch.testing.assert_close(codes.float(), expected.float(), rtol=0.5, atol=2.0**-6)
                assert amax == values.abs().max()
            assert dense or (h.isnan().all() and de.isnan().all())


@pytest.mark.gpu
@pytest.mark.interpret
def test_amax_keeps_what_it_holds_and_nan(kernel_device: str) -> None:
    e, u = torch.ones(3, 8, device=kernel_device), torch.ones(3, 8, device=kernel_device)
    u[1, 2] = torch.nan
    amax = torch.tensor([100.0, 0.0, 0.0], device=kernel_device)
    h = torch.empty(3, 8, device=kernel_device)
    launch_fwd(e, u, "silu", (None, None), h, amax)
    assert amax[0] == 100 and amax[1].isnan() and amax[2] == h[2].max()


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernels_take_nothing(kernel_device: str) -> None:
    for shape in ((0, 8), (8, 0)):
        x = [torch.empty(shape, device=kernel_device) for _ in range(5)]
        launch_fwd(x[0], x[1], "silu", (None, None), x[2], None)
        launch_bwd(*x[:3], "silu", (None, None, None), GatedOutputs(x[3], x[4]))


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(HALF_UNIT), ids=str)
def test_cuda_op_and_autograd(dtype: torch.dtype) -> None:
    x = randn(2, 300, 2 * 1000, dtype=dtype, device="cuda").requires_grad_()
    dh = randn(2, 300, 1000, dtype=dtype, device="cuda")
    h = gated_activation(x)
    h.backward(dh)
    de, du, h_ref = gated_activation_backward_ref(dh, *x.detach().chunk(2, -1), "silu")
    torch.testing.assert_close(h, h_ref, **tolerance(dtype))
    torch.testing.assert_close(x.grad, torch.cat([de, du], -1), **tolerance(dtype))
    torch.library.opcheck(module._gated_activation, (x, None, "silu"))


@pytest.mark.gpu
def test_cuda_float64_runs_the_definition() -> None:
    e, u, h, dh = (torch.randn(3, 8, dtype=torch.float64, device="cuda").requires_grad_() for _ in range(4))
    assert torch.equal(gated_activation(e, u), gated_activation_ref(e, u, "silu"))
    gated_activation(e, u).backward(dh)
    x = [t.detach() for t in (e, u, h)]
    assert torch.equal(gated_activation_into(*x), gated_activation_ref(e, u, "silu"))
    gated_activation_backward_into(dh.detach(), *x[:2], GatedOutputs(*x[:2]))
    assert torch.equal(x[0], e.grad) and torch.equal(x[1], u.grad)


@pytest.mark.gpu
def test_cuda_real_shape_with_branches() -> None:
    check_kernels(512, 14336, torch.bfloat16, "silu", (16, 16, 16), "cuda")
    check_kernels(513, 8960, torch.bfloat16, "gelu_tanh", (16, 16, 16), "cuda")


@pytest.mark.gpu
def test_cuda_float8_of_a_real_shape() -> None:
    M, I = 1024, 14336
    e, u, dh = (randn(M, I, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    low = branches(M, I, (16, 16, 16), torch.bfloat16, "cuda")
    q = Quantized8(
        torch.empty(M, 2 * I, device="cuda").to(E4),
        torch.full((1,), 20.0, device="cuda"),
        e.new_zeros(1).float(),
    )
    de, du = torch.empty_like(e), torch.empty_like(e)
    into = GatedOutputs(de, du, quantized=q)
    gated_activation_backward_into(dh, e, u, into, low_rank=tuple(low))
    both = torch.cat([de, du], 1)
    assert same_codes(q.q, (both.float() * 20).clamp(-448, 448).to(E4)) and q.amax == both.abs().max()
    h, half = torch.empty_like(e), Quantized8(q.q[:, :I], q.inverse_scale, torch.zeros_like(q.amax))
    gated_activation_into(e, u, h, low_rank_gate=low[0], low_rank_up=low[1], quantized=half)
    assert same_codes(half.q, (h.float() * 20).clamp(-448, 448).to(E4)) and half.amax == h.abs().max()


@pytest.mark.gpu
def test_cuda_more_than_2_31_values() -> None:
    e = torch.ones(2**17 + 3, 2**14, dtype=torch.bfloat16, device="cuda")
    e[-1] = 2
    h = gated_activation(e, e)
    assert h[-1].eq(gated_activation(e[-1:], e[-1:])).all() and h[-2, 0] != h[-1, 0]


@pytest.mark.multi
def test_cuda_second_device() -> None:
    x = randn(8, 128, device="cuda:1")
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(gated_activation(x), gated_activation_ref(*x.chunk(2, -1), "silu"))
