"""The Triton kernel of linear_cross_entropy.py, which has the formulas, and its launch.

One program takes one row and passes over it twice: once for log-sum-exp, the sum and the label's logit, once
to overwrite each logit with its gradient. The second pass finds a row of at most 512 KiB in the L2 cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.kernels._launch import CompileCase, jit, next_power_of_2, on_device_of, tl

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# 1. The kernel.


@jit
def _logits(z_ptr, offs, mask, soft_cap, SOFT_CAP: tl.constexpr):
    """A block of logits in float32, capped; -inf beyond the row."""
    z = tl.load(z_ptr + offs, mask=mask, other=-float("inf")).to(tl.float32)
    if SOFT_CAP:  # tanh(x) = 1 - 2 / (1 + exp(2 x)), right at both infinities
        z = tl.where(mask, soft_cap * (1 - 2 / (1 + tl.exp(2 * z / soft_cap))), -float("inf"))
    return z


@jit
def _write_gradient(
    z_ptr, V, label, lse, factor, label_smoothing, z_loss, soft_cap, SMOOTH: tl.constexpr,
    SOFT_CAP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A row of logits becomes its gradient times ``factor``."""
    slope = 1 + 2 * z_loss * lse
    for start in range(0, V, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)
        mask = offs < V
        z = _logits(z_ptr, offs, mask, soft_cap, SOFT_CAP)
        dz = slope * tl.exp(z - lse) - tl.where(offs == label, 1 - label_smoothing, 0.0)
        if SMOOTH:
            dz -= label_smoothing / V
        if SOFT_CAP:
            t = z / soft_cap
            dz *= 1 - t * t
        tl.store(z_ptr + offs, (dz * factor).to(z_ptr.dtype.element_ty), mask=mask)


@jit
def _write_zeros(z_ptr, V, BLOCK_V: tl.constexpr):
    for start in range(0, V, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)
        zero = tl.zeros((BLOCK_V,), dtype=tl.float32).to(z_ptr.dtype.element_ty)
        tl.store(z_ptr + offs, zero, mask=offs < V)


@jit
def _cross_entropy_kernel(
    z_ptr, labels_ptr, dloss_ptr, loss_ptr, V, stride_z, ignore_index, label_smoothing, z_loss, soft_cap,
    SMOOTH: tl.constexpr, SOFT_CAP: tl.constexpr, SCALED: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The loss of row ``program_id(0)`` of z, and its gradient over z; z's rows are stride_z apart."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride_z
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if GRADIENT:
            _write_zeros(z_ptr, V, BLOCK_V)
    else:
        largest = -3.0e38  # finite: a block that is all -inf must not give inf - inf
        exp_sum = 0.0
        plain_sum = 0.0
        picked = 0.0
        for start in range(0, V, BLOCK_V):
            offs = start + tl.arange(0, BLOCK_V)
            mask = offs < V
            z = _logits(z_ptr, offs, mask, soft_cap, SOFT_CAP)
            new = tl.maximum(largest, tl.max(z, 0))
            exp_sum = exp_sum * tl.exp(largest - new) + tl.sum(tl.exp(z - new), 0)
            largest = new
            picked += tl.sum(tl.where(offs == label, z, 0.0), 0)
            if SMOOTH:
                plain_sum += tl.sum(tl.where(mask, z, 0.0), 0)
        lse = largest + tl.log(exp_sum)
        loss = lse - (1 - label_smoothing) * picked + z_loss * lse * lse
        if SMOOTH:
            loss -= label_smoothing * (plain_sum / V)
        loss = tl.where((label >= 0) & (label < V), loss, float("nan"))
        tl.store(loss_ptr + row, loss)
        if GRADIENT:
            factor = 1.0
            if SCALED:
                factor = tl.load(dloss_ptr + row)
            _write_gradient(
                z_ptr, V, label, lse, factor, label_smoothing, z_loss, soft_cap, SMOOTH, SOFT_CAP, BLOCK_V
            )  # fmt: skip


# 2. The launch.


def launch(
    z: Tensor,
    labels: Tensor,
    dloss: Tensor | None,
    loss: Tensor,
    ignore_index: int,
    options: tuple[float, float, float],
    gradient: bool,
    block_v: int | None = None,
) -> None:
    """`rows_ref` in place by the Triton kernel: z (M, V) becomes its gradient, ``loss`` takes (M,) values.

    z has contiguous rows; labels int64, dloss and loss float32, all contiguous.
    """
    M, V = z.shape
    if M == 0:
        return
    label_smoothing, z_loss, soft_cap = options
    block = block_v or min(max(next_power_of_2(V), 128), 8192)
    with on_device_of(z):
        _cross_entropy_kernel[(M,)](
            z, labels, loss if dloss is None else dloss, loss, V, z.stride(0), ignore_index,
            float(label_smoothing), float(z_loss), float(soft_cap), SMOOTH=label_smoothing != 0,
            SOFT_CAP=soft_cap != 0, SCALED=dloss is not None, GRADIENT=gradient, BLOCK_V=block,
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip


_SIGNATURE = {"z_ptr": "*bf16", "labels_ptr": "*i64", "dloss_ptr": "*fp32", "loss_ptr": "*fp32"}
_SIGNATURE |= {"V": "i32", "stride_z": "i32", "ignore_index": "i32"}
_SIGNATURE |= dict.fromkeys(("label_smoothing", "z_loss", "soft_cap"), "fp32")
_SIGNATURE |= dict.fromkeys(("SMOOTH", "SOFT_CAP", "SCALED", "GRADIENT", "BLOCK_V"), "constexpr")
_ALIGNED = ("z_ptr", "labels_ptr", "dloss_ptr", "loss_ptr", "V", "stride_z")
_PLAIN = {"SMOOTH": False, "SOFT_CAP": False, "SCALED": False, "GRADIENT": True, "BLOCK_V": 8192}
_ALL = {**_PLAIN, "SMOOTH": True, "SOFT_CAP": True, "SCALED": True}

COMPILE_CASES = (
    CompileCase(_cross_entropy_kernel, _SIGNATURE, _PLAIN, _ALIGNED, 16),
    CompileCase(_cross_entropy_kernel, _SIGNATURE, {**_PLAIN, "GRADIENT": False}, _ALIGNED, 16),
    CompileCase(_cross_entropy_kernel, _SIGNATURE, _ALL, (), 16),
    CompileCase(
        _cross_entropy_kernel, {**_SIGNATURE, "z_ptr": "*fp32"}, {**_ALL, "BLOCK_V": 128}, _ALIGNED, 1
    ),
    CompileCase(_cross_entropy_kernel, {**_SIGNATURE, "z_ptr": "*fp16"}, _PLAIN, _ALIGNED, 16),
)
