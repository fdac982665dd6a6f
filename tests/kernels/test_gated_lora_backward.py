"""The gated activation's backward pass with its low-rank products: the definition, the kernel against it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.decoder.gated_activation import gated_activation_ref
from fewbits.kernels.decoder.gated_lora_backward import (
    GradientPlaces,
    LowRank,
    Quantized8,
    gated_lora_backward,
    gated_lora_backward_ref,
)
from fewbits.kernels.decoder.gated_lora_backward_triton import (
    COMPILE_CASES,
    BackwardOperands,
    GatedLoRATile,
    launch,
)
from fewbits.kernels.launch.jit import CompileCase
from fewbits.kernels.launch.tuning import SHIPPED
from tests.kernels.machine_code import build

E4 = torch.float8_e4m3fn


def operands(
    M: int, I: int, r: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, tuple[LowRank, LowRank, LowRank]]:
    """dh, gate and up inside wider buffers, and three branches; one w lies by columns."""
    dh, e, u = (torch.randn(M, I + 3).to(dtype).to(device)[:, :I] for _ in range(3))
    made = []
    for i in range(3):
        x = torch.randn(M, r + 1).mul(0.3).to(dtype).to(device)[:, :r]
        w = torch.randn(r, I).t() if i == 2 else torch.randn(I, r)
        made.append(LowRank(x, w.mul(0.3).to(dtype).to(device)))
    return dh, e, u, tuple(made)


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_gradients_equal_autograds_of_the_whole() -> None:
    """h = f(x_e w_e^T + e) * ..., down = h A^T: B's gradients of gate and up, and A's of down."""
    dh0, e, u, (gate, up, _) = operands(6, 10, 2, torch.float64)
    a_down, b_down, dy = torch.randn(2, 10).double(), torch.randn(7, 2).double(), torch.randn(6, 7).double()
    leaves = [t.clone().requires_grad_() for t in (gate.x, gate.w, up.x, up.w, a_down)]
    xe, we, xu, wu, a = leaves
    h = gated_activation_ref(e + xe @ we.t(), u + xu @ wu.t(), "silu")
    ((h @ a.t() @ b_down.t() * dy).sum() + (h * dh0).sum()).backward()
    down = LowRank(dy @ b_down, a_down.t())
    de, du = torch.empty_like(e), torch.empty_like(u)
    into = GradientPlaces((de, du))
    made = gated_lora_backward(dh0.contiguous(), e, u, (gate, up, down), into=into, scalings=(1.0, 2.0))
    for have, need in (
        (made.t[:, :2], xe.grad),
        (made.t[:, 2:], 2 * xu.grad),
        (made.dw_gate, we.grad),
        (made.dw_up, wu.grad),
        (made.dw_down, a.grad.t()),
    ):
        torch.testing.assert_close(have, need)


def test_in_place_and_float8_on_a_cpu() -> None:
    dh, e, u, low = operands(5, 12, 3, torch.bfloat16)
    de, du, need = gated_lora_backward_ref(dh, e, u, "silu", low)
    q = Quantized8(torch.empty(5, 24).to(E4), torch.full((1,), 20.0), torch.zeros(1))
    wide = torch.full((5, 9), 7.0, dtype=torch.bfloat16)
    made = gated_lora_backward(dh, e, u, low, into=GradientPlaces((e, u), q), out=wide[:, 2:8])
    assert made.t.data_ptr() == wide[:, 2:].data_ptr() and wide[:, [0, 1, 8]].eq(7).all()
    assert torch.equal(e, de) and torch.equal(u, du) and torch.equal(made.t, need.t)
    both = torch.cat([de, du], 1)
    assert torch.equal(q.q.float(), (both.float() * 20).clamp(-448, 448).to(E4).float())
    assert q.amax == both.abs().max()


def test_what_does_not_fit_is_refused() -> None:
    dh, e, u, low = operands(4, 6, 2, torch.float32)
    with pytest.raises(BadInput, match="neither 16-bit nor float8"):
        gated_lora_backward(dh, e, u, low)
    with pytest.raises(BadInput, match="contiguous rows"):
        gated_lora_backward(dh, e, u[:, :5], low, into=GradientPlaces((e, u)))
    with pytest.raises(BadInput, match="all low-rank branches"):
        gated_lora_backward(
            dh, e, u, (low[0], low[1], operands(4, 6, 3, torch.float32)[3][0]), into=GradientPlaces((e, u))
        )
    with pytest.raises(Unsupported, match="rank 32 at most"):
        gated_lora_backward(dh, e, u, operands(4, 6, 33, torch.float32)[3], into=GradientPlaces((e, u)))
    with pytest.raises(BadInput, match=r"out must be \(4, 4\)"):
        gated_lora_backward(dh, e, u, low, into=GradientPlaces((e, u)), out=torch.empty(4, 2))
    with pytest.raises(BadInput, match=r"quantized.q must be \(4, 12\)"):
        one = torch.ones(1)
        gated_lora_backward(
            dh, e, u, low, into=GradientPlaces(quantized=Quantized8(torch.empty(4, 6).to(E4), one, one))
        )


def check(M: int, I: int, r: int, device: str, tile: GatedLoRATile | None) -> None:
    """Every output against the definition; t and dw are sums in float32 of the same rounded values."""
    dtype = torch.float16 if device == "cpu" else torch.bfloat16  # the interpreter multiplies bfloat16's bits
    dh, e, u, low = operands(M, I, r, dtype, device)
    de_ref, du_ref, need = gated_lora_backward_ref(dh, e, u, "silu", low, (1.0, 0.5))
    de, du = (torch.full((M, I + 5), torch.nan, dtype=dtype, device=device)[:, :I] for _ in range(2))
    q = Quantized8(
        torch.full((M, 2 * I), torch.nan, device=device).to(E4),
        torch.full((1,), 20.0, device=device),
        torch.zeros(1, device=device),
    )
    wide = torch.full((M, 2 * r + 3), torch.nan, dtype=dtype, device=device)
    t = wide[:, 1 : 2 * r + 1]
    dw = launch(BackwardOperands(dh, e, u, "silu", low, (de, du), t, q), (1.0, 0.5), tile)
    assert error(de, de_ref) < 2.0**-9 and error(du, du_ref) < 2.0**-9
    # A value near a tie may be rounded the other way: 2^-9 of it at most, and few are.
    assert error(t, need.t) < 2.0**-8
    assert wide[:, [0, -2, -1]].isnan().all()
    for have, want in zip(dw, need[1:], strict=True):
        assert error(have, want) < 2.0**-10
    both = torch.cat([de, du], 1)
    codes = (both.float() * 20).clamp(-448, 448).to(E4)
    if device == "cuda":
        assert torch.equal(q.q.float(), codes.float())
    else:
        torch.testing.assert_close(q.q.float(), codes.float(), rtol=0.5, atol=2.0**-6)
    assert q.amax == both.abs().max()
    t_again = torch.empty_like(t)
    again = launch(BackwardOperands(dh, e, u, "silu", low, (None, None), t_again, q), (1.0, 0.5), tile)
    assert torch.equal(t_again, t) and torch.equal(again, dw)  # no matter what else is written


@pytest.mark.parametrize("shape", [(35, 70, 3), (64, 128, 16), (40, 130, 32)], ids=str)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(shape: tuple[int, int, int], kernel_device: str) -> None:
    check(*shape, kernel_device, GatedLoRATile(16, 64, 4, 2, 1))


@pytest.mark.gpu
def test_cuda_real_shapes() -> None:
    check(1024, 14336, 16, "cuda", None)
    check(1000, 6144, 16, "cuda", None)
    check(515, 3072, 32, "cuda", None)


@pytest.mark.parametrize("case", COMPILE_CASES[:2], ids=["16 bits", "float8"])
def test_hoppers_tile_compiles(case: CompileCase) -> None:
    tile = GatedLoRATile(*SHIPPED[90]["gated_lora 16"])
    constants = {"BLOCK_M": tile.block_m, "BLOCK_I": tile.block_i, "STEPS": tile.steps, "STAGES": tile.stages}
    source = replace(case, constants={**case.constants, **constants}, num_warps=tile.num_warps)
    built = build(source, 90)
    assert built.asm["cubin"][:4] == b"\x7fELF" and built.metadata.shared < 227 * 1024
