"""Which query may see which key: masks by Transformer Engine's words, and ALiBi's slopes.

True means hidden, in what is given and in what is returned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.errors import BadInput

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees.

    Attributes:
        kind: one of `MASK_TYPES`.
        window: (left, right) neighbours; -1 is any number.
        bottom_right: position 0 of the diagonal is where the last query meets the last key.
    """

    kind: str
    window: tuple[int, int] = (-1, -1)
    bottom_right: bool = False

    @property
    def is_padded(self) -> bool:
        """Whether a mask says which tokens count."""
        return "padding" in self.kind

    @property
    def is_causal(self) -> bool:
        """Whether keys after the query are hidden."""
        return "causal" in self.kind


def visibility(kind: str, window: tuple[int, int] | None, bottom_right: bool | None) -> Visibility:
    """A mask by the words of a call.

    Args:
        kind: one of `MASK_TYPES`, or with "padding" after a comma or in the other order.
        window: neighbours that a query sees, or None.
        bottom_right: where the diagonal ends; None is by the kind.
    """
    words = {word for word in kind.replace(",", "_").split("_") if word}
    if "padding" in words and "causal" in words:
        kind = "padding_causal_bottom_right" if "bottom" in words else "padding_causal"
    if kind not in MASK_TYPES:
        raise BadInput(f"attn_mask_type is one of {', '.join(MASK_TYPES)}, not {kind!r}.")
    left, right = window if window is not None else (-1, -1)
    if "causal" in kind:
        right = 0
    if kind in ("causal", "padding_causal"):
        bottom_right = False
    elif bottom_right is None or "bottom_right" in kind:
        bottom_right = True
    return Visibility(kind, (left, right), bottom_right)


def _padding(mask: Tensor | tuple[Tensor, Tensor] | None, batch: int) -> tuple[Tensor, Tensor] | None:
    """(b, s_q) and (b, s_kv), True where a token is padding."""
    if mask is None:
        return None
    q, kv = mask if isinstance(mask, (tuple, list)) else (mask, mask)
    if q.dtype != torch.bool or kv.dtype != torch.bool:
        raise BadInput("an attention mask is boolean, True where a token is hidden: convert it with .bool().")
    return q.reshape(batch, -1), kv.reshape(batch, -1)


def padding_of(cu_seqlens: Tensor, length: int) -> Tensor:
    """(b, length), True past each sequence's end, from (b + 1,) cumulative lengths."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return torch.arange(length, device=cu_seqlens.device)[None] >= lengths[:, None]


def diagonal_offset(
    see: Visibility,
    mask: Tensor | tuple[Tensor, Tensor] | None,
    sizes: tuple[int, int, int],
    device: torch.device,
) -> Tensor:
    """Which key stands where query 0 does: (1,), or (b,) where padding gives each sequence its own.

    See `hidden_scores` for the arguments.
    """
    batch, s_q, s_kv = sizes
    padding = _padding(mask, batch) if see.is_padded else None
    if see.bottom_right and padding is not None:
        q, kv = padding
        return (~kv).sum(1) - (~q).sum(1)
    return torch.full((1,), s_kv - s_q if see.bottom_right else 0, device=device)


def hidden_scores(
    see: Visibility,
    mask: Tensor | tuple[Tensor, Tensor] | None,
    sizes: tuple[int, int, int],
    device: torch.device,
) -> Tensor | None:
    """What a query does not see.

    Args:
        see: by which words.
        mask: for kinds with padding (b, 1, 1, s) or a pair of these, for "arbitrary" anything that
            broadcasts to (b, h, s_q, s_kv).
        sizes: b, s_q, s_kv.
        device: of the result.

    Returns:
        Something that broadcasts to (b, h, s_q, s_kv), or None if all is seen.
    """
    batch, s_q, s_kv = sizes
    parts: list[Tensor] = []
    if see.is_padded:
        padding = _padding(mask, batch)
        if padding is None:
            raise BadInput(
                f"attn_mask_type {see.kind!r} needs attention_mask or cu_seqlens: which tokens count."
            )
        q, kv = padding
        parts.append(q[:, None, :, None] | kv[:, None, None, :])
    elif see.kind == "arbitrary" and mask is not None:
        whole = mask[0] if isinstance(mask, (tuple, list)) else mask
        if whole.dtype != torch.bool:
            raise BadInput(
                "an attention mask is boolean, True where a token is hidden: convert it with .bool()."
            )
        parts.append(whole)
    left, right = see.window
    if left >= 0 or right >= 0:
        relative = relative_positions(s_q, s_kv, diagonal_offset(see, mask, sizes, device))
        if right >= 0:
            parts.append(relative > right)
        if left >= 0:
            parts.append(relative < -left)
    return None if not parts else _any(parts)


def _any(parts: list[Tensor]) -> Tensor:
    result = parts[0]
    for part in parts[1:]:
        result = result | part
    return result


def relative_positions(s_q: int, s_kv: int, offset: Tensor) -> Tensor:
    """Key minus query minus offset: (len(offset), 1, s_q, s_kv).

    ``offset`` is (B,).
    """
    query, key = torch.arange(s_q, device=offset.device), torch.arange(s_kv, device=offset.device)
    return key[None, None, None, :] - query[None, None, :, None] - offset[:, None, None, None]


def default_slopes(heads: int, device: torch.device) -> Tensor:
    """ALiBi's slopes (Press et al. 2022): (heads,) float32, powers of 2**(-8 / n), n a power of two."""
    n = 2 ** math.floor(math.log2(heads))
    base = 2.0 ** (-8.0 / n)
    slopes = [base**i for i in range(1, n + 1)]
    between = 2.0 ** (-4.0 / n)
    slopes += [between**i for i in range(1, 2 * (heads - n) + 1, 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
