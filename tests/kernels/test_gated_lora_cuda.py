"""The CUDA kernel of gated_lora_backward: its own source, run on a CPU; on a GPU too."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fewbits.kernels.decoder import gated_lora_backward_cuda as by_hand
from fewbits.kernels.decoder.gated_lora_backward import LowRank, Quantized8, gated_lora_backward_ref
from fewbits.kernels.decoder.gated_lora_backward_cuda import GatedTiling
from fewbits.kernels.decoder.gated_lora_backward_triton import BackwardOperands
from fewbits.kernels.launch import nvrtc
from tests.kernels import emulated

E4, BF16 = torch.float8_e4m3fn, torch.bfloat16
SCALINGS = (1.0, 0.5)
needs_compiler = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


class Problem:
    """Operands as in a decoder: gate and up in one buffer, t beside the gradients, one w by columns."""

    def __init__(
        self, M: int, I: int, activation: str, *, dense: bool, float8: bool, device: str = "cpu"
    ) -> None:
        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape).mul(scale).to(device, BF16)

        self.activation = activation
        self.dh, gate_up, xa, xd = (
            randn(M, I),
            randn(M, 2 * I),
            randn(M, 32, scale=0.3),
            randn(M, 16, scale=0.3),
        )
        self.e, self.u = gate_up[:, :I], gate_up[:, I:]
        gate, up, down = (randn(I, 16, scale=0.3), randn(I, 16, scale=0.3), randn(16, I, scale=0.3).t())
        self.low = LowRank(xa[:, :16], gate), LowRank(xa[:, 16:], up), LowRank(xd, down)
        wide = torch.full((M, 2 * I + 32), torch.nan, dtype=BF16, device=device)
        self.outputs = (wide[:, :I], wide[:, I : 2 * I]) if dense else (None, None)
        self.t = wide[:, 2 * I :]
        codes = torch.full((M, 2 * I), torch.nan, device=device).to(E4)
        one = torch.full((1,), 20.0, device=device)
        self.quantized = Quantized8(codes, one, torch.zeros(1, device=device)) if float8 else None

    def operands(self) -> BackwardOperands:
        return BackwardOperands(
            self.dh, self.e, self.u, self.activation, self.low, self.outputs, self.t, self.quantized
        )

    def check(self, dw: Tensor, need: tuple) -> None:
        """de, du and h may be rounded the other way where the activation is a last bit apart: few are."""
        de, du, gradients = need
        both = torch.cat([de, du], 1)
        if self.outputs[0] is not None:
            assert error(torch.cat(self.outputs, 1), both) < 2.0**-9
        if self.quantized is not None:
            codes = (both.float() * 20).clamp(-448, 448).to(E4)
            other = codes.view(torch.uint8) != self.quantized.q.view(torch.uint8)
            assert other.float().mean() < 2.0**-9
            torch.testing.assert_close(self.quantized.amax[0], both.abs().max().float(), rtol=2.0**-7, atol=0)
        assert error(self.t, gradients.t) < 2.0**-8
        for have, want in zip(dw, gradients[1:], strict=True):
            assert error(have, want) < 2.0**-10


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def emulate(libraries: Path, problem: Problem, how: GatedTiling, *, early: bool) -> Tensor:
    """dw, by the source; with ``early`` asynchronous copies arrive at once, else at the last moment."""
    operands = problem.operands()
    assert by_hand.fits(operands)
    call = by_hand.call_of(operands, SCALINGS, how)
    for made in (call.dw, *call.shares):
        made.fill_(torch.nan)
    defines = (*call.defines, ("EARLY", int(early)))
    library = emulated.build(libraries, by_hand.SOURCE, "gated_lora_emulation.cpp", defines)
    assert library.shared_bytes() == by_hand.shared_bytes(how.warps)
    library.run(ctypes.byref(call.argument), call.blocks, call.sum_blocks)
    return call.dw


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "activation", "dense", "float8", "how", "early"),
    [
        ((40, 256), "silu", True, False, GatedTiling(8, 2), False),
        ((70, 448), "silu", True, True, GatedTiling(7, 3), True),
        ((70, 512), "gelu_tanh", False, True, GatedTiling(16, 1), False),
        ((7, 448), "silu", False, True, GatedTiling(14, 4), True),
    ],
    ids=str,
)
def test_the_source_gives_the_definition(
    libraries: Path, shape, activation: str, dense: bool, float8: bool, how: GatedTiling, early: bool
) -> None:
    """Rows beyond the last step, several slabs, parts of the rows that are not alike or empty."""
    problem = Problem(*shape, activation, dense=dense, float8=float8)
    need = gated_lora_backward_ref(problem.dh, problem.e, problem.u, activation, problem.low, SCALINGS)
    dw = emulate(libraries, problem, how, early=early)
    problem.check(dw, need)


@needs_compiler
def test_gradients_may_lie_over_gate_and_up(libraries: Path) -> None:
    problem = Problem(70, 256, "silu", dense=True, float8=False)
    need = gated_lora_backward_ref(problem.dh, problem.e, problem.u, "silu", problem.low, SCALINGS)
    problem.outputs = (problem.e, problem.u)
    problem.check(emulate(libraries, problem, GatedTiling(8, 2), early=False), need)


@needs_compiler
def test_what_is_not_finite_is_seen_in_float8(libraries: Path) -> None:
    problem = Problem(40, 256, "silu", dense=False, float8=True)
    problem.dh[3, 5], problem.u[7, 9] = torch.inf, torch.nan
    de, du, _ = gated_lora_backward_ref(problem.dh, problem.e, problem.u, "silu", problem.low, SCALINGS)
    emulate(libraries, problem, GatedTiling(8, 2), early=False)
    assert problem.quantized is not None and problem.quantized.amax.isnan()
    bad = ~torch.cat([de, du], 1).isfinite()
    assert bad.any() and torch.equal(problem.quantized.q.float().isnan(), bad)
    problem.quantized.inverse_scale.fill_(torch.nan)
    emulate(libraries, problem, GatedTiling(8, 2), early=False)
    assert problem.quantized.q.float().eq(0).all()


def test_what_the_kernel_does_not_read_is_left_to_triton() -> None:
    def fits(**changed) -> bool:
        problem = Problem(40, 256, "silu", dense=True, float8=False)
        for name, value in changed.items():
            setattr(problem, name, value)
        return by_hand.fits(problem.operands())

    wide = torch.randn(40, 264).to(BF16)
    assert fits() and not fits(activation="gelu") and fits(dh=wide[:, 8:])
    assert not fits(dh=wide[:, 1:257]) and not fits(dh=torch.randn(40, 257).to(BF16)[:, :256])
    assert not by_hand.fits(Problem(40, 128, "silu", dense=True, float8=False).operands())


def test_plans_fill_a_gpu() -> None:
    for I in (14336, 6144, 3072, 11008, 8960):
        how = by_hand.plan(8192, I, 132)
        if I % 224 == 0 or I % 256 == 0:
            assert how is not None and I % (32 * how.warps) == 0
            blocks, slots = I // (32 * how.warps) * how.splits, 132 * (16 // how.warps)
            assert blocks / (-(-blocks // slots) * slots) > 0.9
            assert {by_hand.plan(M, I, 132).warps for M in range(1, 999, 7)} == {how.warps}
    assert by_hand.plan(8192, 14336, 132) == GatedTiling(14, 4) and by_hand.plan(8192, 100, 132) is None
    assert by_hand.plan(7, 14336, 132) == GatedTiling(14, 1)


@pytest.mark.skipif(nvrtc.missing() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_compiles_to_machine_code(capability: int) -> None:
    for dense, float8 in ((1, 0), (0, 1)):
        if capability >= 89 or not float8:
            defines = (("ACTIVATION", 0), ("WRITE_D", dense), ("FLOAT8", float8), ("WARPS", 14))
            assert nvrtc.cubin(by_hand.SOURCE, defines, capability)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 14336), (999, 6144), (7, 256)], ids=str)
@pytest.mark.parametrize("float8", [False, True])
def test_cuda_equals_the_definition(shape: tuple[int, int], float8: bool) -> None:
    if torch.cuda.get_device_capability()[0] != 9 or nvrtc.missing():
        pytest.skip("needs a Hopper GPU and NVRTC")
    problem = Problem(*shape, "silu", dense=not float8, float8=float8, device="cuda")
    need = gated_lora_backward_ref(problem.dh, problem.e, problem.u, "silu", problem.low, SCALINGS)
    dw = by_hand.launch(problem.operands(), SCALINGS)
    problem.check(dw, need)
    t = problem.t.clone()
    assert torch.equal(by_hand.launch(problem.operands(), SCALINGS), dw) and torch.equal(problem.t, t)
