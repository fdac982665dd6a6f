"""Everything between the product that makes q, k and v and attention, in one kernel; its gradient in another.

That is the bias, LoRA's branch, the norms of heads and the rotary embedding, each of which would otherwise
read and write q, k and v again.

For one product buffer qkv (M, >= (H + 2 Hk) D), M = B * S, head by head:

    z = qkv + bias + x_lora @ w^T                     x_lora (M, r)   w (heads * D, r)   bias ((H + 2 Hk) D,)
    n = z / sqrt(mean(z^2) + eps) * (offset + weight)   q and k alone, where the model norms them; weight (D,)
    y = rope(n)                                       q and k alone; the rotation of rope.py

Each of the three lines may be absent. Without norms all is done in place. With norms, q and k go to a buffer
of their own and the product stays as it is, for the backward pass to recompute n from: that costs no further
pass, as a norm's gradient reads its input anyway. Backward, from dq, dk, dv of any strides to dqkv:

    g = rope^-1(dy)          dweight = sum over rows and heads of g * n'        n' = z / sqrt(mean(z^2) + eps)
    dz = (g * w' - n' * mean(g * w' * n')) / sqrt(mean(z^2) + eps)              w' = offset + weight

dz is the gradient of qkv, of the low-rank products, and summed over rows of the bias.

Rounding: float32 throughout (float64 for float64), and one rounding at the end. (Transformers rounds after
the product, the branch, the norm, and three times in the rotation.)

Floor, 8192 tokens of 32 + 8 + 8 heads of 128 in bfloat16, at the 4.28 TB/s that a copy reaches on an H200:
forward, q and k alone 168 MB, 39 us; with branches also on v 201 MB, 47 us. Backward 201 MB, 47 us, and where
q and k are normed 285 MB, 67 us. Measured: 90 % of the floor without branches, 82 % with branches of rank 16.

The kernels are in qkv_epilogue_triton.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.decoder.gated_activation_triton import LowRank
from fewbits.kernels.decoder.qkv_epilogue_triton import Operands, launch_bwd, launch_fwd
from fewbits.kernels.decoder.rope import checked_tables, rope_ref, split_heads
from fewbits.kernels.decoder.rope_triton import KERNEL_DTYPES, MAX_RANK, Tables
from fewbits.kernels.launch.ops import one_by_one, run


class QKVLayout(NamedTuple):
    """A product's rows are the tokens of ``batch`` sequences; its columns the heads of q, then k, then v."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int


class Rotation(NamedTuple):
    """Rotary tables as a model's rotary embedding returns them: what `rope` takes."""

    cos: Tensor
    sin: Tensor
    position_ids: Tensor | None = None
    rotary_dim: int | None = None


class QKNorm(NamedTuple):
    """RMSNorm of each head of q and of k; ``offset`` is added to the weights (D,): 1 for Gemma."""

    q: Tensor
    k: Tensor
    eps: float
    offset: float = 0.0


class QKVExtras(NamedTuple):
    """What a family adds: a bias ((H + 2 Hk) * D,), branches of q, k and v, norms of q and k."""

    bias: Tensor | None = None
    low_rank: tuple[LowRank | None, LowRank | None, LowRank | None] = (None, None, None)
    norm: QKNorm | None = None


NOTHING = QKVExtras()


# 1. The definition.


def qkv_epilogue_ref(qkv: Tensor, operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, heads, S, D) as new tensors in the dtype of ``qkv``; autograd derives its backward pass."""
    parts = []
    for i, z in enumerate(_summed(qkv, operands)):
        if i < 2 and operands.weights:
            w = operands.offset + operands.weights[i].to(z.dtype)
            z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + operands.eps) * w
        parts.append((rope_ref(z, operands.tables) if i < 2 and operands.tables else z).to(qkv.dtype))
    return parts[0], parts[1], parts[2]


def qkv_epilogue_backward_ref(
    gradients: Sequence[Tensor], qkv: Tensor, operands: Operands
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients of q, k, v before the epilogue (B, heads, S, D), and of the norms' weights (2 or 0, D)."""
    dz, dweights = [], []
    before = _summed(qkv, operands) if operands.weights else ()
    for i, dy in enumerate(gradients):
        wide = dy.to(torch.promote_types(dy.dtype, torch.float32))
        g = rope_ref(wide, operands.tables, inverse=True) if i < 2 and operands.tables else wide
        if i < 2 and operands.weights:
            r = torch.rsqrt(before[i].square().mean(-1, keepdim=True) + operands.eps)
            n = before[i] * r
            dweights.append((g * n).sum((0, 1, 2)))
            g = g * (operands.offset + operands.weights[i].to(g.dtype))
            g = r * (g - n * (g * n).mean(-1, keepdim=True))
        dz.append(g.to(dy.dtype))
    return tuple(dz), torch.stack(dweights) if dweights else qkv.new_zeros(0, operands.D)


def _summed(qkv: Tensor, o: Operands) -> list[Tensor]:
    """The three parts of the product with bias and branches, at least float32: (B, heads, S, D)."""
    parts, first = [], 0
    for heads, (x, w) in zip(o.heads, o.low_rank, strict=True):
        z = qkv[:, first : first + heads * o.D]
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if o.bias is not None:
            z = z + o.bias[first : first + heads * o.D].to(z.dtype)
        if x.shape[1]:
            z = z + x.to(z.dtype) @ w.to(z.dtype).t()
        parts.append(z.reshape(-1, o.S, heads, o.D).transpose(1, 2))
        first += heads * o.D
    return parts


# 2. The ops: on a CPU they run the definition, on CUDA the kernels.


class FlatOperands(NamedTuple):
    """`Operands` as torch.library takes them, one by one."""

    sizes: Sequence[int]  # S, H, Hk, D, rotary_dim
    branches: Sequence[Tensor]  # three x (M, R), three w (N, R)
    bias: Tensor | None
    weights: Sequence[Tensor]  # of the norms of q and k, or none
    constants: Sequence[float]  # their eps and offset
    tables: Sequence[Tensor]  # cos and sin, or none
    positions: Tensor | None

    def operands(self) -> Operands:
        """What the definition and the kernels take."""
        S, H, Hk, D, rotary_dim = self.sizes
        low_rank = list(zip(self.branches[:3], self.branches[3:], strict=True))
        tables = self.tables
        rotation = Tables(tables[0], tables[1], self.positions, rotary_dim) if tables else None
        eps, offset = self.constants
        return Operands(S, (H, Hk, Hk), D, low_rank, self.bias, list(self.weights), eps, offset, rotation)


class Epilogue(NamedTuple):
    """The arguments of the op of the forward pass."""

    qkv: Tensor
    out: Tensor
    flat: FlatOperands


class EpilogueGradient(NamedTuple):
    """The arguments of the op of the backward pass."""

    gradients: Sequence[Tensor]
    qkv: Tensor
    dqkv: Tensor
    flat: FlatOperands
    weight_gradient: bool


@torch.library.custom_op("fewbits::qkv_epilogue", mutates_args=("qkv", "out"))
@one_by_one
def _qkv_epilogue(o: Epilogue) -> None:
    _into(o.qkv, o.out, o.flat.operands())


def _into(qkv: Tensor, out: Tensor, o: Operands) -> None:
    """``out`` (M, (H + Hk) D) takes q and k where there are norms; else it is empty, and qkv takes them."""
    q_k = out if o.weights else qkv
    first = 0
    for i, y in enumerate(qkv_epilogue_ref(qkv, o)):
        width = o.heads[i] * o.D
        target, value = (
            (q_k if i < 2 else qkv)[:, first : first + width],
            y.transpose(1, 2).reshape(-1, width),
        )
        if value.data_ptr() != target.data_ptr():  # else, in one row, it is what stands there already
            target.copy_(value)
        first += width


def _cuda_epilogue(o: Epilogue) -> None:
    operands = o.flat.operands()
    if o.qkv.dtype in KERNEL_DTYPES:
        launch_fwd(o.qkv, o.out if operands.weights else o.qkv, operands)
    else:
        _into(o.qkv, o.out, operands)


_qkv_epilogue.register_kernel("cuda")(one_by_one(_cuda_epilogue))


@torch.library.custom_op("fewbits::qkv_epilogue_backward", mutates_args=("dqkv",))
@one_by_one
def _qkv_epilogue_backward(o: EpilogueGradient) -> Tensor:
    return _backward_into(o)


def _backward_into(o: EpilogueGradient) -> Tensor:
    operands = o.flat.operands()
    dz, dweights = qkv_epilogue_backward_ref(o.gradients, o.qkv, operands)
    (H, Hk, _), batch = operands.heads, o.gradients[0].shape[0]
    for target, value in zip(split_heads(o.dqkv, batch, H, Hk, operands.D), dz, strict=True):
        target.copy_(value)
    return dweights.clone() if o.weight_gradient else dweights[:0].clone()


def _cuda_epilogue_backward(o: EpilogueGradient) -> Tensor:
    if o.dqkv.dtype not in KERNEL_DTYPES:
        return _backward_into(o)
    last = [g if g.stride(3) == 1 else g.contiguous() for g in o.gradients]
    return launch_bwd(last, o.qkv, o.dqkv, o.flat.operands(), o.weight_gradient)


_qkv_epilogue_backward.register_kernel("cuda")(one_by_one(_cuda_epilogue_backward))


@_qkv_epilogue_backward.register_fake
@one_by_one
def _(o: EpilogueGradient) -> Tensor:
    dtype = torch.promote_types(o.dqkv.dtype, torch.float32)
    trained = 2 if o.weight_gradient and o.flat.weights else 0
    return o.dqkv.new_empty(trained, o.flat.sizes[3], dtype=dtype)


# 3. The public functions, for hand-written autograd nodes.


def qkv_epilogue(
    qkv: Tensor, rotation: Rotation | None, layout: QKVLayout, extras: QKVExtras = NOTHING
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, S, D), k and v (B, Hk, S, D) for attention, as views of ``qkv`` or of a new buffer.

    Args:
        qkv: the product (B * S, >= (H + 2 Hk) D), rows perhaps apart. Without norms all of it is changed in
            place; with norms v alone is, and q and k are views of a new buffer (B * S, (H + Hk) D).
        rotation: the rotary tables, or None where a layer has none.
        layout: which columns are which heads.
        extras: bias, branches and norms.

    Raises:
        BadInput: shapes do not fit.
        Unsupported: a branch's rank is above 128.
    """
    flat = checked_arguments(qkv, rotation, layout, extras)
    _, H, Hk, D = layout
    out = qkv.new_empty(qkv.shape[0] if extras.norm else 0, (H + Hk) * D)
    run(_qkv_epilogue, _cuda_epilogue, qkv, Epilogue(qkv, out, flat))
    q, k, v = split_heads(qkv, *layout)
    return (*_split_q_k(out, layout), v) if extras.norm else (q, k, v)


def qkv_epilogue_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    dqkv: Tensor,
    rotation: Rotation | None,
    layout: QKVLayout,
    extras: QKVExtras = NOTHING,
    *,
    qkv: Tensor | None = None,
    weight_gradient: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """The gradient of the product, and of the norms' weights on request.

    Args:
        gradients: dq (B, H, S, D), dk and dv (B, Hk, S, D), of any strides.
        dqkv: receives the gradient: (B * S, >= (H + 2 Hk) D), rows perhaps apart; columns beyond stay.
        rotation: as in the forward pass.
        layout: as in the forward pass.
        extras: as in the forward pass; without norms, branches and bias have no part in it.
        qkv: the product as `qkv_epilogue` left it; only needed where there are norms.
        weight_gradient: whether the norms' weights train.

    Returns:
        The gradients (D,) in float32 of the weights of q's norm and of k's, the same every time; or None.

    Raises:
        BadInput: shapes do not fit.
        Unsupported: a branch's rank is above 128.
    """
    if extras.norm is None:
        extras = NOTHING
    elif qkv is None:
        raise BadInput(
            "qkv_epilogue_backward recomputes the norms of q and k from the product: give it as qkv."
        )
    flat = checked_arguments(dqkv, rotation, layout, extras)
    B, H, Hk, D = layout
    S = dqkv.shape[0] // B
    for gradient, heads in zip(gradients, (H, Hk, Hk), strict=True):
        if gradient.shape != (B, heads, S, D) or gradient.dtype != dqkv.dtype:
            raise BadInput(
                f"a gradient of {heads} heads must be {(B, heads, S, D)} {dqkv.dtype}; got "
                f"{tuple(gradient.shape)} {gradient.dtype}."
            )
    needs_dw = weight_gradient and extras.norm is not None
    product = dqkv[:0] if qkv is None else qkv
    arguments = EpilogueGradient(list(gradients), product, dqkv, flat, needs_dw)
    dw = run(_qkv_epilogue_backward, _cuda_epilogue_backward, dqkv, arguments)
    return (dw[0], dw[1]) if needs_dw else None


def _split_q_k(out: Tensor, layout: QKVLayout) -> tuple[Tensor, Tensor]:
    B, H, Hk, D = layout
    heads = out.view(B, -1, H + Hk, D).transpose(1, 2)
    return heads[:, :H], heads[:, H:]


def checked_arguments(
    qkv: Tensor, rotation: Rotation | None, layout: QKVLayout, extras: QKVExtras
) -> FlatOperands:
    """The arguments of the ops after the buffers, from qkv (B*S, (H + 2*Hk) * D)."""
    B, H, Hk, D = layout
    M, width = qkv.shape[0], (H + 2 * Hk) * D
    if qkv.dim() != 2 or qkv.shape[1] < width or M % B or (qkv.numel() and qkv.stride(1) != 1):
        raise BadInput(
            f"a product of {B} sequences and {H} + 2 x {Hk} heads of {D} has a multiple of {B} rows, with "
            f"{width} values or more next to each other; got {tuple(qkv.shape)}, strides {qkv.stride()}."
        )
    tables, positions, rotary_dim = [], None, D
    if rotation is not None:
        cos, sin, positions, rotary_dim = checked_tables((B, H, M // B, D), *rotation)
        tables = [cos, sin]
    if extras.bias is not None and extras.bias.shape != (width,):
        raise BadInput(f"the bias of this product is ({width},); got {tuple(extras.bias.shape)}.")
    weights, constants = [], [0.0, 0.0]
    if extras.norm is not None:
        weights, constants = [extras.norm.q, extras.norm.k], [float(c) for c in extras.norm[2:]]
        if any(w.shape != (D,) for w in weights):
            raise BadInput(
                f"the norms of q and k take weights ({D},); got {[tuple(w.shape) for w in weights]}."
            )
    xs, ws = _checked_branches(qkv, layout, extras.low_rank)
    bias = None if extras.bias is None else extras.bias.contiguous()
    sizes = [M // B, H, Hk, D, rotary_dim]
    return FlatOperands(sizes, [*xs, *ws], bias, weights, constants, tables, positions)


def _checked_branches(
    qkv: Tensor, layout: QKVLayout, low_rank: Sequence[LowRank | None]
) -> tuple[list[Tensor], list[Tensor]]:
    _, H, Hk, D = layout
    M, xs, ws = qkv.shape[0], [], []
    for heads, branch in zip((H, Hk, Hk), low_rank, strict=True):
        x, w = branch or (qkv.new_empty(M, 0), qkv.new_empty(heads * D, 0))
        if x.shape != (M, x.shape[1]) or w.shape != (heads * D, x.shape[1]):
            raise BadInput(
                f"a branch of {heads} heads has x ({M}, r) and w ({heads * D}, r); got {tuple(x.shape)}, "
                f"{tuple(w.shape)}."
            )
        if x.shape[1] > MAX_RANK:
            raise Unsupported(
                f"the kernel adds branches of rank {MAX_RANK} at most, not {x.shape[1]}: add it before."
            )
        xs.append(x)
        ws.append(w)
    return xs, ws
