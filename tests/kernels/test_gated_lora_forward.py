"""The gated activation with down's inner values: the definition, the CUDA kernel's source beside it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.decoder import gated_lora_forward_cuda as by_hand
from fewbits.kernels.decoder.gated_lora_backward_cuda import GatedTiling
from fewbits.kernels.decoder.gated_lora_forward import (
    LowRank,
    Quantized8,
    gated_lora_forward,
    gated_lora_forward_ref,
)
from fewbits.kernels.launch import nvrtc
from tests.kernels import emulated

E4, BF16 = torch.float8_e4m3fn, torch.bfloat16


class Problem:
    """Operands as in a decoder: gate and up side by side, xa too; down's A by rows."""

    def __init__(
        self, M: int, I: int, *, dense: bool, float8: bool, device: str = "cpu", r: int = 16
    ) -> None:
        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape).mul(scale).to(device, BF16)

        gate_up, xa = randn(M, 2 * I), randn(M, 2 * r, scale=0.3)
        self.e, self.u = gate_up[:, :I], gate_up[:, I:]
        self.low = (
            LowRank(xa[:, :r], randn(I, r, scale=0.3)),
            LowRank(xa[:, r:], randn(I, r, scale=0.3)),
        )
        self.down = randn(r, I, scale=0.1).t()
        self.h = torch.full((M, I), torch.nan, dtype=BF16, device=device) if dense else None
        codes = torch.full((M, I), torch.nan, device=device).to(E4)
        one = torch.full((1,), 20.0, device=device)
        self.quantized = Quantized8(codes, one, torch.zeros(1, device=device)) if float8 else None

    def operands(self, activation: str) -> by_hand.ForwardOperands:
        return by_hand.ForwardOperands(
            self.e, self.u, activation, self.low, self.down, self.h, self.quantized
        )

    def check(self, xa: Tensor, need: tuple[Tensor, Tensor]) -> None:
        """Few values of h are rounded the other way, where the activation is a last bit apart."""
        h, xa_ref = need
        assert error(xa, xa_ref) < 2.0**-8
        if self.h is not None:
            assert error(self.h, h) < 2.0**-9
        if self.quantized is not None:
            codes = (h.float() * 20).clamp(-448, 448).to(E4)
            other = codes.view(torch.uint8) != self.quantized.q.view(torch.uint8)
            assert other.float().mean() < 2.0**-9
            torch.testing.assert_close(self.quantized.amax[0], h.abs().max().float(), rtol=2.0**-7, atol=0)


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("scaling", [1.0, 0.5])
def test_both_outputs_and_one(scaling: float) -> None:
    both, one = Problem(5, 12, dense=True, float8=True, r=3), None
    need = gated_lora_forward_ref(both.e, both.u, "silu", both.low, both.down, scaling)
    for h in (both.h, None):
        one = gated_lora_forward(
            both.e, both.u, both.low, both.down, h=h, scaling=scaling, quantized=both.quantized
        )
        both.check(one, need)
    assert both.h is not None and torch.equal(both.h, need[0])


def test_what_does_not_fit_is_refused() -> None:
    problem = Problem(5, 12, dense=True, float8=False)
    with pytest.raises(BadInput, match="neither a 16-bit nor a float8"):
        gated_lora_forward(problem.e, problem.u, problem.low, problem.down, h=None)
    with pytest.raises(BadInput, match=r"down must be \(12, r\)"):
        gated_lora_forward(problem.e, problem.u, problem.low, problem.down.t(), h=problem.h)
    assert not by_hand.fits(problem.operands("silu"))
    assert by_hand.fits(Problem(5, 256, dense=True, float8=False).operands("silu"))
    assert not by_hand.fits(Problem(5, 256, dense=True, float8=False).operands("gelu"))
    assert not by_hand.fits(Problem(5, 256, dense=True, float8=False, r=8).operands("silu"))


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(
    ("shape", "activation", "dense", "float8", "how", "early"),
    [
        ((70, 512), "silu", True, False, GatedTiling(8, 2), False),
        ((90, 448), "gelu_tanh", True, True, GatedTiling(7, 2), True),
        ((7, 448), "silu", False, True, GatedTiling(14, 4), False),
    ],
    ids=str,
)
def test_the_source_gives_the_definition(
    tmp_path: Path, shape, activation: str, dense: bool, float8: bool, how: GatedTiling, early: bool
) -> None:
    problem = Problem(*shape, dense=dense, float8=float8)
    need = gated_lora_forward_ref(problem.e, problem.u, activation, problem.low, problem.down, 0.5)
    xa = torch.full((shape[0], 16), torch.nan, dtype=BF16)
    call = by_hand.call_of(problem.operands(activation), 0.5, xa, how)
    call.shares.fill_(torch.nan)
    defines = (*call.defines, ("EARLY", int(early)))
    library = emulated.build(tmp_path, by_hand.SOURCE, "gated_lora_forward_emulation.cpp", defines)
    assert library.shared_bytes() == by_hand.shared_bytes(how.warps)
    library.run(ctypes.byref(call.argument), call.blocks, call.sum_blocks)
    problem.check(xa, need)


@pytest.mark.skipif(nvrtc.missing() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_compiles_to_machine_code(capability: int) -> None:
    for dense, float8 in ((1, 0), (0, 1)):
        if capability >= 89 or not float8:
            defines = (("ACTIVATION", 0), ("WRITE_H", dense), ("FLOAT8", float8), ("WARPS", 14))
            assert nvrtc.cubin(by_hand.SOURCE, defines, capability)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 14336), (999, 6144), (7, 256)], ids=str)
@pytest.mark.parametrize("float8", [False, True])
def test_cuda_equals_the_definition(shape: tuple[int, int], float8: bool) -> None:
    if torch.cuda.get_device_capability()[0] != 9 or nvrtc.missing():
        pytest.skip("needs a Hopper GPU and NVRTC")
    problem = Problem(*shape, dense=not float8, float8=float8, device="cuda")
    need = gated_lora_forward_ref(problem.e, problem.u, "silu", problem.low, problem.down, 0.5)
    xa = by_hand.launch(problem.operands("silu"), 0.5)
    problem.check(xa, need)
    assert torch.equal(by_hand.launch(problem.operands("silu"), 0.5), xa)
