"""The backward pass of a gated activation together with all that its low-rank branches need of it.

With e += x_e @ w_e^T, u += x_u @ w_u^T, dh += x_d @ w_d^T first, and de, du, h as in gated_activation.py:

    t_e = s_e * de @ w_e      dw_e = de^T @ x_e              x (M, r)   w, dw (I, r)   t (M, r)
    t_u = s_u * du @ w_u      dw_u = du^T @ x_u
                              dw_d = h^T @ x_d

In a feed-forward layer with LoRA these are the gradients of the inner values and of B of gate and of up,
and that of A^T of down: so de, du and h are read by nobody but the product for dx, which may take them in
E4M3.

Rounding: de, du and h are rounded to e's dtype before the products, as if they had been stored; the
products are summed in float32.

Floor: dh, e and u are read and de and du written, 10 bytes a value from 16 bits, or 8 in E4M3: at M = 8192,
I = 14336 1174 MB, 274 us, or 939 MB, 219 us, at the 4.28 TB/s that a copy reaches on an H200. One after the
other, with h written and read, de and du written, read by a quantiser and by the low-rank products, they
are 24 bytes: 658 us. Beyond the floor, t's shares, float32 for each slab of columns, are written and read.

On Hopper at rank 16 a kernel in CUDA C++ runs (gated_lora_backward.cu; slabs of 448 columns): 370 us, to E4M3
359. Elsewhere it is that of gated_lora_backward_triton.py (slabs of 64 columns), which takes 492 and 515 us
on an H200.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.codec.quantize_float8 import codes_under
from fewbits.kernels.codec.quantize_float8_triton import has_kernel as converts_float8
from fewbits.kernels.decoder import gated_lora_backward_cuda
from fewbits.kernels.decoder.gated_activation import gated_activation_backward_ref
from fewbits.kernels.decoder.gated_activation_triton import LowRank, Quantized8
from fewbits.kernels.decoder.gated_lora_backward_triton import (
    KERNEL_DTYPES,
    MAX_RANK,
    BackwardOperands,
    launch,
)

__all__ = [
    "BranchGradients",
    "GradientPlaces",
    "LowRank",
    "Quantized8",
    "gated_lora_backward",
    "gated_lora_backward_ref",
]


class BranchGradients(NamedTuple):
    """What the low-rank branches need; t in e's dtype, the others float32."""

    t: Tensor  # (M, 2 r): t_e, then t_u
    dw_gate: Tensor  # (I, r)
    dw_up: Tensor  # (I, r)
    dw_down: Tensor  # (I, r)


class GradientPlaces(NamedTuple):
    """Where the gradients of gate and up are written; both may be asked for together.

    Attributes:
        dense: (M, I) each; they may be gate and up themselves.
        quantized: in E4M3, (M, 2 I) under one scale, as in `gated_activation_backward_into`.
    """

    dense: tuple[Tensor, Tensor] | None = None
    quantized: Quantized8 | None = None


# 1. The definition.


def gated_lora_backward_ref(
    dh: Tensor,
    e: Tensor,
    u: Tensor,
    activation: str,
    low_rank: tuple[LowRank, LowRank, LowRank],
    scalings: tuple[float, float] = (1.0, 1.0),
) -> tuple[Tensor, Tensor, BranchGradients]:
    """de and du in e's dtype, and what the branches need.

    dh, e, u, de and du are (M, I); the branches x (M, r) and w (I, r) of gate, up and dh; t is (M, 2 r).
    """
    de, du, h = gated_activation_backward_ref(dh, e, u, activation, *low_rank)
    acc = torch.promote_types(e.dtype, torch.float32)
    (xe, we), (xu, wu), (xd, _) = ((b.x.to(acc), b.w.to(acc)) for b in low_rank)
    def_, duf = de.to(acc), du.to(acc)
    t = torch.cat([scalings[0] * (def_ @ we), scalings[1] * (duf @ wu)], 1).to(e.dtype)
    return de, du, BranchGradients(t, def_.t() @ xe, duf.t() @ xu, h.to(acc).t() @ xd)


# 2. The public function. It has no gradient: it is part of an autograd node of a whole feed-forward layer.


def gated_lora_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    low_rank: tuple[LowRank, LowRank, LowRank],
    *,
    activation: str = "silu",
    scalings: tuple[float, float] = (1.0, 1.0),
    into: GradientPlaces | None = None,
    out: Tensor | None = None,
) -> BranchGradients:
    """The backward pass and the low-rank products in one read of dh, gate and up.

    Args:
        dh: (M, I); rows contiguous but perhaps apart, as are those of all others.
        gate: (M, I), as before its low-rank branch was added.
        up: likewise.
        low_rank: what is added to gate, to up and to dh, all of one rank, 32 at most.
        activation: as in `gated_activation`.
        scalings: what t of gate and of up are multiplied by.
        into: where to write the gradients of gate and up; None: nowhere.
        out: where t goes, (M, 2 r) in gate's dtype, rows contiguous but perhaps apart; None makes it.

    Returns:
        `BranchGradients`; the same whatever the order of the programs.

    Raises:
        Unsupported: a rank above 32.
    """
    dense, quantized = into or GradientPlaces()
    _check(dh, gate, up, low_rank, dense, quantized)
    t = _place_of_t(gate, low_rank, out)
    fits = gate.dtype in KERNEL_DTYPES and (quantized is None or converts_float8(gate))
    if gate.is_cuda and fits and gate.numel():
        outputs = dense or (None, None)
        operands = BackwardOperands(dh, gate, up, activation, low_rank, outputs, t, quantized)
        by_hand = gated_lora_backward_cuda.is_faster(gate.device) and gated_lora_backward_cuda.fits(operands)
        return BranchGradients(
            t, *(gated_lora_backward_cuda.launch if by_hand else launch)(operands, scalings)
        )
    de, du, gradients = gated_lora_backward_ref(dh, gate, up, activation, low_rank, scalings)
    if dense is not None:
        dense[0].copy_(de)
        dense[1].copy_(du)
    if quantized is not None and gate.numel():
        both = torch.cat([de, du], 1)
        quantized.q.copy_(codes_under(both, quantized.inverse_scale))
        quantized.amax.copy_(torch.maximum(quantized.amax, both.abs().amax().float()))
    return gradients._replace(t=t.copy_(gradients.t))


def _place_of_t(gate: Tensor, low_rank: tuple[LowRank, LowRank, LowRank], out: Tensor | None) -> Tensor:
    shape = gate.shape[0], 2 * low_rank[0].x.shape[1]
    if out is None:
        return gate.new_empty(shape)
    if out.shape != shape or out.dtype != gate.dtype or _gaps(out):
        raise BadInput(
            f"out must be {shape} {gate.dtype} with contiguous rows; it is {tuple(out.shape)} {out.dtype} "
            f"{out.stride()}."
        )
    return out


def _check(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    low_rank: tuple[LowRank, LowRank, LowRank],
    into: tuple[Tensor, Tensor] | None,
    quantized: Quantized8 | None,
) -> None:
    for x in (dh, gate, up, *(into or ())):
        if x.dim() != 2 or x.shape != gate.shape or x.dtype != gate.dtype or _gaps(x):
            raise BadInput(
                "gated_lora_backward takes tensors of one shape (M, I) and dtype with contiguous rows; got "
                f"{tuple(x.shape)} {x.dtype} {x.stride()} beside {tuple(gate.shape)} {gate.dtype}."
            )
    (M, I), r = gate.shape, low_rank[0].x.shape[1]
    for branch in low_rank:
        if branch.x.shape != (M, r) or branch.w.shape != (I, r):
            have = tuple(branch.x.shape), tuple(branch.w.shape)
            raise BadInput(f"all low-rank branches have x ({M}, {r}) and w ({I}, {r}); got {have}.")
    if r > MAX_RANK:
        raise Unsupported(
            f"gated_lora_backward takes branches of rank {MAX_RANK} at most, not {r}: use "
            "gated_activation_backward_into and lora_gradients."
        )
    if into is None and quantized is None:
        raise BadInput("neither 16-bit nor float8 gradients are asked for: give `into` or `quantized`.")
    if quantized is not None and (
        quantized.q.shape != (M, 2 * I) or quantized.q.dtype != torch.float8_e4m3fn
    ):
        raise BadInput(
            f"quantized.q must be ({M}, {2 * I}) float8_e4m3fn; it is {tuple(quantized.q.shape)} "
            f"{quantized.q.dtype}."
        )


def _gaps(x: Tensor) -> bool:
    return x.stride(1) != 1 and x.shape[1] > 1
