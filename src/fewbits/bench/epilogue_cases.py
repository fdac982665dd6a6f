"""Cases of what stands around the products: the epilogue of q, k and v, the thin products of LoRA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fewbits.bench.problem import Case, Problem, Run, Variant, randn
from fewbits.kernels.decoder import qkv_epilogue as epilogue
from fewbits.kernels.decoder.gated_activation_triton import LowRank
from fewbits.kernels.decoder.low_rank_add import low_rank_add_, low_rank_add_ref
from fewbits.kernels.decoder.qkv_epilogue import QKNorm, QKVExtras, QKVLayout, Rotation
from fewbits.kernels.decoder.rope import split_heads
from fewbits.kernels.product.lora_reduce import (
    ReduceSlice,
    lora_gradients,
    lora_reduce_ref,
    thin_products,
)

_RANK, _BATCH, _D = 16, 4, 128

# The epilogue of q, k and v.


def qkv_epilogue_cases(max_size: int) -> list[Case]:
    """4 x 2048 tokens of 32 + 8 + 8 heads of 128 with branches, and of Qwen3-1.7B's 16 + 8 + 8 with norms."""
    listed = []
    for format, heads in (("bfloat16", 48), ("bfloat16_norm", 32)):
        M, N = min(8192, max_size), (heads if max_size >= 6144 else 12) * _D
        read_again = 3 * N // 4 if format == "bfloat16_norm" else 0  # q and k of the product
        case = Case(
            op="qkv_epilogue",
            part="forward",
            format=format,
            M=M,
            N=N,
            bytes_moved=4 * M * N,
            tolerance=8e-3,
            build=_epilogue_problem,
        )
        listed += [case, replace(case, part="backward", bytes_moved=2 * M * (2 * N + read_again))]
    return listed


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
        o = epilogue.checked_arguments(qkv, rotation, layout, extras).operands()
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


# The thin products of LoRA.


def lora_reduce_cases(max_size: int) -> list[Case]:
    """t, dA and dB of an o projection of Llama-3.1-8B, of its q, k and v, of its gate and up."""
    listed = []
    for format, N, K in (
        ("bfloat16", 4096, 4096),
        ("bfloat16_qkv", 6144, 4096),
        ("bfloat16_gate_up", 28672, 4096),
    ):
        M, N, K = min(8192, max_size), min(N, 6 * max_size), min(K, max_size)
        case = Case(
            op="lora_reduce",
            part="backward",
            format=format,
            M=M,
            N=N,
            K=K,
            bytes_moved=2 * M * (N + K),
            tolerance=4e-3,
            build=_lora_problem,
        )
        listed.append(case)
    return listed


def _lora_problem(case: Case, device: torch.device) -> Problem:
    M, N, K = case.M, case.N, case.K
    parts = {"bfloat16": (1,), "bfloat16_qkv": (4, 1, 1), "bfloat16_gate_up": (1, 1)}[case.format]
    widths = [N * part // sum(parts) for part in parts]
    R = _RANK * len(parts)
    dy, x, xa = (randn(device, torch.bfloat16, M, n) for n in (N, K, R))
    slices, start = [], 0
    for width in widths:
        slices.append(ReduceSlice(start, randn(device, torch.bfloat16, width, _RANK) * 0.1, 2.0))
        start += width

    def ours() -> Sequence[Tensor]:
        t, da, dbs = lora_gradients(dy, x, xa, slices)
        return (t, *dbs, *(() if da is None else (da,)))

    def products() -> Sequence[Tensor]:
        """cuBLAS, one after the other."""
        t, dbs = x.new_empty(M, R), [torch.empty_like(s.b) for s in slices]
        thin_products(dy, xa, t, dbs, slices)
        return (t, *dbs, t.t() @ x)

    def exact() -> Sequence[Tensor]:
        t, dbs = lora_reduce_ref(dy.double(), xa.double(), [s._replace(b=s.b.double()) for s in slices])
        return (t, *dbs, t.to(torch.bfloat16).double().t() @ x.double())

    variants: dict[str, Variant] = {"fewbits": lambda: ours, "torch_mm": lambda: products}
    return Problem(variants, exact)


# A branch and the residual after a product.


def low_rank_add_cases(max_size: int) -> list[Case]:
    """After the o and down products of Llama-3.1-8B: with the residual forward, without it backward."""
    M = N = min(8192, max_size)
    case = Case(
        op="low_rank_add",
        part="forward",
        format="bfloat16",
        M=M,
        N=min(N, 4096),
        bytes_moved=0,
        tolerance=8e-3,
        build=_low_rank_add_problem,
    )
    size = 2 * case.M * case.N
    return [replace(case, bytes_moved=3 * size), replace(case, part="backward", bytes_moved=2 * size)]


def _low_rank_add_problem(case: Case, device: torch.device) -> Problem:
    z, residual = (randn(device, torch.bfloat16, case.M, case.N) for _ in range(2))
    branch = LowRank(
        randn(device, torch.bfloat16, case.M, _RANK), randn(device, torch.bfloat16, case.N, _RANK) * 0.1
    )
    rest = residual if case.part == "forward" else None
    buffer = torch.empty_like(z)

    def ours() -> Run:
        """In place, so every run adds once more; the first result is the one compared."""
        buffer.copy_(z)
        return lambda: (low_rank_add_(buffer, branch, rest),)

    def products() -> Sequence[Tensor]:
        """cuBLAS: a copy and a product that adds, and an addition."""
        y = torch.addmm(z, branch.x, branch.w.t())
        return (y if rest is None else y.add_(rest),)

    def exact() -> Sequence[Tensor]:
        wide = LowRank(branch.x.double(), branch.w.double())
        return (low_rank_add_ref(z.double(), wide, None if rest is None else rest.double()),)

    return Problem({"fewbits": ours, "torch_addmm": lambda: products}, exact)


MAKERS = (qkv_epilogue_cases, lora_reduce_cases, low_rank_add_cases)
