"""The MLP half of a decoder layer as one autograd node.

    n = norm(x)      e, u = n @ W_gate^T, n @ W_up^T      h = f(e) * u      y = x + post(h @ W_down^T)

x, y (M, H), e, u, h (M, I); ``post`` is the identity, or a second norm (Gemma 2 and 3). All linears with
their LoRA branches (`fewbits.decoder.projection`), whose products with e, u and dh are added inside the
kernel of the activation.

Kept for the backward pass: x, 1/rms, the product of gate and up without its branches, the branches' inner
values. h is made again, and n where a weight trains (`Keep.normed` keeps it), one pass over memory each. With
``Keep.mlp`` False the product is made again too, and nothing of width I is kept. The down product never runs
twice.

In float8 the norm's output, h, and the gradients of both products are quantised by row; what is kept stays in
x's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.decoder.both_halves import Half, Normed, Residual, on_own_dtype, records_nothing
from fewbits.decoder.projection import Branch, InnerGradients, Projection, Rows
from fewbits.decoder.scales import Slot
from fewbits.decoder.trainable import PerHalf
from fewbits.kernels.codec.quantize_float8 import quantize_rows
from fewbits.kernels.decoder.gated_activation import (
    gated_activation_backward_into,
    gated_activation_into,
)
from fewbits.kernels.decoder.gated_activation_triton import GatedOutputs, LowRank, Quantized8
from fewbits.kernels.decoder.gated_lora_backward import BranchGradients, GradientPlaces, gated_lora_backward
from fewbits.kernels.decoder.gated_lora_backward_triton import MAX_RANK as ONE_PASS_RANK
from fewbits.kernels.decoder.gated_lora_forward import gated_lora_forward
from fewbits.kernels.launch.derivatives import keep_ways, once_differentiable
from fewbits.kernels.launch.matrix import rows_of


@dataclass(frozen=True, kw_only=True)
class MLPHalf(Half):
    """What the MLP node computes with; see `Half` for the rest.

    Attributes:
        gate_up: gate and up, or one linear of both, gate first.
        down: the projection back.
        activation: "silu", "gelu" or "gelu_tanh".
        delayed: float8 scales known beforehand, of h and of the gradient of gate and up; None: by row.
    """

    gate_up: Projection
    down: Projection
    activation: str
    delayed: tuple[Slot, Slot] | None = None

    @property
    def into(self) -> Projection:
        """Gate and up side by side: (M, 2 I)."""
        return self.gate_up

    @property
    def back(self) -> Projection:
        """The projection back: (M, H)."""
        return self.down


def fused_mlp(x: Tensor, half: MLPHalf) -> Tensor:
    """``x + post(down(f(gate(norm(x))) * up(norm(x))))`` for x (..., H), contiguous."""
    if records_nothing():
        return _compute(rows_of(x), half).y.view(x.shape)
    y: Tensor = _MLP.apply(rows_of(x), half, *half.tensors())
    # The layer's output; not `view`, because an in-place change of a view would lose FSDP2's hook on it.
    return torch.ops.aten._unsafe_view(y, x.shape)  # type: ignore[no-any-return]


class _Computed(NamedTuple):
    """What a forward pass makes: y (M, H), and what it came from."""

    y: Tensor
    n: Normed
    gate_up: Tensor
    post: Residual
    inner: tuple[Tensor | None, Tensor | None]


def _compute(x: Tensor, half: MLPHalf) -> _Computed:
    """The forward pass for x (M, H)."""
    with on_own_dtype(x):
        n = half.enter(x)  # (M, H)
        gate_up = half.gate_up.product(n.rows)  # (M, 2 I)
        xa = half.gate_up.branch_inputs(n.dense)  # (M, R)
        half.gate_up.add_biases_(gate_up)
        h, xa_down = _activate(half, gate_up, xa)  # (M, I), (M, r)
        y, post = half.leave(x, h, xa_down)  # (M, H)
    return _Computed(y, n, gate_up, post, (xa, xa_down))


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, half: MLPHalf, *tensors: Tensor | None) -> Tensor:
        y, n, gate_up, post, inner = _compute(x, half)
        _needs_dx, _half, *needs = ctx.needs_input_grad
        saved = half.save(x, n, post, inner, half.named(needs))
        saved.where(half.keep.mlp, gate_up=gate_up)
        saved.watch(tensors)
        ctx.kept, ctx.half = saved, half
        keep_ways(ctx, x, *tensors)
        return y

    @staticmethod
    @once_differentiable("the fused MLP block")
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        half: MLPHalf = ctx.half
        needs_dx, _half, *needs = ctx.needs_input_grad
        with on_own_dtype(dy):
            dx, gradients = _backward(half, ctx.kept.take(), dy.contiguous(), half.named(needs), needs_dx)
        return dx, None, *gradients.flat()


def _backward(
    half: MLPHalf, saved: dict[str, Any], dy: Tensor, needs: PerHalf[bool], needs_dx: bool
) -> tuple[Tensor | None, PerHalf[Tensor | None]]:
    """dx (M, H) and all other gradients by name, for dy (M, H)."""
    x, gate_up = saved["x"], saved.pop("gate_up")
    begun = half.begin_backward(saved, dy, needs)
    n = half.enter_again(x, begun, first_product=gate_up is None)
    if gate_up is None:
        assert n is not None
        gate_up = half.gate_up.add_biases_(half.gate_up.product(n.rows))  # (M, H) @ (H, 2 I)

    inner = half.down.inner_gradients(Rows(begun.dz), saved["xa_back"])  # t (M, r), dB (H, r)
    dh = half.down.backward_product(Rows(begun.dz), None)  # the activation's kernel adds the branch's part
    dense = any(need.weight or need.bias for need in needs.into)
    t_down = half.down.outside(inner.t)
    if not any(need.weight for need in needs.back) and _in_one_pass(half, t_down):
        assert t_down is not None
        dgate_up, activated = _activate_backward_in_one_pass(
            half, gate_up, saved["xa"], dh, t_down, dense=dense
        )
        del dh, gate_up
        # The gradient of A_down is (r, I) and known already.
        of_down = half.down.gradients(begun.dz, inner, None, needs.back, da=activated.dw_down.t())
        inner = _inner(half, activated)
    else:
        # (M, 2 I), (M, I)
        dgate_up, h = _activate_backward(half, gate_up, saved["xa"], dh, t_down, dense=dense)
        del dh, gate_up
        of_down = half.down.gradients(begun.dz, inner, h, needs.back)
        del h
        inner = half.gate_up.inner_gradients(dgate_up, saved["xa"])
    ended = half.end_backward(saved, dy, dgate_up, inner, n if begun.reads_output else None, needs, needs_dx)
    return ended.dx, PerHalf({"norm": ended.dnorm, "post_norm": begun.dpost}, ended.into, of_down)


def _activate(half: MLPHalf, gate_up: Tensor, xa: Tensor | None) -> tuple[Rows, Tensor | None]:
    """h (M, I), in float8 too where the down product takes it, perhaps only so; down's inner values."""
    # Gate and up are (M, I) each; their branches (M, r) and (I, r).
    (gate, up), branches = _halves(gate_up), _low_rank(half.gate_up, gate_up, xa)
    amax = quantized = None
    slot = None if half.delayed is None else half.delayed[0]
    if half.down.is_float8 and slot is not None and slot.has_scale:
        quantized = slot.buffer(gate.shape)  # E4M3 (M, I)
    elif half.down.is_float8:
        amax = _zeros(gate)  # (M,), which the kernel fills
    branch, (low_gate, low_up) = _only_branch(half.down), branches
    if branch is not None and low_gate is not None and low_up is not None and amax is None:
        # Dense rows are left out in bfloat16 alone, where that was measured.
        h = None if quantized is not None and gate.dtype == torch.bfloat16 else gate_up.new_empty(gate.shape)
        inner = gated_lora_forward(
            gate,
            up,
            (low_gate, low_up),
            half.down.all_a(gate.dtype).t(),
            h=h,
            activation=half.activation,
            scaling=branch.scaling,
            quantized=quantized,
        )
        return _with_float8(h, None, quantized, slot, gate.dtype), inner
    h = gate_up.new_empty(gate.shape)
    gated_activation_into(
        gate,
        up,
        h,
        activation=half.activation,
        low_rank_gate=low_gate,
        low_rank_up=low_up,
        amax=amax,
        quantized=quantized,
    )
    return _with_float8(h, amax, quantized, slot, gate.dtype), half.down.branch_inputs(h)


def _only_branch(projection: Projection) -> Branch | None:
    """The branch of a single linear, where it stands beside its weight."""
    (part, *others) = projection.parts
    return None if others or not projection.branches_beside else part.branch


def _activate_backward(
    half: MLPHalf,
    gate_up: Tensor,
    xa: Tensor | None,
    dh: Tensor,
    t_down: Tensor | None,
    *,
    dense: bool,
) -> tuple[Rows, Tensor]:
    """The gradient of gate and up (M, 2 I), and h again; in float8 alone where its scale is known.

    ``dense`` asks for the gradient in dh's dtype all the same.
    """
    branches = _low_rank(half.gate_up, gate_up, xa)
    into_dh = None
    if t_down is not None:
        into_dh = LowRank(t_down, half.down.all_a(dh.dtype).t())  # (M, r), (I, r): + t_down @ A_down
    (gate, up), h = _halves(gate_up), torch.empty_like(dh)  # each (M, I)
    amax = quantized = dgate_up = None
    slot = None if half.delayed is None else half.delayed[1]
    if half.gate_up.is_float8 and slot is not None and slot.has_scale:
        quantized = slot.buffer(gate_up.shape)  # E4M3 (M, 2 I)
    elif half.gate_up.is_float8:
        amax = _zeros(dh)
    if dense or quantized is None:
        dgate_up = half.gate_up.gradient_buffer(dh.shape[0], dh)  # (M, 2 I), in rows with room for t
    dgate, dup = (None, None) if dgate_up is None else _halves(dgate_up)
    gated_activation_backward_into(
        dh,
        gate,
        up,
        GatedOutputs(dgate, dup, h, amax, quantized),
        activation=half.activation,
        low_rank=(*branches, into_dh),
    )
    return _with_float8(dgate_up, amax, quantized, slot, dh.dtype), h


def _in_one_pass(half: MLPHalf, t_down: Tensor | None) -> bool:
    """Whether one kernel gives the activation's gradients and all that the branches need of them."""
    parts = (*half.gate_up.parts, *half.down.parts)
    ranks = {0 if part.branch is None else part.branch.a.shape[0] for part in parts}
    plain = half.gate_up.branches_beside and half.down.branches_beside
    return (
        t_down is not None and plain and len(parts) == 3 and len(ranks) == 1 and max(ranks) <= ONE_PASS_RANK
    )


def _activate_backward_in_one_pass(
    half: MLPHalf, gate_up: Tensor, xa: Tensor | None, dh: Tensor, t_down: Tensor, *, dense: bool
) -> tuple[Rows, BranchGradients]:
    """`_activate_backward`, with the products that the branches take from its results and from h."""
    low_gate, low_up = _low_rank(half.gate_up, gate_up, xa)  # each (M, r) and (I, r)
    assert low_gate is not None and low_up is not None
    gate, up = _halves(gate_up)  # each (M, I)
    slot = None if half.delayed is None else half.delayed[1]
    has_scale = half.gate_up.is_float8 and slot is not None and slot.has_scale
    quantized = slot.buffer(gate_up.shape) if has_scale and slot is not None else None
    dgate_up = half.gate_up.gradient_buffer(dh.shape[0], dh) if dense or not has_scale else None
    of_gate, of_up = (part.branch for part in half.gate_up.parts)
    assert of_gate is not None and of_up is not None
    activated = gated_lora_backward(
        dh,
        gate,
        up,
        (low_gate, low_up, LowRank(t_down, half.down.all_a(dh.dtype).t())),
        activation=half.activation,
        scalings=(of_gate.scaling, of_up.scaling),
        into=GradientPlaces(None if dgate_up is None else _halves(dgate_up), quantized),
        out=None if dgate_up is None else half.gate_up.inner_buffer(dgate_up),
    )
    if quantized is not None or not half.gate_up.is_float8:
        return _with_float8(dgate_up, None, quantized, slot, dh.dtype), activated
    assert dgate_up is not None
    q, scale = quantize_rows(dgate_up)  # (M, 2 I), (M, 1)
    if slot is not None:
        slot.record(scale.view(-1) * torch.finfo(q.dtype).max)
    return Rows(dgate_up, q, scale), activated


def _inner(half: MLPHalf, gradients: BranchGradients) -> InnerGradients:
    """What `Projection.inner_gradients` gives, from the kernel's results."""
    branches = half.gate_up.branches
    dbs = (gradients.dw_gate, gradients.dw_up)
    return InnerGradients(
        gradients.t, [db.to(branch.b.dtype) for db, branch in zip(dbs, branches, strict=True)]
    )


def _with_float8(
    dense: Tensor | None,
    amax: Tensor | None,
    quantized: Quantized8 | None,
    slot: Slot | None,
    dtype: torch.dtype,
) -> Rows:
    """Dense rows with their float8 form: the kernel's own, by row from its magnitudes, or none.

    ``dtype`` is that of their product, where they have no dense form.
    """
    if quantized is not None and slot is not None:
        return Rows(dense, quantized.q, slot.rows(quantized.q.shape[0]), slot.scale, dtype)
    assert dense is not None
    if amax is None:
        return Rows(dense)
    if slot is not None:
        slot.record(amax)
    return Rows(dense, *quantize_rows(dense, amax=amax))


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    I = x.shape[1] // 2
    return x[:, :I], x[:, I:]


def _low_rank(
    projection: Projection, gate_up: Tensor, xa: Tensor | None
) -> tuple[LowRank | None, LowRank | None]:
    """The branches of gate and of up, also where one linear makes both."""
    branches = projection.low_rank(xa)
    if len(branches) == 2:
        return branches[0], branches[1]
    if branches[0] is None:
        return None, None
    I = gate_up.shape[1] // 2
    return LowRank(branches[0].x, branches[0].w[:I]), LowRank(branches[0].x, branches[0].w[I:])


def _zeros(rows: Tensor) -> Tensor:
    return torch.zeros(rows.shape[0], dtype=torch.float32, device=rows.device)
