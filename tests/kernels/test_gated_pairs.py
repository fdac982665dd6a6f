"""The activation between the products of experts: the definition, the kernels, the ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.codec.quantize_float8 import quantize_rows_ref
from fewbits.kernels.decoder.gated_activation import gated_activation_backward_ref, gated_activation_ref
from fewbits.kernels.decoder.gated_pairs import (
    GatedBackward,
    GatedForward,
    gated_pairs,
    gated_pairs_backward,
    gated_pairs_backward_ref,
    gated_pairs_ref,
    launch_bwd,
    launch_fwd,
)
from fewbits.kernels.product.pair_gradients import pair_gradients_ref


def problem(T: int, k: int, I: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Gate and up whose rows lie apart, and pairs in another order than routing's."""
    generator = torch.Generator().manual_seed(T + I)

    def random(*shape: int) -> Tensor:
        return (2 * torch.randn(*shape, generator=generator)).to(device, dtype)

    wide = random(T * k, 2 * I + 8)
    wide[:, 2 * I :] = torch.nan
    place = torch.randperm(T * k, generator=generator).to(device)
    return {
        "v": random(T * k, I), "gate_up": wide[:, : 2 * I], "routing": random(T, k), "place": place
    }  # fmt: skip


def empty_backward(p: dict[str, Tensor], activation: str, *, float8: bool, z: bool) -> GatedBackward:
    """Filled with NaN."""

    def new(shape: Any, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, torch.nan, device=p["v"].device).to(dtype)

    (P, I), dtype = p["v"].shape, p["v"].dtype
    q = new((P, 2 * I), torch.float8_e4m3fn) if float8 else None
    scale = new((P, 1), torch.float32) if float8 else None
    of_routing = new(p["routing"].shape, p["routing"].dtype)
    return GatedBackward(
        *p.values(),
        activation,
        new((P, 2 * I), dtype),
        of_routing,
        new((P, I), dtype) if z else None,
        q,
        scale,
    )


def check_float8(q: Tensor, scale: Tensor, rows: Tensor) -> None:
    """To the bit; but Triton's interpreter cuts mantissas off where a GPU rounds."""
    codes, scales = quantize_rows_ref(rows)
    assert torch.equal(scale, scales)
    if rows.is_cuda:
        assert torch.equal(q.view(torch.uint8), codes.view(torch.uint8))
    else:
        torch.testing.assert_close(q.float(), codes.float(), rtol=0.5, atol=2.0**-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_definitions_are_the_three_steps(dtype: torch.dtype) -> None:
    """The activation, and back through the pair's weight and the activation; one rounding fewer."""
    p = problem(5, 3, 7, dtype, "cpu")
    forward = gated_pairs(p["gate_up"])
    e, u = p["gate_up"].chunk(2, 1)
    assert torch.equal(forward.z, gated_activation_ref(e, u, "silu")) and forward.float8 is None
    back = gated_pairs_backward(*p.values(), needs_z=True)
    assert back.z is not None and torch.equal(back.z, forward.z)
    weight = p["routing"].reshape(-1)[p["place"]]
    dz, dweight = pair_gradients_ref(forward.z, p["v"], weight)
    de, du, _ = gated_activation_backward_ref(dz, e, u, "silu")
    eps = torch.finfo(dtype).eps
    need = torch.cat([de, du], 1)
    torch.testing.assert_close(back.dgate_up, need, rtol=2 * eps, atol=eps * 1e-3)
    assert torch.equal(back.drouting.view(-1)[p["place"]], dweight.to(dtype))


def test_the_gradient_is_autograds() -> None:
    p = problem(4, 2, 6, torch.float64, "cpu")
    gate_up, routing = p["gate_up"].clone().requires_grad_(), p["routing"].clone().requires_grad_()
    e, u = gate_up.chunk(2, 1)
    z = torch.nn.functional.silu(e) * u * routing.view(-1)[p["place"]][:, None]
    z.backward(p["v"])
    back = gated_pairs_backward(*p.values())
    torch.testing.assert_close(back.dgate_up, gate_up.grad)
    torch.testing.assert_close(back.drouting, routing.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("T", "k", "I"), [(3, 2, 32), (7, 3, 45), (1, 1, 600)])
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernels_equal_the_definition(
    T: int, k: int, I: int, activation: str, dtype: torch.dtype, kernel_device: str
) -> None:
    """float32 formulas whose exponential is another, one rounding: a few ulp, and sums of I such terms.

    Codes and scales are those of the kernel's own rows.
    """
    p = problem(T, k, I, dtype, kernel_device)
    eps = max(torch.finfo(dtype).eps, 8 * torch.finfo(torch.float32).eps)
    z = torch.full((T * k, I), torch.nan, dtype=dtype, device=kernel_device)
    q, scale = z.to(torch.float8_e4m3fn), torch.full((T * k, 1), torch.nan, device=kernel_device)
    forward, need = GatedForward(p["gate_up"], activation, z, q, scale), torch.empty_like(z)
    launch_fwd(forward)
    gated_pairs_ref(GatedForward(p["gate_up"], activation, need, None, None))
    torch.testing.assert_close(z, need, rtol=2 * eps, atol=eps)
    check_float8(q, scale, z)
    for float8 in (False, True):
        back = empty_backward(p, activation, float8=float8, z=float8)
        ref = empty_backward(p, activation, float8=float8, z=float8)
        launch_bwd(back)
        gated_pairs_backward_ref(ref)
        torch.testing.assert_close(back.dgate_up, ref.dgate_up, rtol=2 * eps, atol=8 * eps)
        torch.testing.assert_close(back.drouting, ref.drouting, rtol=2 * eps, atol=I * 8 * eps)
        if float8:
            torch.testing.assert_close(back.z, z, rtol=0, atol=0)
            check_float8(back.q, back.scale, back.dgate_up)


def test_rows_in_8_bits_on_a_cpu_and_what_does_not_fit() -> None:
    p = problem(3, 2, 16, torch.bfloat16, "cpu")
    forward, back = gated_pairs(p["gate_up"], quantize=True), gated_pairs_backward(*p.values(), quantize=True)
    for rows, float8 in ((forward.z, forward.float8), (back.dgate_up, back.float8)):
        codes, scales = quantize_rows_ref(rows)
        assert float8 is not None and torch.equal(float8[0].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(float8[1], scales)
    with pytest.raises(BadInput, match="gated_pairs_backward takes"):
        gated_pairs_backward(p["v"][1:], p["gate_up"], p["routing"], p["place"])
    with pytest.raises(BadInput, match="no gated activation 'relu'"):
        gated_pairs(p["gate_up"], activation="relu")
    with pytest.raises(BadInput, match="side by side"):
        gated_pairs(p["gate_up"][:, 1:])


def test_opcheck() -> None:
    p = problem(3, 2, 8, torch.float32, "cpu")
    back = empty_backward(p, "silu", float8=False, z=True)
    torch.library.opcheck(torch.ops.fewbits.gated_pairs_backward.default, tuple(back))
    z = torch.empty(6, 8)
    torch.library.opcheck(torch.ops.fewbits.gated_pairs.default, (p["gate_up"], "silu", z, None, None))


@pytest.mark.gpu
@pytest.mark.parametrize("I", [768, 1408, 14336])
def test_on_a_gpu(I: int) -> None:
    p = problem(300, 8, I, torch.bfloat16, "cuda")
    back = gated_pairs_backward(*p.values(), quantize=True, needs_z=True)
    ref = empty_backward(p, "silu", float8=False, z=True)
    gated_pairs_backward_ref(ref)
    torch.testing.assert_close(back.dgate_up, ref.dgate_up, rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(back.z, ref.z, rtol=2**-7, atol=2**-8)
    assert (back.drouting - ref.drouting).abs().max() / ref.drouting.abs().max() < 2**-7
    check_float8(*back.float8, back.dgate_up)
