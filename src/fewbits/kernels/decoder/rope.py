"""Rotary position embedding (Su et al. 2021), of q and k at once, in the half-split layout of transformers.

Each head's first d values (d = rotary_dim <= D) are turned in pairs (i, i + d/2) by an angle that grows with
the position p of the token; the other values stay:

    y[i]       = x[i] * cos[p, i] - x[i + d/2] * sin[p, i]               i < d/2      x, y (B, H, S, D)
    y[i + d/2] = x[i + d/2] * cos[p, i] + x[i] * sin[p, i]               cos, sin (L, d/2)

The gradient is the rotation by the opposite angle, ``inverse``: dx from dy with -sin. (Tables that also carry
a factor, as those of YaRN do, keep it in both directions: the transposed map.) cos and sin have no gradient.

Where q, k and v come from products with low-rank branches (LoRA), these are added here before the rotation:

    x += (x_lora @ w^T)[b, s, h, :]          x_lora (B * S, r)   w (H * D, r)

Rounding: float32 throughout (float64 for float64), low-rank sums included, and one rounding at the end.
(Transformers rounds three times in 16 bits: both products, and their sum.)

Floor: q and k are read and written once. 8192 tokens of 32 + 8 heads of 128 in bfloat16 are 168 MB, and with
a v that receives its low-rank branch 201 MB: 39 us and 47 us at the 4.28 TB/s that a copy reaches on an H200.

The kernel is in rope_triton.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.decoder.gated_activation_triton import LowRank
from fewbits.kernels.decoder.rope_triton import KERNEL_DTYPES, MAX_RANK, Tables, launch
from fewbits.kernels.launch.ops import one_by_one

# 1. The definition.


def rope_ref(
    x: Tensor, tables: Tables, inverse: bool = False, low_rank: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """x (B, H, S, D) turned, in its dtype, contiguous."""
    xf, half = _widened(x, low_rank), tables.rotary_dim // 2
    cos, sin = (_rows(t, tables.positions, x.shape[2])[:, None, :, :half].to(xf.dtype) for t in tables[:2])
    if inverse:
        sin = -sin
    a, b, rest = xf[..., :half], xf[..., half : 2 * half], xf[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


def _widened(x: Tensor, low_rank: tuple[Tensor, Tensor] | None) -> Tensor:
    xf = x.to(torch.promote_types(x.dtype, torch.float32))
    if low_rank is None or low_rank[0].shape[1] == 0:
        return xf
    B, H, S, D = x.shape
    added = low_rank[0].to(xf.dtype) @ low_rank[1].to(xf.dtype).t()
    return xf + added.view(B, S, H, D).transpose(1, 2)


def _rows(table: Tensor, positions: Tensor | None, S: int) -> Tensor:
    """Rows of a table (B or 1, L, d) for each token: (B or 1, S, d)."""
    return table[:, :S] if positions is None else table[0][positions.long()]


# 2. The ops: on a CPU they run the definition, on CUDA the kernel.


class Rope(NamedTuple):
    """The arguments of the op of `rope`."""

    q: Tensor
    k: Tensor
    tables: Tables
    inverse: bool


class RopeInto(NamedTuple):
    """The arguments of the op of `rope_into`."""

    sources: Sequence[Tensor]
    outputs: Sequence[Tensor]
    low_rank_x: Sequence[Tensor]
    low_rank_w: Sequence[Tensor]
    tables: Tables
    inverse: bool


@torch.library.custom_op("fewbits::rope", mutates_args=())
@one_by_one
def _rope(o: Rope) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(o.q), torch.empty_like(o.k)
    for x, y in zip((o.q, o.k), out, strict=True):
        y.copy_(rope_ref(x, o.tables, o.inverse))
    return out


@torch.library.custom_op("fewbits::rope_into", mutates_args=("outputs",))
@one_by_one
def _rope_into(o: RopeInto) -> None:
    _into(o)


def _into(o: RopeInto) -> None:
    rotated = [
        rope_ref(x, o.tables, o.inverse, (lx, lw)) if i < 2 else _widened(x, (lx, lw)).to(x.dtype)
        for i, (x, lx, lw) in enumerate(zip(o.sources, o.low_rank_x, o.low_rank_w, strict=True))
    ]
    for output, y in zip(o.outputs, rotated, strict=True):
        output.copy_(y)


@_rope.register_kernel("cuda")
@one_by_one
def _(o: Rope) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(o.q), torch.empty_like(o.k)
    none = [o.q.new_empty(0, 0)] * 2
    _cuda_into(RopeInto((o.q, o.k), out, none, none, o.tables, o.inverse))
    return out


def _cuda_into(o: RopeInto) -> None:
    if o.sources[0].dtype in KERNEL_DTYPES:
        read = [x if x.stride(3) == 1 else x.contiguous() for x in o.sources]
        write = [x if x.stride(3) == 1 else x.contiguous() for x in o.outputs]
        launch(read, write, list(zip(o.low_rank_x, o.low_rank_w, strict=True)), o.tables, o.inverse)
        for x, y in zip(write, o.outputs, strict=True):
            if x is not y:
                y.copy_(x)
    else:
        _into(o)


_rope_into.register_kernel("cuda")(one_by_one(_cuda_into))


@_rope.register_fake
@one_by_one
def _(o: Rope) -> tuple[Tensor, Tensor]:
    return torch.empty_like(o.q), torch.empty_like(o.k)


# 3. The gradient, and the public functions.


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, positions, ctx.rotary_dim, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin, positions)


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin, positions = ctx.saved_tensors
    dq, dk = _rope(dq, dk, cos, sin, positions, ctx.rotary_dim, not ctx.inverse)
    return dq, dk, None, None, None, None, None


_rope.register_autograd(_backward, setup_context=_setup_context)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    position_ids: Tensor | None = None,
    rotary_dim: int | None = None,
    inverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """q and k turned by their positions, as new tensors laid out as they are; differentiable in q and k.

    Args:
        q: (B, H, S, D), any strides.
        k: (B, Hk, S, D), any strides.
        cos: (S, d) or (B, S, d) for token s of the sequence; or with ``position_ids`` (L, d) for position p.
            The second half of a row repeats the first, as transformers makes it; it is not read and may be
            absent.
        sin: likewise.
        position_ids: (S,) or (B, S), whole numbers below L, as for packed rows; None takes token s's row s.
        rotary_dim: d, the values of a head that are turned; None is the width of cos. To be given where the
            tables hold half rows.
        inverse: turn back.
    """
    tables = checked_tables(q.shape, cos, sin, position_ids, rotary_dim)
    _check_heads((q, k), (q, k))
    rotated: tuple[Tensor, Tensor] = _rope(q, k, *tables, inverse)
    return rotated


def apply_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`rope` with the arguments of transformers' ``apply_rotary_pos_emb``.

    Args:
        q: (B, H, S, D), or (B, S, H, D) with ``unsqueeze_dim`` 2.
        k: likewise.
        cos: (B or 1, S, d), as a model's rotary embedding returns it.
        sin: likewise.
        unsqueeze_dim: the axis of the heads.
    """
    if unsqueeze_dim == 1:
        return rope(q, k, cos, sin)
    rotated = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)


def rope_into(
    sources: Sequence[Tensor],
    outputs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    position_ids: Tensor | None = None,
    rotary_dim: int | None = None,
    inverse: bool = False,
    low_rank: Sequence[LowRank | None] = (None, None, None),
) -> None:
    """q and k turned, v moved, from one place to another or in place: for hand-written autograd nodes.

    Over a fused buffer: ``x = split_heads(qkv, ...); rope_into(x, x, cos, sin, low_rank=...)``; backward from
    attention's gradients: ``rope_into((dq, dk, dv), split_heads(dqkv, ...), cos, sin, inverse=True)``.

    Args:
        sources: q (B, H, S, D), k and perhaps v (B, Hk, S, D); any strides.
        outputs: where they go, of the same shapes with contiguous heads: the sources themselves, or apart.
        cos: as in `rope`.
        sin: as in `rope`.
        position_ids: as in `rope`.
        rotary_dim: as in `rope`.
        inverse: turn back, as gradients are.
        low_rank: for each source what is added before it is turned: x (B * S, r), w (H * D, r), r <= 128.
    """
    if len(sources) not in (2, 3) or len(outputs) != len(sources):
        raise BadInput(f"rope_into takes q, k and perhaps v: got {len(sources)} and {len(outputs)} tensors.")
    tables = checked_tables(sources[0].shape, cos, sin, position_ids, rotary_dim)
    _check_heads(sources, outputs)
    xs, ws = [], []
    for source, branch in zip(sources, low_rank, strict=False):
        B, H, S, D = source.shape
        x, w = branch or (source.new_empty(B * S, 0), source.new_empty(H * D, 0))
        if x.shape != (B * S, x.shape[1]) or w.shape != (H * D, x.shape[1]):
            have = tuple(x.shape), tuple(w.shape)
            raise BadInput(f"rope's branch has x ({B * S}, r) and w ({H * D}, r); got {have[0]}, {have[1]}.")
        if x.shape[1] > MAX_RANK:
            raise Unsupported(
                f"rope adds branches of rank {MAX_RANK} at most, not {x.shape[1]}: add it before."
            )
        xs.append(x)
        ws.append(w)
    _rope_into(list(sources), list(outputs), xs, ws, *tables, inverse)


def split_heads(
    qkv: Tensor, batch: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, S, D), k and v (B, Hk, S, D) as views of a fused buffer (B * S, >= (H + 2 Hk) D)."""
    width = heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
    parts = qkv[:, : sum(width)].split(width, 1)
    rows = qkv.shape[0] // batch
    q, k, v = (
        p.as_strided(
            (batch, p.shape[1] // head_dim, rows, head_dim),
            (rows * p.stride(0), head_dim, p.stride(0), 1),
            p.storage_offset(),
        )
        for p in parts
    )
    return q, k, v


def _check_heads(sources: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    q = sources[0]
    for x, y in zip(sources, outputs, strict=True):
        same = x.dim() == 4 and x.shape[0] == q.shape[0] and x.shape[2:] == q.shape[2:] and x.dtype == q.dtype
        if not same:
            raise BadInput(
                f"rope takes q (B, H, S, D) and others that differ in H only; got {tuple(q.shape)} {q.dtype} "
                f"and {tuple(x.shape)} {x.dtype}."
            )
        if y.shape != x.shape or y.dtype != x.dtype:
            raise BadInput(
                f"rope writes {tuple(x.shape)} {x.dtype}; the output is {tuple(y.shape)} {y.dtype}."
            )


def checked_tables(
    shape: Sequence[int], cos: Tensor, sin: Tensor, position_ids: Tensor | None, rotary_dim: int | None
) -> Tables:
    """Tables as the ops take them, (Bt, L, width) and positions (Bp, S), for q of a shape (B, H, S, D).

    Raises:
        BadInput: they do not fit it.
    """
    B, _, S, D = shape
    d = cos.shape[-1] if rotary_dim is None else rotary_dim
    if d % 2 or d > D or cos.shape != sin.shape or cos.shape[-1] not in (d, d // 2):
        raise BadInput(
            f"rope's tables must be of one shape (..., d) or (..., d / 2) with d = {d} even and at most {D}; "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}."
        )
    cos, sin = (t if t.dim() == 3 else t[None] for t in (cos, sin))
    positions = None
    if position_ids is None:
        fits = cos.shape[0] in (1, B) and cos.shape[1] >= S
    else:
        positions = position_ids if position_ids.dim() == 2 else position_ids[None]
        positions = positions if positions.stride(1) == 1 else positions.contiguous()
        fits = cos.shape[0] == 1 and positions.shape[0] in (1, B) and positions.shape[1] == S
    if not fits:
        raise BadInput(
            f"rope's tables {tuple(cos.shape)} and positions "
            f"{None if positions is None else tuple(positions.shape)} do not fit a batch of {B} x {S} tokens."
        )
    cos, sin = (t if t.stride(2) == 1 else t.contiguous() for t in (cos, sin))
    return Tables(cos, sin, positions, d)
