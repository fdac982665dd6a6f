"""Cases of what stands between products: the epilogue of q, k and v."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fewbits.bench.problem import Case, Problem, Run, randn
from fewbits.kernels import qkv_epilogue as epilogue
from fewbits.kernels._gated_triton import LowRank
from fewbits.kernels.qkv_epilogue import QKNorm, QKVExtras, QKVLayout, Rotation
from fewbits.kernels.rope import split_heads

_RANK, _BATCH, _D = 16, 4, 128

# The epilogue of q, k and v.


def qkv_epilogue_cases(max_size: int) -> list[Case]:
    """4 x 2048 tokens of 32 + 8 + 8 heads of 128 with branches, and of Qwen3-1.7B's 16 + 8 + 8 with norms."""
    made = []
    for format, heads in (("bfloat16", 48), ("bfloat16_norm", 32)):
        M, N = min(8192, max_size), (heads if max_size >= 6144 else 12) * _D
        read_again = 3 * N // 4 if format == "bfloat16_norm" else 0  # q and k of the product
        case = Case(
            op="qkv_epilogue", part="forward", format=format, M=M, N=N, bytes_moved=4 * M * N, tolerance=8e-3,
            build=_epilogue_problem,
        )  # fmt: skip
        made += [case, replace(case, part="backward", bytes_moved=2 * M * (2 * N + read_again))]
    return made


def _epilogue_problem(case: Case, device: torch.device) -> Problem:
    norm, heads = case.format == "bfloat16_norm", case.N // _D
    kv_heads = heads // 4 if norm else heads // 6
    layout = QKVLayout(_BATCH, heads - 2 * kv_heads, kv_heads, _D)
    S = case.M // _BATCH
    angle = torch.outer(torch.arange(S), 500000.0 ** -(torch.arange(0, _D, 2) / _D)).to(device)
    cos, sin = (f(torch.cat([angle, angle], -1)).to(torch.bfloat16)[None] for f in (torch.cos, torch.sin))
    rotation = Rotation(cos, sin)
    qkv, dy = (randn(device, torch.bfloat16, case.M, case.N) for _ in range(2))
    branches = [
        LowRank(
            randn(device, torch.bfloat16, case.M, _RANK), randn(device, torch.bfloat16, h * _D, _RANK) * 0.1
        )
        for h in (layout.heads, kv_heads, kv_heads)
    ]
    weights = [randn(device, torch.bfloat16, _D) * 0.1 + 1 for _ in range(2)]
    extras = QKVExtras(
        low_rank=(branches[0], branches[1], branches[2]),
        norm=QKNorm(weights[0], weights[1], 1e-6) if norm else None,
    )
    gradients = split_heads(dy, *layout)

    def exact() -> Sequence[Tensor]:
        o = epilogue._operands(*epilogue._checked(qkv, rotation, layout, extras))
        if case.part == "forward":
            return epilogue.qkv_epilogue_ref(qkv.double(), o)
        return epilogue.qkv_epilogue_backward_ref([g.double() for g in gradients], qkv.double(), o)[0]

    return Problem(
        {"fewbits": _epilogue_variant(case.part, qkv, gradients, (rotation, layout, extras))}, exact
    )


def _epilogue_variant(
    part: str,
    qkv: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    args: tuple[Rotation, QKVLayout, QKVExtras],
) -> Callable[[], Run]:
    """In place, so every run of the forward pass turns further; the first result is the one compared."""
    buffer = torch.empty_like(qkv)

    def prepare() -> Run:
        buffer.copy_(qkv)
        if part == "forward":
            return lambda: epilogue.qkv_epilogue(buffer, *args)

        def backward() -> Sequence[Tensor]:
            epilogue.qkv_epilogue_backward(gradients, buffer, *args, qkv=qkv)
            return split_heads(buffer, *args[1])

        return backward

    return prepare


MAKERS = (qkv_epilogue_cases,)
