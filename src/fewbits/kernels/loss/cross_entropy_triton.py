"""The Triton kernel of linear_cross_entropy.py and linear_log_probs.py, which have the formulas; its launch.

One program takes one row and passes over it twice: once for log-sum-exp, the sum and the label's logit, once
to overwrite each logit with its gradient. The second pass finds a row of at most 512 KiB in the L2 cache.

For linear_log_probs.py the first pass adds up the entropy as well, and finds the first of the largest logits.
For linear_cross_entropy_float8.py the second pass writes the gradient in 8 bits as well, or instead: the
first pass knows what the gradient will not exceed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.codec.quantize_float8_triton import inverse_of, scale_of_largest, to_float8
from fewbits.kernels.launch.jit import CompileCase, jit, next_power_of_2, on_device_of, tl

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Values of a row at a time. On an H200, 8 bits written: 1.59 ms for 8192 x 128256, 1.57 in blocks of 2048,
# 1.74 of 8192.
MOST_BLOCK = 4096


# 1. The kernel.


@jit
def capped_logits(z_ptr, offs, mask, soft_cap, SOFT_CAP: tl.constexpr):
    """A block of logits in float32, capped; -inf beyond the row."""
    z = tl.load(z_ptr + offs, mask=mask, other=-float("inf")).to(tl.float32)
    if SOFT_CAP:  # tanh(x) = 1 - 2 / (1 + exp(2 x)), right at both infinities
        z = tl.where(mask, soft_cap * (1 - 2 / (1 + tl.exp(2 * z / soft_cap))), -float("inf"))
    return z


@jit
def _write_gradient(
    z_ptr, q_ptr, V, label, lse, factor, inverse, label_smoothing, z_loss, soft_cap, SMOOTH: tl.constexpr,
    SOFT_CAP: tl.constexpr, DENSE: tl.constexpr, LARGEST: tl.constexpr, CUT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A row of logits becomes its gradient times ``factor`` (DENSE), and in 8 bits all but the label's."""
    slope = 1 + 2 * z_loss * lse
    for start in range(0, V, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)
        mask = offs < V
        z = capped_logits(z_ptr, offs, mask, soft_cap, SOFT_CAP)
        dz = slope * tl.exp(z - lse) - tl.where(offs == label, 1 - label_smoothing, 0.0)
        if SMOOTH:
            dz -= label_smoothing / V
        if SOFT_CAP:
            t = z / soft_cap
            dz *= 1 - t * t
        if DENSE:
            tl.store(z_ptr + offs, (dz * factor).to(z_ptr.dtype.element_ty), mask=mask)
        if LARGEST:
            others = tl.where(offs == label, 0.0, dz)
            q = to_float8(others, inverse, q_ptr.dtype.element_ty, LARGEST, False, CUT)
            tl.store(q_ptr + offs, q, mask=mask)


@jit
def _write_zeros(z_ptr, V, BLOCK_V: tl.constexpr):
    for start in range(0, V, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)
        zero = tl.zeros((BLOCK_V,), dtype=tl.float32).to(z_ptr.dtype.element_ty)
        tl.store(z_ptr + offs, zero, mask=offs < V)


@jit
def _write_nothing(
    z_ptr, q_ptr, scale_ptr, own_ptr, entropy_ptr, top_ptr, V, STATISTICS: tl.constexpr, DENSE: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Gradient and statistics of a row that does not count."""
    if STATISTICS:
        tl.store(entropy_ptr, 0.0)
        tl.store(top_ptr, 0.0)
    if DENSE:
        _write_zeros(z_ptr, V, BLOCK_V)
    if LARGEST:
        _write_zeros(q_ptr, V, BLOCK_V)
        tl.store(scale_ptr, 0.0)
        tl.store(own_ptr, 0.0)


@jit
def _largest_of_others(largest, picked, lse, V, label_smoothing, z_loss):
    """What no gradient of a row exceeds, the label's aside; from the row's largest logit and the label's."""
    p = tl.minimum(tl.exp(largest - lse), 1 - tl.exp(picked - lse))
    return tl.maximum(tl.abs(1 + 2 * z_loss * lse) * p + label_smoothing / V, 2.0**-20)


@jit
def _label_gradient(picked, lse, V, label_smoothing, z_loss, soft_cap, SOFT_CAP: tl.constexpr):
    """The gradient of the label's own logit."""
    dz = (1 + 2 * z_loss * lse) * tl.exp(picked - lse) - (1 - label_smoothing) - label_smoothing / V
    if SOFT_CAP:
        t = picked / soft_cap
        dz *= 1 - t * t
    return dz


@jit
def _cross_entropy_kernel(
    z_ptr, labels_ptr, dloss_ptr, loss_ptr, entropy_ptr, top_ptr, q_ptr, scale_ptr, own_ptr, V, stride_z,
    stride_q, ignore_index, label_smoothing, z_loss, soft_cap, SMOOTH: tl.constexpr, SOFT_CAP: tl.constexpr,
    SCALED: tl.constexpr, STATISTICS: tl.constexpr, DENSE: tl.constexpr, LARGEST: tl.constexpr,
    CUT: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The loss of row ``program_id(0)`` of z, whose rows are stride_z apart, and its gradient.

    STATISTICS: its entropy too, and whether its label is the first of the largest logits. DENSE: the
    gradient over z. LARGEST, of the 8-bit type or 0: in q under a scale, the label's apart in own_ptr. CUT:
    see `to_float8`.
    """
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride_z
    q_ptr += row * stride_q
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        _write_nothing(
            z_ptr, q_ptr, scale_ptr + row, own_ptr + row, entropy_ptr + row, top_ptr + row, V, STATISTICS,
            DENSE, LARGEST, BLOCK_V,
        )  # fmt: skip
    else:
        is_token = (label >= 0) & (label < V)
        picked = capped_logits(z_ptr, label, is_token, soft_cap, SOFT_CAP)  # before anyone writes over it
        largest = -3.0e38  # finite: a block that is all -inf must not give inf - inf
        exp_sums = tl.zeros((BLOCK_V,), dtype=tl.float32)
        plain_sums = tl.zeros((BLOCK_V,), dtype=tl.float32)
        weighted = tl.zeros((BLOCK_V,), dtype=tl.float32)
        before = tl.full((BLOCK_V,), -float("inf"), dtype=tl.float32)
        for start in range(0, V, BLOCK_V):
            offs = start + tl.arange(0, BLOCK_V)
            mask = offs < V
            z = capped_logits(z_ptr, offs, mask, soft_cap, SOFT_CAP)
            new = tl.maximum(largest, tl.max(z, 0))
            e, rescale = tl.exp(z - new), tl.exp(largest - new)
            if STATISTICS:
                weighted = (weighted + (largest - new) * exp_sums) * rescale
                weighted += tl.where(e > 0, e * (z - new), 0.0)
                before = tl.maximum(before, tl.where(offs < label, z, -float("inf")))
            exp_sums = exp_sums * rescale + e
            largest = new
            if SMOOTH:
                plain_sums += tl.where(mask, z, 0.0)
        total = tl.sum(exp_sums, 0)
        lse = largest + tl.log(total)
        if STATISTICS:
            tl.store(entropy_ptr + row, tl.log(total) - tl.sum(weighted, 0) / total)
            is_first = (picked >= largest) & (picked > tl.max(before, 0))
            tl.store(top_ptr + row, tl.where(is_first, 1.0, 0.0))
        loss = lse - (1 - label_smoothing) * picked + z_loss * lse * lse
        if SMOOTH:
            loss -= label_smoothing * (tl.sum(plain_sums, 0) / V)
        tl.store(loss_ptr + row, tl.where(is_token, loss, float("nan")))
        if DENSE or LARGEST:
            factor, inverse = 1.0, 1.0
            if SCALED:
                factor = tl.load(dloss_ptr + row)
            if LARGEST:
                bound = _largest_of_others(largest, picked, lse, V, label_smoothing, z_loss)
                scale = scale_of_largest(bound, LARGEST)
                inverse = inverse_of(scale)
                own = _label_gradient(picked, lse, V, label_smoothing, z_loss, soft_cap, SOFT_CAP)
                tl.store(scale_ptr + row, scale * factor)
                tl.store(own_ptr + row, own * factor)
            _write_gradient(
                z_ptr, q_ptr, V, label, lse, factor, inverse, label_smoothing, z_loss, soft_cap, SMOOTH,
                SOFT_CAP, DENSE, LARGEST, CUT, BLOCK_V,
            )  # fmt: skip


# 2. The launch.


class Gradient8(NamedTuple):
    """Where the gradient of z is written in 8 bits: ``q * scale``, and for each row's label ``own``.

    Attributes:
        q: (M, V) float8, rows contiguous; 0 at the labels.
        scale: (M, 1) float32.
        own: (M,) float32.
    """

    q: Tensor
    scale: Tensor
    own: Tensor


class Statistics(NamedTuple):
    """Of each row, (M,) float32: its entropy, and 1 where its label is the first of the largest logits."""

    entropy: Tensor
    top: Tensor


class _Given(NamedTuple):
    """What a launch takes, as `launch` says."""

    z: Tensor
    labels: Tensor
    dloss: Tensor | None
    loss: Tensor
    ignore_index: int
    options: tuple[float, float, float]
    dense: bool
    gradient8: Gradient8 | None = None


def launch(
    z: Tensor,
    labels: Tensor,
    dloss: Tensor | None,
    loss: Tensor,
    ignore_index: int,
    options: tuple[float, float, float],
    dense: bool,
    gradient8: Gradient8 | None = None,
) -> None:
    """`rows_ref` by the Triton kernel.

    z (M, V) has contiguous rows; labels int64, dloss and loss (M,) float32, all contiguous.
    """
    _launch(_Given(z, labels, dloss, loss, ignore_index, options, dense, gradient8))


def launch_with_statistics(statistics: Statistics, *arguments: Any) -> None:
    """`launch` with its ``arguments``; what it finds of each row besides goes to ``statistics``."""
    _launch(_Given(*arguments), statistics)


def _launch(o: _Given, statistics: Statistics | None = None) -> None:
    M, V = o.z.shape
    if M == 0:
        return
    label_smoothing, z_loss, soft_cap = o.options
    block = min(max(next_power_of_2(V), 128), MOST_BLOCK)
    q, scale, own = (o.loss, o.loss, o.loss) if o.gradient8 is None else o.gradient8
    entropy, top = (o.loss, o.loss) if statistics is None else statistics
    with on_device_of(o.z):
        _cross_entropy_kernel[(M,)](
            o.z, o.labels, o.loss if o.dloss is None else o.dloss, o.loss, entropy, top, q, scale, own, V,
            o.z.stride(0), V if o.gradient8 is None else q.stride(0), o.ignore_index, float(label_smoothing),
            float(z_loss), float(soft_cap), SMOOTH=label_smoothing != 0, SOFT_CAP=soft_cap != 0,
            SCALED=o.dloss is not None, STATISTICS=statistics is not None, DENSE=o.dense,
            LARGEST=0 if o.gradient8 is None else int(torch.finfo(q.dtype).max),
            CUT=not o.z.is_cuda, BLOCK_V=block, num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip


_SIGNATURE = {"z_ptr": "*bf16", "labels_ptr": "*i64", "dloss_ptr": "*fp32", "loss_ptr": "*fp32"}
_SIGNATURE |= dict.fromkeys(("entropy_ptr", "top_ptr", "q_ptr", "scale_ptr", "own_ptr"), "*fp32")
_SIGNATURE |= dict.fromkeys(("V", "stride_z", "stride_q", "ignore_index"), "i32")
_SIGNATURE |= dict.fromkeys(("label_smoothing", "z_loss", "soft_cap"), "fp32")
_CONSTANTS = ("SMOOTH", "SOFT_CAP", "SCALED", "STATISTICS", "DENSE", "LARGEST", "CUT", "BLOCK_V")
_SIGNATURE |= dict.fromkeys(_CONSTANTS, "constexpr")
_ALIGNED = (*(name for name in _SIGNATURE if name.endswith("_ptr")), "V", "stride_z", "stride_q")
_PLAIN = dict(zip(_CONSTANTS, (False, False, False, False, True, 0, False, MOST_BLOCK), strict=True))
_ALL = {**_PLAIN, "SMOOTH": True, "SOFT_CAP": True, "SCALED": True}
_E4M3 = {**_SIGNATURE, "q_ptr": "*fp8e4nv"}


def _case(
    signature: Mapping[str, str], constants: Mapping[str, object], aligned: tuple[str, ...]
) -> CompileCase:
    warps = min(max(int(str(constants["BLOCK_V"])) // 512, 1), 16)
    capability = 89 if constants["LARGEST"] else 80
    return CompileCase(_cross_entropy_kernel, signature, constants, aligned, warps, capability)


COMPILE_CASES = (
    _case(_SIGNATURE, _PLAIN, _ALIGNED),
    _case(_SIGNATURE, {**_PLAIN, "DENSE": False}, _ALIGNED),
    _case(_SIGNATURE, {**_PLAIN, "STATISTICS": True}, _ALIGNED),
    _case(_SIGNATURE, {**_PLAIN, "STATISTICS": True, "SOFT_CAP": True, "DENSE": False}, ()),
    _case({**_SIGNATURE, "z_ptr": "*fp32"}, {**_PLAIN, "STATISTICS": True, "SOFT_CAP": True}, _ALIGNED),
    _case(_SIGNATURE, _ALL, ()),
    _case({**_SIGNATURE, "z_ptr": "*fp32"}, {**_ALL, "BLOCK_V": 128}, _ALIGNED),
    _case({**_SIGNATURE, "z_ptr": "*fp16"}, _PLAIN, _ALIGNED),
    _case(_E4M3, {**_PLAIN, "DENSE": False, "LARGEST": 448}, _ALIGNED),
    _case(_E4M3, {**_PLAIN, "DENSE": False, "LARGEST": 448, "STATISTICS": True}, _ALIGNED),
    _case(_E4M3, {**_ALL, "LARGEST": 448}, _ALIGNED),
    _case({**_E4M3, "q_ptr": "*fp8e5"}, {**_PLAIN, "DENSE": False, "LARGEST": 57344}, _ALIGNED),
)
