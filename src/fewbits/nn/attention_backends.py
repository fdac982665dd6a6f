"""The ways to compute attention: q (B, H, S, D), k and v (B, K, S, D) and a `Pattern` to (B, S, H, D).

None copies keys or values where its kernel reads grouped heads, and none waits for the device. Packages are
imported when their backend first runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fewbits.errors import Unsupported
from fewbits.formats.table_cache import keep_tables
from fewbits.nn.segments import Segments, uniform_segments

_BLOCK = 128
_FLEX_KINDS = 128  # windows, caps, head sizes, dtypes, with and without gradients, that one process compiles


@dataclass(frozen=True)
class Pattern:
    """Which keys a token sees, and what becomes of their scores; see `fewbits.nn.attention.attention`."""

    scale: float
    causal: bool
    window: int | None
    soft_cap: float | None
    segments: Segments | None

    def refuse(self, backend: str, **parts: bool) -> None:
        """Raise Unsupported if one of these is asked for."""
        for name, is_there in parts.items():
            if is_there:
                raise Unsupported(
                    f"the attention backend {backend!r} does not do {name}; leave the choice to fewbits."
                )


def visible(length: int, pattern: Pattern, device: torch.device, starts: Tensor | None = None) -> Tensor:
    """(length, length) bool: which keys (columns) each token sees; ``starts`` as from `Segments.starts`."""
    i = torch.arange(length, device=device)
    apart = i[:, None] - i[None, :]
    mask = apart >= 0 if pattern.causal else torch.ones_like(apart, dtype=torch.bool)
    if pattern.window is not None:
        mask &= apart < pattern.window
        if not pattern.causal:
            mask &= apart > -pattern.window
    if starts is not None:
        mask &= starts[:, None] == starts[None, :]
    return mask


def as_tokens(x: Tensor) -> Tensor:
    """(B, H, S, D) as (B * S, H, D): a view of a dense (B, S, H, D) buffer and of a slice of its heads."""
    return x.transpose(1, 2).flatten(0, 1)


def _as_one_row(x: Tensor) -> Tensor:
    """(B, H, S, D) as (1, H, B * S, D)."""
    return as_tokens(x).transpose(0, 1)[None]


def _dense_ref(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, starts: Tensor | None = None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // max(k.shape[1], 1)
    kf, vf = (t.to(wide).repeat_interleave(groups, 1) for t in (k, v))
    scores = q.to(wide) @ kf.mT * pattern.scale
    if pattern.soft_cap is not None:
        scores = pattern.soft_cap * torch.tanh(scores / pattern.soft_cap)
    mask = visible(q.shape[2], pattern, q.device, starts)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ vf).transpose(1, 2).to(q.dtype)


def _dense_sdpa(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, starts: Tensor | None = None) -> Tensor:
    masked = pattern.window is not None or starts is not None
    if masked and q.is_cuda and k.shape[1] != q.shape[1]:  # with a mask, torch's kernels want equal heads
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=visible(q.shape[2], pattern, q.device, starts) if masked else None,
        is_causal=pattern.causal and not masked,
        scale=pattern.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    ).transpose(1, 2)


def _by_segment(dense: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    """``dense`` over the segments: one after another on a CPU, with one mask on a GPU."""
    if pattern.segments is None:
        return dense(q, k, v, pattern)
    q1, k1, v1 = (_as_one_row(t) for t in (q, k, v))
    if q.is_cuda:
        out = dense(q1, k1, v1, pattern, pattern.segments.starts())
    else:
        parts = [slice(a, b) for a, b in pattern.segments.bounds()]
        out = torch.cat([dense(q1[:, :, s], k1[:, :, s], v1[:, :, s], pattern) for s in parts], 1)
    return out.reshape(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


def reference(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    """The definition.

    q is (B, H, S, D), k and v (B, K, S, D); the result is (B, S, H, D).
    """
    return _by_segment(_dense_ref, q, k, v, pattern)


def sdpa(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    """torch's scaled_dot_product_attention, with a mask only where the pattern needs one.

    q is (B, H, S, D), k and v (B, K, S, D); the result is (B, S, H, D).
    """
    pattern.refuse("sdpa", soft_cap=pattern.soft_cap is not None)
    return _by_segment(_dense_sdpa, q, k, v, pattern)


def _ragged(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> tuple[tuple[Any, ...], tuple[int, int]]:
    """Arguments as the kernels for rows of varying length have them, and the window as (left, right)."""
    B, _, S, _ = q.shape
    rows = pattern.segments
    if rows is None:
        rows = (
            _uniform(B, S, q.device)
            if not torch.compiler.is_compiling()
            else uniform_segments(B, S, q.device)
        )
    window = (-1 if pattern.window is None else pattern.window - 1, 0 if pattern.causal else -1)
    operands = (as_tokens(q), as_tokens(k), as_tokens(v))
    return (*operands, rows.cu_seqlens, rows.cu_seqlens, rows.max_seqlen, rows.max_seqlen), window


@keep_tables(maxsize=64)
def _uniform(rows: int, length: int, device: torch.device) -> Segments:
    return uniform_segments(rows, length, device)


def varlen(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    """torch's own FlashAttention for rows of varying length.

    q is (B, H, S, D), k and v (B, K, S, D); the result is (B, S, H, D).
    """
    pattern.refuse(
        "varlen",
        soft_cap=pattern.soft_cap is not None,
        window=pattern.window is not None and not pattern.causal,
    )
    from torch.nn.attention.varlen import varlen_attn

    arguments, window = _ragged(q, k, v, pattern)
    # later versions of torch ask whether fewer heads of keys are meant
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _parameters(varlen_attn) else {}
    out: Any = varlen_attn(*arguments, scale=pattern.scale, window_size=window, **grouped)
    return _as_batch(out, q)


def flash2(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    """The package flash_attn.

    q is (B, H, S, D), k and v (B, K, S, D); the result is (B, S, H, D).
    """
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    return _by_package(flash_attn_varlen_func, q, k, v, pattern)


def flash3(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    """FlashAttention-3, the package flash_attn_interface.

    q is (B, H, S, D), k and v (B, K, S, D); the result is (B, S, H, D).
    """
    pattern.refuse("flash3", soft_cap=pattern.soft_cap is not None)  # its backward pass does not
    from flash_attn_interface import flash_attn_varlen_func  # type: ignore[import-not-found]

    return _by_package(flash_attn_varlen_func, q, k, v, pattern)


def _by_package(function: Any, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    arguments, window = _ragged(q, k, v, pattern)
    out = function(
        *arguments,
        softmax_scale=pattern.scale,
        causal=pattern.causal,
        window_size=window if pattern.window is not None else (-1, -1),
        **({} if pattern.soft_cap is None else {"softcap": pattern.soft_cap}),
    )
    return _as_batch(out[0] if isinstance(out, tuple) else out, q)


def _as_batch(out: Tensor, q: Tensor) -> Tensor:
    return out.view(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


@lru_cache(maxsize=8)
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


# Flex attention: a compiled kernel that skips the blocks of 128 x 128 scores that nobody sees.


def flex(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    """torch's flex attention, compiled on a GPU.

    q is (B, H, S, D), k and v (B, K, S, D); the result is (B, S, H, D).
    """
    pattern.refuse("flex", causal=not pattern.causal)
    B, H, S, D = q.shape
    if pattern.segments is not None:
        q, k, v = (_as_one_row(t) for t in (q, k, v))
    out: Tensor = _flex_attention(q.is_cuda and not torch.compiler.is_compiling())(
        q,
        k,
        v,
        score_mod=None if pattern.soft_cap is None else _capped(pattern.soft_cap),
        block_mask=_block_mask(pattern, S, q.device),
        scale=pattern.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},  # short rows, too, are not decoding
    )
    return out.transpose(1, 2).reshape(B, S, H, D)


@lru_cache(maxsize=2)
def _flex_attention(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    function: Any = flex_attention
    return _with_room(torch.compile(function)) if compiled else function


def _with_room(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled`` for more kinds of calls than the 8 after which torch computes uncompiled, or fails."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_FLEX_KINDS):
            return compiled(*args, **kwargs)

    return call


@lru_cache(maxsize=16)
def _capped(soft_cap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # tanh as the compiler has it takes longer than both products: forward and backward of 4 x 2048 tokens
        # on an H200, 16 heads of 256, take 11.4 ms with it and 4.2 ms so
        return soft_cap - 2 * soft_cap * torch.sigmoid(score * (-2 / soft_cap))

    return cap


_MASKS = WeakTensorKeyDictionary()  # boundaries -> window -> block mask: one for all layers of a batch


def _block_mask(pattern: Pattern, length: int, device: torch.device) -> Any:
    if pattern.segments is None:
        return _plain_block_mask(length, pattern.window, device).mask
    starts = pattern.segments.starts
    if torch.compiler.is_compiling():
        return make_block_mask(pattern.segments.total_tokens, pattern.window, starts())
    masks = _MASKS.setdefault(pattern.segments.cu_seqlens, {})
    if pattern.window not in masks:
        masks[pattern.window] = make_block_mask(pattern.segments.total_tokens, pattern.window, starts())
    return masks[pattern.window]


class _KeptMask(NamedTuple):
    """A block mask, and what its function reads."""

    mask: Any
    starts: Tensor


@keep_tables(maxsize=16)
def _plain_block_mask(length: int, window: int | None, device: torch.device) -> _KeptMask:
    starts = torch.zeros(length, dtype=torch.int32, device=device)
    return _KeptMask(make_block_mask(length, window, starts), starts)


def make_block_mask(length: int, window: int | None, starts: Tensor) -> Any:
    """The blocks of keys that each block of tokens sees, from its first and last token: no (S, S) mask.

    Args:
        length: S, tokens.
        window: as in `Pattern`.
        starts: (S,) int32, where each token's segment begins.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        mask = (i >= j) & (j >= starts[i])
        return mask if window is None else mask & (i - j < window)

    first = torch.arange(0, length, _BLOCK, device=starts.device)
    last = (first + _BLOCK - 1).clamp(max=length - 1)
    lowest_of_first, lowest_of_last = starts[first], starts[last]
    if window is not None:
        lowest_of_first = torch.maximum(lowest_of_first, first - window + 1)
        lowest_of_last = torch.maximum(lowest_of_last, last - window + 1)
    causal = first[:, None] >= first[None, :]
    some = causal & (last[None, :] >= lowest_of_first[:, None])
    every = (first[:, None] >= last[None, :]) & (first[None, :] >= lowest_of_last[:, None])
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns) bool as how many there are in each row, and their columns before the others."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return blocks.sum(-1, dtype=torch.int32)[None, None], order[None, None]


BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, Pattern], Tensor]] = {
    "sdpa": sdpa,
    "varlen": varlen,
    "flex": flex,
    "flash3": flash3,
    "flash2": flash2,
    "reference": reference,
}
