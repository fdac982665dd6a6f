"""Back through a pair's weight in a layer of experts: the gradients of its inner values and of the weight.

For the pair p of a token and an expert, with z_p its inner values, c_p the weight that routing gives it, and
u_p what comes back through the expert's second matrix from the token's unweighted gradient, in two parts: u
through the packed weight and extra through an adapter:

    dz_p = c_p * (u_p + extra_p)          dc_p = sum over I of z_p * (u_p + extra_p)

z, u, extra and dz are (P, I), c and dc (P,).

float32 throughout (float64 for float64), and one rounding of dz; dc stays float32.

Floor: z, u and extra are read once and dz is written. 65,536 pairs of 768 in bfloat16 are 101 MB each: 94 us
at the 4.28 TB/s that a copy reaches on an H200, where torch's operations, one after the other, take 450.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.launch.jit import CompileCase, jit, next_power_of_2, on_device_of, tl
from fewbits.kernels.launch.matrix import dense_rows
from fewbits.kernels.launch.ops import one_by_one, run
from fewbits.kernels.launch.prepared import start_kernel

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 2048


class WeightedPairs(NamedTuple):
    """Inner values, what comes back through both parts of a matrix, and the weights."""

    z: Tensor  # (P, I)
    u: Tensor  # (P, I)
    weights: Tensor  # (P,)
    extra: Tensor | None  # (P, I)


# 1. The definition.


def pair_gradients_ref(
    z: Tensor, u: Tensor, weights: Tensor, extra: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The formula above; shapes as in `pair_gradients`."""
    wide = torch.promote_types(z.dtype, torch.float32)
    u = u.to(wide) if extra is None else u.to(wide) + extra.to(wide)
    return (u * weights.to(wide)[:, None]).to(z.dtype), (z.to(wide) * u).sum(1)


# 2. The kernel.


@jit
def _pair_gradients_kernel(
    z_ptr, u_ptr, extra_ptr, weights_ptr, dz_ptr, dweights_ptr, I, stride_z, stride_u, stride_extra,
    EXTRA: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes one pair, BLOCK columns at a time."""
    pair = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_ptr + pair).to(tl.float32)
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, I, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = None if EVEN else columns < I
        z = tl.load(z_ptr + pair * stride_z + columns, mask=mask, other=None if EVEN else 0.0).to(tl.float32)
        u = tl.load(u_ptr + pair * stride_u + columns, mask=mask, other=None if EVEN else 0.0).to(tl.float32)
        if EXTRA:
            at = extra_ptr + pair * stride_extra + columns
            u += tl.load(at, mask=mask, other=None if EVEN else 0.0).to(tl.float32)
        tl.store(dz_ptr + pair * I + columns, (u * weight).to(dz_ptr.dtype.element_ty), mask=mask)
        products += z * u
    tl.store(dweights_ptr + pair, tl.sum(products, 0))


def launch(o: WeightedPairs, dz: Tensor, dweights: Tensor) -> None:
    """`pair_gradients_ref` of rows with contiguous columns into dz (P, I) and dweights (P,); not float64."""
    P, I = dz.shape
    block = min(_BLOCK, max(next_power_of_2(I), 16))
    extra = o.u if o.extra is None else o.extra
    with on_device_of(dz):
        start_kernel(
            _pair_gradients_kernel, (P,), (o.z, o.u, extra, o.weights, dz, dweights),
            I, o.z.stride(0), o.u.stride(0), extra.stride(0),
            EXTRA=o.extra is not None, EVEN=I % block == 0, BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip


_TYPES = {"z_ptr": "*bf16", "u_ptr": "*bf16", "extra_ptr": "*bf16", "weights_ptr": "*bf16"}
_TYPES |= {"dz_ptr": "*bf16", "dweights_ptr": "*fp32"}
_TYPES |= dict.fromkeys(("I", "stride_z", "stride_u", "stride_extra"), "i32")
_TYPES |= dict.fromkeys(("EXTRA", "EVEN", "BLOCK"), "constexpr")
_ALIGNED = (*(name for name in _TYPES if name.endswith("_ptr")), "I", "stride_z", "stride_u")
COMPILE_CASES = (
    CompileCase(_pair_gradients_kernel, _TYPES, {"EXTRA": True, "EVEN": False, "BLOCK": 1024}, _ALIGNED),
    CompileCase(
        _pair_gradients_kernel,
        {**_TYPES, "weights_ptr": "*fp32"},
        {"EXTRA": False, "EVEN": True, "BLOCK": _BLOCK},
        _ALIGNED,
    ),
)


# 3. The op: on a CPU it runs the definition, on CUDA the kernel.


@torch.library.custom_op("fewbits::pair_gradients", mutates_args=())
@one_by_one
def _pair_gradients(o: WeightedPairs) -> tuple[Tensor, Tensor]:
    return pair_gradients_ref(*o)


def _cuda(o: WeightedPairs) -> tuple[Tensor, Tensor]:
    if o.z.dtype not in KERNEL_DTYPES:
        return pair_gradients_ref(*o)
    dz = torch.empty(o.z.shape, dtype=o.z.dtype, device=o.z.device)
    dweights = torch.zeros(o.z.shape[0], dtype=torch.float32, device=o.z.device)
    if dz.numel():
        z, u = dense_rows(o.z), dense_rows(o.u)
        extra = None if o.extra is None else dense_rows(o.extra)
        launch(WeightedPairs(z, u, o.weights.contiguous(), extra), dz, dweights)
    return dz, dweights


_pair_gradients.register_kernel("cuda")(one_by_one(_cuda))


@_pair_gradients.register_fake
@one_by_one
def _(o: WeightedPairs) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(o.z.dtype, torch.float32)
    return o.z.new_empty(o.z.shape), o.z.new_empty(o.z.shape[0], dtype=wide)


# 4. The public function, for hand-written autograd nodes.


def pair_gradients(
    z: Tensor, u: Tensor, weights: Tensor, *, extra: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of pairs' inner values and of their weights.

    Args:
        z: (P, I), the inner values.
        u: (P, I) in z's dtype: what comes back through the packed matrix, without the pair's weight.
        weights: (P,), any floating dtype.
        extra: (P, I) in z's dtype: what comes back through an adapter; None: nothing.

    Returns:
        dz (P, I) in z's dtype, and the weights' gradient (P,) in float32 (float64 for float64).

    Raises:
        BadInput: shapes do not fit.
    """
    alike = [u] if extra is None else [u, extra]
    if weights.shape != z.shape[:1] or any(t.shape != z.shape or t.dtype != z.dtype for t in alike):
        have = [(tuple(t.shape), t.dtype) for t in (z, weights, *alike)]
        raise BadInput(f"pair_gradients takes z (P, I), weights (P,), u and extra like z; these are {have}.")
    return run(_pair_gradients, _cuda, z, WeightedPairs(z, u, weights, extra))
