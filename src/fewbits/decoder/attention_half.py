"""The attention half of a decoder layer as one autograd node.

    n = norm(x)     q, k, v = turn(head_norm(n @ W_qkv^T))     o = attend(q, k, v)     y = x + post(o @ W_o^T)

x, y (B, S, H); q (B, heads, S, D), k and v (B, kv_heads, S, D) are views of one product; ``turn`` is the
rotary embedding, of q and k; ``head_norm`` an RMSNorm of each head of q and k (Qwen 3, Gemma 3), of all heads
of a row at once (OLMoE), or nothing;
``post`` the identity or a second norm (Gemma 2 and 3). All linears with their LoRA branches
(`fewbits.decoder.projection`), which are added where the rotation reads q, k and v; before norms of whole
rows, which the kernel that turns does not compute, they are added to the product.

Attention itself is a function that autograd can differentiate: the node runs it on detached q, k and v, keeps
that small graph, and differentiates it in its own backward pass. So any backend serves.

Kept for the backward pass: x, 1/rms, that graph (q, k, v, o and o's statistics), the branches' inner values,
and with head norms the product before them. With ``Keep.attention`` False, only x and inner values: the norm,
the product and the attention run again, the o product never does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.decoder.both_halves import (
    Half,
    Norm,
    Normed,
    Residual,
    backward_norm,
    normed_rows,
    on_own_dtype,
    records_nothing,
)
from fewbits.decoder.projection import Projection, Rows
from fewbits.decoder.trainable import PerHalf
from fewbits.kernels.codec.quantize_float8 import quantize_rows
from fewbits.kernels.decoder.gated_activation_triton import LowRank
from fewbits.kernels.decoder.qkv_epilogue import (
    NOTHING,
    QKNorm,
    QKVExtras,
    QKVLayout,
    Rotation,
    qkv_epilogue,
    qkv_epilogue_backward,
)
from fewbits.kernels.launch.derivatives import keep_ways, once_differentiable
from fewbits.kernels.launch.matrix import rows_of

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, heads, S, D) to o (B, S, heads, D)


@dataclass(frozen=True, kw_only=True)
class AttentionHalf(Half):
    """What the attention node computes with; see `Half` for the rest.

    Attributes:
        qkv: q, k and v, or one linear of all three in this order.
        o: the projection back.
        layout: B, heads, kv_heads and D.
        rotary: cos and sin (1 or B, S, d), as the model's rotary embedding gives them.
        attend: the attention.
        q_norm: the norm of q, or None.
        k_norm: the norm of k, or None.
        norms_rows: whether these two go over all heads of a row at once.
        factor: that the half is multiplied by before it is added; what attention gives is, for
            W (m o) = m (W o); the projection back has no bias then.
    """

    qkv: Projection
    o: Projection
    layout: QKVLayout
    rotary: tuple[Tensor, Tensor]
    attend: Attend
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    norms_rows: bool = False
    factor: float = 1.0

    @property
    def into(self) -> Projection:
        """q, k and v: (M, (heads + 2 kv_heads) * D)."""
        return self.qkv

    @property
    def back(self) -> Projection:
        """The projection back: (M, H)."""
        return self.o

    @property
    def norms(self) -> dict[str, Norm | None]:
        """See `Half.norms`."""
        return {**super().norms, "q_norm": self.q_norm, "k_norm": self.k_norm}


def fused_attention(x: Tensor, half: AttentionHalf) -> Tensor:
    """``x + post(o(attend(q, k, v)))`` for x (B, S, H), contiguous."""
    if records_nothing():
        return _compute(rows_of(x), half, alone=True).y.view(x.shape)
    y: Tensor = _Attention.apply(rows_of(x), half, *half.tensors())
    return y.view(x.shape)


@dataclass
class _Graph:
    """Attention's own small graph: o of detached q, k, v; and the product before norms of q and k.

    With norms of whole rows, that has biases and branches in it, and ``r`` is 1/rms of its q and k (M,).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    raw: Tensor | None
    r: tuple[Tensor, Tensor] | None = None

    @property
    def rows(self) -> Tensor:
        """o as rows (M, heads * D)."""
        o = self.o.detach()
        return o.reshape(o.shape[0] * o.shape[1], -1)


class _Computed(NamedTuple):
    """What a forward pass makes: y (M, H), and what it came from."""

    y: Tensor
    n: Normed
    graph: _Graph
    post: Residual
    inner: tuple[Tensor | None, Tensor | None]


def _compute(x: Tensor, half: AttentionHalf, *, alone: bool) -> _Computed:
    """The forward pass for x (M, H); ``alone``: no backward pass will follow."""
    with on_own_dtype(x):
        n = half.enter(x)  # (M, H)
        xa = half.qkv.branch_inputs(n.dense)  # (M, R)
        graph = _attend(half, n, xa, alone=alone)
        o = graph.rows  # (M, heads * D)
        rows = Rows(o, *quantize_rows(o)) if half.o.is_float8 else Rows(o)
        xa_o = half.o.branch_inputs(o)
        y, post = half.leave(x, rows, xa_o)  # (M, H)
    return _Computed(y, n, graph, post, (xa, xa_o))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, half: AttentionHalf, *tensors: Tensor | None) -> Tensor:
        y, n, graph, post, inner = _compute(x, half, alone=False)
        _needs_dx, _half, *needs = ctx.needs_input_grad
        saved = half.save(x, n, post, inner, half.named(needs))
        saved.where(half.keep.attention, graph=graph)
        saved.watch(tensors)
        ctx.kept, ctx.half = saved, half
        keep_ways(ctx, x, *tensors)
        return y

    @staticmethod
    @once_differentiable("the fused attention block")
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        half: AttentionHalf = ctx.half
        needs_dx, _half, *needs = ctx.needs_input_grad
        with on_own_dtype(dy):
            dx, gradients = _backward(half, ctx.kept.take(), dy.contiguous(), half.named(needs), needs_dx)
        return dx, None, *gradients.flat()


def _backward(
    half: AttentionHalf, saved: dict[str, Any], dy: Tensor, needs: PerHalf[bool], needs_dx: bool
) -> tuple[Tensor | None, PerHalf[Tensor | None]]:
    """dx (M, H) and all other gradients by name, for dy (M, H)."""
    x, graph, xa = saved["x"], saved.pop("graph"), saved["xa"]
    begun = half.begin_backward(saved, dy, needs)
    n = half.enter_again(x, begun, first_product=graph is None)
    if graph is None:
        assert n is not None
        graph = _attend(half, n, xa)

    inner = half.o.inner_gradients(Rows(begun.dz), saved["xa_back"])
    of_o = half.o.gradients(begun.dz, inner, graph.rows, needs.back)
    do = half.o.backward_product(Rows(begun.dz), inner.t).view(graph.o.shape)  # (B, S, heads, D)
    needs_norms = (needs.norms["q_norm"], needs.norms["k_norm"])
    dqkv, (dq_norm, dk_norm) = _attend_backward(half, graph, do, xa, needs_norms)
    del graph, do

    inner = half.qkv.inner_gradients(Rows(dqkv), xa)
    ended = half.end_backward(
        saved, dy, Rows(dqkv), inner, n if begun.reads_output else None, needs, needs_dx
    )
    norms = {"norm": ended.dnorm, "post_norm": begun.dpost, "q_norm": dq_norm, "k_norm": dk_norm}
    return ended.dx, PerHalf(norms, ended.into, of_o)


def _extras(half: AttentionHalf, xa: Tensor | None) -> QKVExtras:
    """Biases, branches and head norms, as the epilogue takes them; none behind norms of whole rows."""
    if half.norms_rows:
        return NOTHING
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


def _attend(half: AttentionHalf, n: Normed, xa: Tensor | None, *, alone: bool = False) -> _Graph:
    raw = qkv = half.qkv.product(n.rows)
    r = None
    if half.norms_rows:
        qkv, r = _norm_rows(half, half.qkv.finish_(raw, xa, None))
    q, k, v = qkv_epilogue(qkv, Rotation(*half.rotary), half.layout, _extras(half, xa))
    if alone:
        return _Graph(q, k, v, _multiplied(half, half.attend(q, k, v)), None)
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    with torch.enable_grad():
        o = _multiplied(half, half.attend(q, k, v))
    return _Graph(q, k, v, o, None if half.q_norm is None else raw, r)


def _multiplied(half: AttentionHalf, o: Tensor) -> Tensor:
    return o if half.factor == 1.0 else o * half.factor


def _norm_rows(half: AttentionHalf, raw: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The finished product (M, N) with q and k normalised over all their heads, and 1/rms of both (M,)."""
    assert half.q_norm is not None and half.k_norm is not None
    q, k, v = _columns(half, raw)
    of_q, of_k = normed_rows(q, half.q_norm), normed_rows(k, half.k_norm)
    return torch.cat([of_q.dense, of_k.dense, v], 1), (of_q.r, of_k.r)


def _norm_rows_backward(
    half: AttentionHalf, graph: _Graph, dqkv: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Take ``dqkv`` (M, N or more) back through those norms in place; the gradients of their weights."""
    assert graph.raw is not None and graph.r is not None
    gradients: list[Tensor | None] = []
    for i, norm in enumerate((half.q_norm, half.k_norm)):
        assert norm is not None
        dy = _columns(half, dqkv)[i]
        dx, dw = backward_norm(dy, _columns(half, graph.raw)[i], norm, graph.r[i], needs_dw=needs[i])
        dy.copy_(dx)
        gradients.append(dw)
    return gradients


def _columns(half: AttentionHalf, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The parts q, k and v of (M, N or more)."""
    _, H, Hk, D = half.layout
    return qkv[:, : H * D], qkv[:, H * D : (H + Hk) * D], qkv[:, (H + Hk) * D : (H + 2 * Hk) * D]


def _attend_backward(
    half: AttentionHalf, graph: _Graph, do: Tensor, xa: Tensor | None, needs_norms: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradient of the product (M, N), and those of the head norms' weights."""
    dq, dk, dv = torch.autograd.grad(graph.o, (graph.q, graph.k, graph.v), do)
    raw = None if half.norms_rows else graph.raw
    graph.o = graph.q = graph.k = graph.v = do  # their memory is free from here on
    dqkv = half.qkv.gradient_buffer(do.shape[0] * do.shape[1], do)
    dnorms = qkv_epilogue_backward(
        (dq, dk, dv),
        dqkv,
        Rotation(*half.rotary),
        half.layout,
        _extras(half, xa),
        qkv=raw,
        weight_gradient=any(needs_norms) and not half.norms_rows,
    )
    if half.norms_rows:
        return dqkv, _norm_rows_backward(half, graph, dqkv, needs_norms)
    if dnorms is None:
        return dqkv, [None, None]
    return dqkv, [dw if needed else None for dw, needed in zip(dnorms, needs_norms, strict=True)]
