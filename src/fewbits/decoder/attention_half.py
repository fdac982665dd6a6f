"""The attention half of a decoder layer as one autograd node.

    n = norm(x)     q, k, v = turn(head_norm(n @ W_qkv^T))     o = attend(q, k, v)     y = x + post(o @ W_o^T)

x, y (B, S, H); q (B, heads, S, D), k and v (B, kv_heads, S, D) are views of one product; ``turn`` is the
rotary embedding, of q and k; ``head_norm`` an RMSNorm of each head of q and k (Qwen 3, Gemma 3) or nothing;
``post`` the identity or a second norm (Gemma 2 and 3). All linears with their LoRA branches
(`fewbits.decoder.projection`), which are added where the rotation reads q, k and v.

Attention itself is a function that autograd can differentiate: the node runs it on detached q, k and v, keeps
that small graph, and differentiates it in its own backward pass. So any backend serves.

Kept for the backward pass: x, 1/rms, that graph (q, k, v, o and o's statistics), the branches' inner values,
and with head norms the product before them. With ``Keep.attention`` False, only x and inner values: the norm,
the product and the attention run again, the o product never does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewbits.decoder.both_halves import (
    Kept,
    Norm,
    Normed,
    Residual,
    backward_norm,
    gradient_of_a,
    normed_rows,
    on_own_dtype,
    reads_output,
)
from fewbits.decoder.keep import KEEP_PRODUCTS, Keep
from fewbits.decoder.projection import Projection, Rows
from fewbits.kernels.codec.quantize_float8 import quantize_rows
from fewbits.kernels.decoder.gated_activation_triton import LowRank
from fewbits.kernels.decoder.qkv_epilogue import (
    QKNorm,
    QKVExtras,
    QKVLayout,
    Rotation,
    qkv_epilogue,
    qkv_epilogue_backward,
)
from fewbits.kernels.launch.derivatives import keep_ways, once_differentiable
from fewbits.kernels.launch.matrix import rows_of
from fewbits.nn.tensor_group import TensorGroup

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, heads, S, D) to o (B, S, heads, D)


@dataclass(frozen=True)
class AttentionHalf:
    """What the node computes with; made anew for each forward pass from the layer's modules.

    Attributes:
        norm: the norm before the products.
        qkv: q, k and v, or one linear of all three in this order.
        o: the projection back.
        layout: B, heads, kv_heads and D.
        rotary: cos and sin (1 or B, S, d), as the model's rotary embedding gives them.
        attend: the attention.
        q_norm: the norm of each head of q, or None.
        k_norm: the norm of each head of k, or None.
        post_norm: the norm of the output before it is added to x, or None.
        keep: what is kept for the backward pass.
        stash: where x waits with ``keep.offload``.
        dtype: of the products and of all between them; None: x's (`fewbits.decoder.mlp_half.MLPHalf`).
        group: ranks that have the other heads; None: all heads are here.
    """

    norm: Norm
    qkv: Projection
    o: Projection
    layout: QKVLayout
    rotary: tuple[Tensor, Tensor]
    attend: Attend
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    post_norm: Norm | None = None
    keep: Keep = KEEP_PRODUCTS
    stash: Any = None
    dtype: torch.dtype | None = None
    group: TensorGroup | None = None

    def tensors(self) -> list[Tensor | None]:
        """What may train, in the order of the gradients."""
        norms = (self.norm, self.post_norm, self.q_norm, self.k_norm)
        weights = [None if norm is None else norm.weight for norm in norms]
        return [*weights, *self.qkv.tensors(), *self.o.tensors()]


def fused_attention(x: Tensor, half: AttentionHalf) -> Tensor:
    """``x + post(o(attend(q, k, v)))`` for x (B, S, H), contiguous."""
    y: Tensor = _Attention.apply(rows_of(x), half, *half.tensors())
    return y.view(x.shape)


@dataclass
class _Graph:
    """Attention's own small graph: o of detached q, k, v; and the product before head norms."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    raw: Tensor | None

    @property
    def rows(self) -> Tensor:
        """o as rows (M, heads * D)."""
        o = self.o.detach()
        return o.reshape(o.shape[0] * o.shape[1], -1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, half: AttentionHalf, *tensors: Tensor | None) -> Tensor:
        with on_own_dtype(x):
            n = normed_rows(x, half.norm, quantize=half.qkv.is_float8, dtype=half.dtype)
            xa = half.qkv.branch_inputs(n.dense)
            graph = _attend(half, n, xa)
            o = graph.rows
            rows = Rows(o, *quantize_rows(o)) if half.o.is_float8 else Rows(o)
            z, xa_o = half.o.product(rows), half.o.branch_inputs(o)
            post = Residual(x, z, half.post_norm)
            if half.group is None:
                half.o.finish_(z, xa_o, post.term)
            else:
                half.group.sum_(half.o.finish_(z, xa_o, half.group.once(post.term)))
            y = post.forward()
        kept = Kept(half.keep, half.stash)
        kept.inputs(x=x)
        kept.always(r=n.r, xa=xa, xa_o=xa_o, z=post.z, r_post=post.r)
        needs = ctx.needs_input_grad[6 : 6 + len(half.qkv.tensors())]
        kept.where(half.keep.normed and reads_output(x, n.dense.dtype, needs), normed=n.dense)
        kept.where(half.keep.attention, graph=graph)
        ctx.kept, ctx.half = kept, half
        keep_ways(ctx, x, *tensors)
        return y

    @staticmethod
    @once_differentiable("the fused attention block")
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        half: AttentionHalf = ctx.half
        needs = list(ctx.needs_input_grad[2:])
        with on_own_dtype(dy):
            dx, gradients = _backward(half, ctx.kept.take(), dy.contiguous(), needs, ctx.needs_input_grad[0])
        return dx, None, *gradients


def _backward(
    half: AttentionHalf, kept: dict[str, Any], dy: Tensor, needs: Sequence[bool], needs_dx: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    split = 4 + len(half.qkv.tensors())
    x, graph, xa = kept["x"], kept.pop("graph"), kept["xa"]
    dtype = half.dtype or x.dtype
    dz, dpost = Residual(x, kept["z"], half.post_norm, kept["r_post"]).backward(dy, needs[1], dtype)
    n, normed, outer = None, kept.pop("normed"), reads_output(x, dtype, needs[4:split])
    if graph is None or outer:
        quantize = graph is None and half.qkv.is_float8
        n = normed_rows(x, half.norm, quantize=quantize, dense=normed, dtype=dtype)
    if graph is None:
        assert n is not None
        graph = _attend(half, n, xa)

    inner = half.o.inner_gradients(Rows(dz), kept["xa_o"])
    gradients_o = half.o.gradients(dz, inner, graph.rows, needs[split:])
    do = half.o.backward_product(Rows(dz), inner[0]).view(graph.o.shape)
    dqkv, head_norms = _attend_backward(half, graph, do, xa, needs[2:4])
    del graph, do

    inner = half.qkv.inner_gradients(Rows(dqkv), xa)
    rows = n.dense if n is not None and outer else None
    da = None if outer else gradient_of_a(inner[0], x, half.norm, kept["r"], needs[4:split])
    gradients_qkv = half.qkv.gradients(dqkv, inner, rows, needs[4:split], da=da)
    dx = dnorm = None
    if needs_dx or needs[0]:
        dn = half.qkv.backward_product(Rows(dqkv), inner[0])
        if half.group is not None:
            half.group.sum_(dn)
        dx, dnorm = backward_norm(dn, x, half.norm, kept["r"], residual=dy, needs_dw=needs[0])
    return dx, [dnorm, dpost, *head_norms, *gradients_qkv, *gradients_o]


def _extras(half: AttentionHalf, xa: Tensor | None) -> QKVExtras:
    """Biases, branches and head norms, as the epilogue takes them."""
    branches = half.qkv.low_rank(xa)
    if len(branches) == 1 and branches[0] is not None:  # one linear makes q, k and v
        _, H, Hk, D = half.layout
        x, w = branches[0]
        branches = [LowRank(x, part) for part in w.split((H * D, Hk * D, Hk * D))]
    norm = None
    if half.q_norm is not None and half.k_norm is not None:
        norm = QKNorm(half.q_norm.weight, half.k_norm.weight, half.q_norm.eps, half.q_norm.offset)
    q, k, v = branches if len(branches) == 3 else (None, None, None)
    return QKVExtras(half.qkv.bias(), (q, k, v), norm)


def _attend(half: AttentionHalf, n: Normed, xa: Tensor | None) -> _Graph:
    qkv = half.qkv.product(n.rows)
    q, k, v = qkv_epilogue(qkv, Rotation(*half.rotary), half.layout, _extras(half, xa))
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    with torch.enable_grad():
        o = half.attend(q, k, v)
    return _Graph(q, k, v, o, None if half.q_norm is None else qkv)


def _attend_backward(
    half: AttentionHalf, graph: _Graph, do: Tensor, xa: Tensor | None, needs_norms: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradient of the product (M, N), and those of the head norms' weights."""
    dq, dk, dv = torch.autograd.grad(graph.o, (graph.q, graph.k, graph.v), do)
    raw = graph.raw
    graph.o = graph.q = graph.k = graph.v = do  # their memory is free from here on
    dqkv = half.qkv.gradient_buffer(do.shape[0] * do.shape[1], do)
    dnorms = qkv_epilogue_backward(
        (dq, dk, dv),
        dqkv,
        Rotation(*half.rotary),
        half.layout,
        _extras(half, xa),
        qkv=raw,
        weight_gradient=any(needs_norms),
    )
    if dnorms is None:
        return dqkv, [None, None]
    return dqkv, [dw if needed else None for dw, needed in zip(dnorms, needs_norms, strict=True)]
