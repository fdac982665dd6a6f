"""Adds a LoRA branch and the residual to the result of a matrix product, in place and in one pass.

    z += residual + x @ w^T             z, residual (M, N)   x (M, r)   w (N, r)

x and w are those of `LowRank`: in the forward pass ``x = s * h @ A^T`` and ``w = B``; in the backward pass
``x = s * dy @ B`` and ``w = A^T``. Either of branch and residual may be absent.

Rounding: float32 throughout (float64 for float64), and one rounding at the end.

Floor: z is read and written, the residual read: 3 * M * N * itemsize bytes. M = 8192, N = 4096 in bfloat16
are 201 MB, 47 us at the 4.28 TB/s that a copy reaches on an H200.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.decoder.gated_activation_triton import (
    KERNEL_DTYPES,
    MAX_RANK,
    LowRank,
    low_rank_arguments,
    operand,
    weight,
)
from fewbits.kernels.launch.jit import CompileCase, cdiv, jit, on_device_of, tl
from fewbits.kernels.launch.ops import passes_dispatcher
from fewbits.kernels.launch.prepared import start_kernel

# 1. The definition.


def low_rank_add_ref(z: Tensor, branch: LowRank | None, residual: Tensor | None) -> Tensor:
    """The sum (M, N) in z's dtype."""
    acc = torch.promote_types(z.dtype, torch.float32)
    y = z.to(acc)
    if branch is not None:
        y = y + branch.x.to(acc) @ branch.w.to(acc).t()
    return (y if residual is None else y + residual.to(acc)).to(z.dtype)


# 2. The kernel.


@jit(do_not_specialize=("M",))
def _low_rank_add_kernel(
    z_ptr, res_ptr, x_ptr, w_ptr, M, N, R, stride_z, stride_res, stride_x, stride_wn, stride_wr,
    RESIDUAL: tl.constexpr, BLOCK_R: tl.constexpr, EVEN_R: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes STEPS tiles one below the other of its columns, whose w it loads once."""
    blocks = tl.cdiv(N, BLOCK_N)
    offs_n = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    w = weight(w_ptr, stride_wn, stride_wr, offs_n, N, R, BLOCK_R, EVEN_R)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        first = (tl.program_id(0) // blocks) * STEPS + step
        offs_m = (first * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = None if EVEN else (offs_m < M)[:, None] & (offs_n < N)[None, :]
        z = operand(z_ptr, stride_z, x_ptr, stride_x, w, offs_m, offs_n, mask, M, R, BLOCK_R, EVEN_R)
        if RESIDUAL:
            at = offs_m[:, None] * stride_res + offs_n[None, :]
            residual = tl.load(res_ptr + at) if EVEN else tl.load(res_ptr + at, mask=mask, other=0.0)
            z += residual.to(tl.float32)
        at = offs_m[:, None] * stride_z + offs_n[None, :]
        tl.store(z_ptr + at, z.to(z_ptr.dtype.element_ty), mask=mask)


def launch(z: Tensor, branch: LowRank | None, residual: Tensor | None) -> None:
    """`low_rank_add_ref` in place by the Triton kernel; not for float64."""
    M, N = z.shape
    if z.numel() == 0:
        return
    (x, w, *strides), ranks = low_rank_arguments(branch, z)
    # The tile of the gated activation's forward pass, which moves the same three tensors of this size.
    block_n = min(max(8192 // (max(ranks.block, 16) * z.element_size()), 32), 128)
    block_m, steps, stages = (32, 1, 1) if z.element_size() > 2 else (16, 8, 3)
    with on_device_of(z):
        start_kernel(
            _low_rank_add_kernel, (cdiv(N, block_n) * cdiv(M, block_m * steps),),
            (z, z if residual is None else residual, x, w), M, N, ranks.rank, z.stride(0),
            0 if residual is None else residual.stride(0), *strides, RESIDUAL=residual is not None,
            BLOCK_R=ranks.block, EVEN_R=ranks.even, EVEN=M % (block_m * steps) == 0 and N % block_n == 0,
            BLOCK_M=block_m, BLOCK_N=block_n, STEPS=steps, STAGES=stages, num_warps=4,
        )  # fmt: skip


_TYPES = dict.fromkeys(("z_ptr", "res_ptr", "x_ptr", "w_ptr"), "*bf16")
_TYPES |= dict.fromkeys(("M", "N", "R", "stride_z", "stride_res", "stride_x", "stride_wn"), "i32")
_TYPES |= dict.fromkeys(("stride_wr", "RESIDUAL", "BLOCK_R", "EVEN_R", "EVEN"), "constexpr")
_TYPES |= dict.fromkeys(("BLOCK_M", "BLOCK_N", "STEPS", "STAGES"), "constexpr")
_CONSTANTS = {
    "stride_wr": 1, "RESIDUAL": True, "BLOCK_R": 16, "EVEN_R": True, "EVEN": True, "BLOCK_M": 16,
    "BLOCK_N": 128, "STEPS": 8, "STAGES": 3,
}  # fmt: skip
_ALIGNED = ("z_ptr", "res_ptr", "x_ptr", "w_ptr", "N", "stride_z", "stride_res", "stride_x", "stride_wn")
COMPILE_CASES = (
    CompileCase(_low_rank_add_kernel, _TYPES, _CONSTANTS, _ALIGNED),
    CompileCase(_low_rank_add_kernel, _TYPES, {**_CONSTANTS, "RESIDUAL": False, "EVEN": False}),
    CompileCase(_low_rank_add_kernel, _TYPES, {**_CONSTANTS, "BLOCK_R": 0}, _ALIGNED),
)


# 3. The op: on a CPU it runs the definition, on CUDA the kernel.


@torch.library.custom_op("fewbits::low_rank_add", mutates_args=("z",))
def _low_rank_add(z: Tensor, x: Tensor | None, w: Tensor | None, residual: Tensor | None) -> None:
    z.copy_(low_rank_add_ref(z, _branch(x, w), residual))


@_low_rank_add.register_kernel("cuda")
def _cuda(z: Tensor, x: Tensor | None, w: Tensor | None, residual: Tensor | None) -> None:
    if z.dtype in KERNEL_DTYPES:
        launch(z, _branch(x, w), residual)
    else:
        z.copy_(low_rank_add_ref(z, _branch(x, w), residual))


def _branch(x: Tensor | None, w: Tensor | None) -> LowRank | None:
    return None if x is None or w is None else LowRank(x, w)


# 4. The one public function, for hand-written autograd nodes.


def low_rank_add_(z: Tensor, branch: LowRank | None, residual: Tensor | None = None) -> Tensor:
    """``z += residual + branch.x @ branch.w^T``, in place.

    Args:
        z: (M, N); rows contiguous but perhaps apart.
        branch: x (M, r) and w (N, r), r <= 128; or None.
        residual: (M, N) in z's dtype, rows contiguous but perhaps apart; or None.

    Returns:
        ``z``.

    Raises:
        BadInput: shapes do not fit.
        Unsupported: the branch's rank is above 128.
    """
    M, N = z.shape
    for t in (z,) if residual is None else (z, residual):
        if t.shape != (M, N) or t.dtype != z.dtype or (t.stride(1) != 1 and N > 1):
            raise BadInput(
                f"low_rank_add_ takes tensors ({M}, {N}) of {z.dtype} with contiguous rows; got "
                f"{tuple(t.shape)} {t.dtype}, strides {t.stride()}."
            )
    x, w = None, None
    if branch is not None:
        x, w = branch
        r = x.shape[-1]
        if x.shape != (M, r) or w.shape != (N, r):
            have = tuple(x.shape), tuple(w.shape)
            raise BadInput(f"a low-rank branch has x ({M}, r) and w ({N}, r); got {have[0]} and {have[1]}.")
        if r > MAX_RANK:
            raise Unsupported(
                f"the kernel adds branches of rank {MAX_RANK} at most, not {r}: add it beforehand."
            )
    (_cuda if passes_dispatcher(z) else _low_rank_add)(z, x, w, residual)
    return z
