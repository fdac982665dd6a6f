"""Cases of the kernels that only move bytes between products: gated activations, rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.bench.loss_cases import MAKERS as LOSS_MAKERS
from fewbits.bench.problem import Case, Problem, Run, differentiated, randn
from fewbits.kernels.decoder.gated_activation import gated_activation, gated_activation_backward_ref
from fewbits.kernels.decoder.rope import apply_rope, rope

_Rotation = Callable[..., tuple[Tensor, Tensor]]

# Gated activations.


def gated_activation_cases(max_size: int) -> list[Case]:
    """SwiGLU of Llama-3.1-8B's and Qwen3-1.7B's feed-forward layer, 8192 tokens."""
    listed = []
    for M, I in ((8192, 14336), (8192, 6144)):
        M, I = min(M, max_size), min(I, max_size)
        forward = Case(
            op="gated_activation",
            part="forward",
            format="bfloat16",
            M=M,
            N=I,
            bytes_moved=3 * M * I * 2,
            tolerance=4e-3,
            build=_gated_activation_problem,
        )
        listed += [forward, replace(forward, part="backward", bytes_moved=5 * M * I * 2)]
    return listed


def _gated_activation_problem(case: Case, device: torch.device) -> Problem:
    gate_up = randn(device, torch.bfloat16, case.M, 2 * case.N)
    dh = randn(device, torch.bfloat16, case.M, case.N)

    def eager(x: Tensor) -> Tensor:  # what transformers' LlamaMLP does
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    functions: dict[str, Callable[[Tensor], Tensor]] = {"fewbits": gated_activation, "torch_eager": eager}
    if device.type == "cuda":
        functions["torch_compile"] = torch.compile(eager, dynamic=False)
        if find_spec("liger_kernel"):
            from liger_kernel.ops.swiglu import LigerSiLUMulFunction

            functions["liger"] = lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, -1))

    def exact() -> Sequence[Tensor]:
        gate, up = gate_up.double().chunk(2, -1)
        de, du, h = gated_activation_backward_ref(dh.double(), gate, up, "silu")
        return (h,) if case.part == "forward" else (torch.cat([de, du], -1),)

    trained = 0 if case.part == "forward" else 1
    return Problem({name: differentiated(f, (gate_up,), dh, trained) for name, f in functions.items()}, exact)


# Rotary positions.


def rope_cases(max_size: int) -> list[Case]:
    """q and k of Llama-3.1-8B (32 and 8 heads of 128), 4 x 2048 tokens: M tokens, N channels of both."""
    M, N = min(8192, max_size), 5120 if max_size >= 5120 else 640
    forward = Case(
        op="rope",
        part="forward",
        format="bfloat16",
        M=M,
        N=N,
        bytes_moved=4 * M * N,
        tolerance=8e-3,
        build=_rope_problem,
    )
    return [forward, replace(forward, part="backward")]


def _rope_problem(case: Case, device: torch.device) -> Problem:
    B, D = 4, 128
    S, heads = case.M // B, case.N // D
    shapes = [(B, S, heads - heads // 5, D), (B, S, heads // 5, D)]
    q, k, dq, dk = (randn(device, torch.bfloat16, *shape).transpose(1, 2) for shape in shapes * 2)
    angle = torch.outer(torch.arange(S), 500000.0 ** -(torch.arange(0, D, 2) / D)).to(device)
    cos, sin = (f(torch.cat([angle, angle], -1)).to(torch.bfloat16)[None] for f in (torch.cos, torch.sin))
    functions = _rope_functions(device)

    def exact() -> Sequence[Tensor]:
        inverse = case.part == "backward"
        q_in, k_in = (dq, dk) if inverse else (q, k)
        return rope(q_in.double(), k_in.double(), cos, sin, inverse=inverse)

    def variant(f: _Rotation) -> Callable[[], Run]:
        if case.part == "forward":
            return lambda: lambda: f(q, k, cos, sin)

        def prepare() -> Run:
            leaves = [t.detach().requires_grad_() for t in (q, k)]
            rotated = f(*leaves, cos, sin)
            return lambda: torch.autograd.grad(rotated, leaves, (dq, dk))

        return prepare

    return Problem({name: variant(f) for name, f in functions.items()}, exact)


def _rope_functions(device: torch.device) -> dict[str, _Rotation]:
    def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        def rotary(x: Tensor) -> Tensor:  # what transformers' apply_rotary_pos_emb does
            half = x.shape[-1] // 2
            rotated = torch.cat([-x[..., half:], x[..., :half]], -1)
            return x * cos[:, None] + rotated * sin[:, None]

        return rotary(q), rotary(k)

    functions: dict[str, _Rotation] = {"fewbits": apply_rope, "torch_eager": eager}
    if device.type == "cuda":
        functions["torch_compile"] = torch.compile(eager, dynamic=False)
        if find_spec("liger_kernel"):
            from liger_kernel.transformers.rope import liger_rotary_pos_emb

            functions["liger"] = liger_rotary_pos_emb
    return functions


MAKERS = (gated_activation_cases, rope_cases, *LOSS_MAKERS)
