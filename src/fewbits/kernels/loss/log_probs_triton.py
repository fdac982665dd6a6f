"""The Triton kernel of linear_log_probs.py, which has the formulas, and its launch.

One program takes one row of logits and passes over it once.
"""

from __future__ import annotations

from torch import Tensor

from fewbits.kernels.launch.jit import CompileCase, jit, next_power_of_2, on_device_of, tl
from fewbits.kernels.loss.cross_entropy_triton import KERNEL_DTYPES, capped_logits

_BLOCK = 4096


# 1. The kernel.


@jit
def _statistics_kernel(
    z_ptr, labels_ptr, entropy_ptr, top_ptr, V, stride_z, ignore_index, soft_cap, SOFT_CAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Entropy of row ``program_id(0)`` of z, and whether its label is the first of the largest logits."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride_z
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        tl.store(entropy_ptr + row, 0.0)
        tl.store(top_ptr + row, 0.0)
    else:
        picked = capped_logits(z_ptr, label, (label >= 0) & (label < V), soft_cap, SOFT_CAP)
        largest = -3.0e38  # finite: a block that is all -inf must not give inf - inf
        before = -float("inf")
        exp_sums = tl.zeros((BLOCK_V,), dtype=tl.float32)
        weighted = tl.zeros((BLOCK_V,), dtype=tl.float32)
        for start in range(0, V, BLOCK_V):
            offs = start + tl.arange(0, BLOCK_V)
            z = capped_logits(z_ptr, offs, offs < V, soft_cap, SOFT_CAP)
            new = tl.maximum(largest, tl.max(z, 0))
            e, rescale = tl.exp(z - new), tl.exp(largest - new)
            weighted = (weighted + (largest - new) * exp_sums) * rescale + tl.where(e > 0, e * (z - new), 0.0)
            exp_sums = exp_sums * rescale + e
            before = tl.maximum(before, tl.max(tl.where(offs < label, z, -float("inf")), 0))
            largest = new
        total = tl.sum(exp_sums, 0)
        tl.store(entropy_ptr + row, tl.log(total) - tl.sum(weighted, 0) / total)
        tl.store(top_ptr + row, tl.where((picked >= largest) & (picked > before), 1.0, 0.0))


# 2. The launch.


def launch_statistics(
    z: Tensor, labels: Tensor, entropy: Tensor, top: Tensor, ignore_index: int, soft_cap: float
) -> None:
    """`statistics_ref` by the Triton kernel: z (M, V) with contiguous rows, all else (M,) and contiguous."""
    M, V = z.shape
    if M == 0:
        return
    block = min(max(next_power_of_2(V), 128), _BLOCK)
    with on_device_of(z):
        _statistics_kernel[(M,)](
            z, labels, entropy, top, V, z.stride(0), ignore_index, float(soft_cap), SOFT_CAP=soft_cap != 0,
            BLOCK_V=block, num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip


_SIGNATURE = {"z_ptr": "*bf16", "labels_ptr": "*i64", "entropy_ptr": "*fp32", "top_ptr": "*fp32"}
_SIGNATURE |= {"V": "i32", "stride_z": "i32", "ignore_index": "i32", "soft_cap": "fp32"}
_SIGNATURE |= {"SOFT_CAP": "constexpr", "BLOCK_V": "constexpr"}
_ALIGNED = ("z_ptr", "labels_ptr", "entropy_ptr", "top_ptr", "V", "stride_z")
COMPILE_CASES = tuple(
    CompileCase(_statistics_kernel, signature, {"SOFT_CAP": cap, "BLOCK_V": _BLOCK}, aligned, 8, 80)
    for signature, cap, aligned in (
        (_SIGNATURE, False, _ALIGNED),
        (_SIGNATURE, True, ()),
        ({**_SIGNATURE, "z_ptr": "*fp32"}, True, _ALIGNED),
        ({**_SIGNATURE, "z_ptr": "*fp16"}, False, _ALIGNED),
    )
)
__all__ = ["COMPILE_CASES", "KERNEL_DTYPES", "launch_statistics"]
