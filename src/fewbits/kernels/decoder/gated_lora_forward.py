"""A gated activation and the low-rank product that is taken from its result, in one pass.

With e += x_e @ w_e^T and u += x_u @ w_u^T first:

    h = f(e) * u        xa = s * h @ w_d        e, u, h (M, I)   x, xa (M, r)   w (I, r)

In a feed-forward layer with LoRA w_d is A^T of down. Then h is read by nobody but down's product, which may
take it in E4M3: h need not be written in 16 bits at all.

Rounding: h is rounded to e's dtype before the product and before it is brought to E4M3; xa is summed in
float32, scaled, and rounded once. No gradient: it is part of an autograd node of a whole feed-forward layer,
whose backward pass is gated_lora_backward.py.

Floor: e and u are read and h written, 6 bytes a value from 16 bits, or 5 in E4M3: at M = 8192, I = 14336
705 MB, 165 us, or 587 MB, 137 us, at the 4.28 TB/s that a copy reaches on an H200. Apart, with h written in
16 bits and read again, they are 8 and 9 bytes: 220 and 247 us. Beyond the floor xa's shares of the slabs of
columns are written and read: 0.3 bytes a value.

The kernel is in CUDA C++ (gated_lora_forward.cu), for Hopper at rank 16; elsewhere the two are done apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.decoder import gated_lora_forward_cuda as by_hand
from fewbits.kernels.decoder.gated_activation import gated_activation_into, gated_activation_ref
from fewbits.kernels.decoder.gated_activation_triton import LowRank, Quantized8

__all__ = ["LowRank", "Quantized8", "gated_lora_forward", "gated_lora_forward_ref"]


def gated_lora_forward_ref(
    gate: Tensor, up: Tensor, activation: str, low_rank: tuple[LowRank, LowRank], down: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """h and xa in gate's dtype; ``down`` is w_d (I, r)."""
    acc = torch.promote_types(gate.dtype, torch.float32)
    e, u = (
        z.to(acc) + branch.x.to(acc) @ branch.w.to(acc).t()
        for z, branch in zip((gate, up), low_rank, strict=True)
    )
    h = gated_activation_ref(e, u, activation).to(gate.dtype)
    return h, (scaling * (h.to(acc) @ down.to(acc))).to(gate.dtype)


def gated_lora_forward(
    gate: Tensor,
    up: Tensor,
    low_rank: tuple[LowRank, LowRank],
    down: Tensor,
    *,
    h: Tensor | None,
    activation: str = "silu",
    scaling: float = 1.0,
    quantized: Quantized8 | None = None,
) -> Tensor:
    """The activation into ``h`` and ``quantized``, and xa.

    Args:
        gate: (M, I); rows contiguous but perhaps apart, as in half of a fused buffer.
        up: likewise.
        low_rank: what is added to gate and to up.
        down: w_d (I, r), of any strides.
        h: (M, I) in gate's dtype, where to write; None if only ``quantized`` is wanted.
        activation: as in `gated_activation`.
        scaling: s.
        quantized: where to write h in E4M3, as in `gated_activation_into`.

    Returns:
        xa (M, r) in gate's dtype.

    Raises:
        BadInput: neither output is asked for, or down does not fit.
    """
    if h is None and quantized is None:
        raise BadInput("neither a 16-bit nor a float8 result is asked for: give `h` or `quantized`.")
    if down.dim() != 2 or down.shape[0] != gate.shape[1]:
        raise BadInput(
            f"down must be ({gate.shape[1]}, r) for gate {tuple(gate.shape)}; it is {tuple(down.shape)}."
        )
    if gate.is_cuda and by_hand.is_faster(gate.device):
        operands = by_hand.ForwardOperands(gate, up, activation, low_rank, down, h, quantized)
        if by_hand.fits(operands):
            return by_hand.launch(operands, scaling)
    h = torch.empty_like(gate, memory_format=torch.contiguous_format) if h is None else h
    low_gate, low_up = low_rank
    gated_activation_into(
        gate,
        up,
        h,
        activation=activation,
        low_rank_gate=low_gate,
        low_rank_up=low_up,
        quantized=quantized,
    )
    if scaling == 1:
        return h @ down.to(h.dtype)
    xa = h.new_empty(h.shape[0], down.shape[1])
    return torch.addmm(xa, h, down.to(h.dtype), beta=0, alpha=scaling, out=xa)
