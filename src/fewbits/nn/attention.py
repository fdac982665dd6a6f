"""Causal attention, by whatever is fastest for the shape at hand: the definition, the choice, and the call.

    out[b, i, h] = sum_j p[i, j] * v[b, g, j]        q (B, H, S, D)   k, v (B, K, S, D)   out (B, S, H, D)
    p[i, :] = softmax_j cap(scale * q[b, h, i] . k[b, g, j])       g = h * K // H: keys are never repeated
    cap(s) = soft_cap * tanh(s / soft_cap), or s

over the keys j that token i sees: none after it (``causal``), none ``window`` or more places before it (token
i itself counts, as in transformers), none of another segment. The gradient is autograd's.

Which backend runs is decided by `choose_attention` from facts of the shape alone, so that a receipt can name
it beforehand. The backends themselves are in attention_backends.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.launch.jit import capability_of
from fewbits.nn.attention_backends import BACKENDS, Pattern
from fewbits.nn.segments import Segments

_HALVES = (torch.bfloat16, torch.float16)


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    segments: Segments | None = None,
) -> Tensor:
    """The definition, with every score in memory: float32 inside (float64 for float64), out in q's dtype.

    q is (B, H, S, D), k and v (B, K, S, D); the result is (B, S, H, D).
    """
    pattern = Pattern(_scale(q, scale), causal, window, soft_cap, segments)
    return BACKENDS["reference"](q, k, v, pattern)


@dataclass(frozen=True)
class Choice:
    """The backend for one class of shapes.

    Attributes:
        name: a key of ``BACKENDS``.
        reason: why this one; for a slow one, what stands in the way of a fast one.
    """

    name: str
    reason: str


def choose_attention(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    window: int | None = None,
    soft_cap: float | None = None,
    packed: bool = False,
    seq_len: int | None = None,
) -> Choice:
    """The backend that `attention` takes; the same answer for the same facts.

    Args:
        device: of the operands.
        dtype: of the operands.
        head_dim: D; queries and keys may have any numbers of heads that divide.
        window: keys that a token sees, itself included.
        soft_cap: of the scores.
        packed: there are segments.
        seq_len: tokens of the longest row; a window that is no shorter is none.
    """
    if window is not None and seq_len is not None and window >= seq_len:
        window = None
    capability = capability_of(device) if device.type == "cuda" else None
    return _choose(capability, dtype, head_dim, window is not None, soft_cap is not None, packed)


def _choose(
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    head_dim: int,
    windowed: bool,
    capped: bool,
    packed: bool,
) -> Choice:
    if capability is None:
        if capped:
            return Choice("reference", "on a CPU nothing else caps scores")
        how = ", one segment after another" if packed else ""
        return Choice("sdpa", f"torch's own attention on a CPU{how}")
    refused = _why_not_flash(capability, dtype, head_dim)
    if capped:
        return _choose_capped(capability, refused)
    if not packed and not windowed:
        return Choice("sdpa", "plain causal attention: torch takes cuDNN's or FlashAttention's kernel")
    need = " and ".join(
        word for word, there in (("packed rows", packed), ("a sliding window", windowed)) if there
    )
    if refused:
        return Choice("sdpa", f"{need} as an explicit mask: {refused}")
    if capability[0] == 9 and _installed("flash_attn_interface"):
        return Choice("flash3", f"{need}: FlashAttention-3 is installed")
    return Choice("varlen", f"{need}: torch's FlashAttention for rows of varying length")


def _choose_capped(capability: tuple[int, int], refused: str) -> Choice:
    if not refused and _installed("flash_attn"):
        return Choice("flash2", "capped scores: FlashAttention-2 is installed and caps in its kernel")
    if capability >= (8, 0):
        return Choice("flex", "capped scores: torch's flex attention, compiled")
    return Choice("reference", "capped scores need compute capability 8.0 for flex attention")


def _installed(package: str) -> bool:
    """Also False while torch compiles, which cannot look into these packages."""
    return not torch.compiler.is_compiling() and _is_found(package)


@lru_cache(maxsize=8)
def _is_found(package: str) -> bool:
    return find_spec(package) is not None


def _why_not_flash(capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> str:
    if capability < (8, 0):
        return "FlashAttention needs compute capability 8.0"
    if dtype not in _HALVES:
        return f"FlashAttention has no kernel for {str(dtype).removeprefix('torch.')}"
    if head_dim > 256 or head_dim % 8:
        return f"FlashAttention has no kernel for heads of {head_dim}"
    return ""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    segments: Segments | None = None,
) -> Tensor:
    """Attention of q (B, H, S, D) over k, v (B, K, S, D), any strides with dense heads: (B, S, H, D).

    Args:
        q: queries.
        k: keys; K divides H.
        v: values.
        scale: of the scores; None: D ** -0.5.
        causal: no token sees a later one.
        window: keys that a token sees, itself included; None: all.
        soft_cap: scores go through ``soft_cap * tanh(score / soft_cap)``.
        segments: rows within the B * S tokens, which do not see each other.

    Raises:
        BadInput: shapes that do not fit each other.
    """
    B, H, S, D = q.shape
    if (
        k.shape != v.shape
        or k.shape[0] != B
        or k.shape[2:] != (S, D)
        or (H % k.shape[1] if k.shape[1] else H)
    ):
        raise BadInput(
            f"attention of q {tuple(q.shape)} over k {tuple(k.shape)} and v {tuple(v.shape)}: give q "
            "(B, H, S, D) and k, v (B, K, S, D) with K a divisor of H."
        )
    if segments is not None and segments.total_tokens != B * S:
        raise BadInput(
            f"the segments are of {segments.total_tokens} tokens and there are {B} x {S}: padding, too, "
            "belongs to a segment."
        )
    longest = S if segments is None else min(segments.max_seqlen, S)
    if window is not None and window >= longest and causal:
        window = None
    choice = choose_attention(q.device, q.dtype, D, window, soft_cap, segments is not None)
    # torch 2.11's attention on a CPU divides by the number of heads: where it is 0, that ends the process.
    name = choice.name if q.numel() else "reference"
    return BACKENDS[name](q, k, v, Pattern(_scale(q, scale), causal, window, soft_cap, segments))


def _scale(q: Tensor, scale: float | None) -> float:
    return max(q.shape[-1], 1) ** -0.5 if scale is None else float(scale)
