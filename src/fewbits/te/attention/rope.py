"""Rotary position embeddings (Su et al. 2021) under Transformer Engine's names."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput
from fewbits.te.support import default_device


class RotaryPositionEmbedding(nn.Module):
    """The angles by which queries and keys are turned.

    Args:
        dim: of a head.
        rotary_percent: which part of it is turned.
        seq_len_interpolation_factor: positions are divided by it (Chen et al. 2023).
        pretrained_max_position_embeddings: with the former, sequences longer than both together are divided
            by as much as makes them fit.
        rotary_base: of the frequencies.
        interleaved: pairs are neighbours instead of halves.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        rotary_dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=default_device(None)) / rotary_dim
        self.rotary_base, self.interleaved = rotary_base, interleaved
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.register_buffer("inv_freq", 1.0 / rotary_base**steps)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """The angles of positions ``offset ... offset + max_seq_len - 1``: (max_seq_len, 1, 1, dim)."""
        position = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=torch.float32) + offset
        factor, trained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and trained is not None:
            position = position * (1.0 / max(max_seq_len / trained, factor))
        angles = torch.outer(position, self.inv_freq.float())
        both = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return both[:, None, None, :]


def _turn(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x (..., d) turned by angles (..., d2), d2 <= d, in float32; the rest of each head stays."""
    width = angles.shape[-1]
    part, rest = x[..., :width].float(), x[..., width:]
    if interleaved:
        even, odd = part[..., ::2], part[..., 1::2]
        half = torch.stack((-odd, even), -1).flatten(-2)
    else:
        first, second = part.chunk(2, -1)
        half = torch.cat((-second, first), -1)
    rotated = part * angles.cos() + half * angles.sin()
    return torch.cat((rotated.to(x.dtype), rest), -1)


def _piece(angles: Tensor, length: int, begin: int, cp_size: int, cp_rank: int) -> Tensor:
    """The angles of one sequence of ``length`` on this rank: two of 2 * cp_size pieces, or all of it."""
    if cp_size == 1:
        return angles[begin : begin + length]
    half, whole = length // 2, length * cp_size
    angles = angles[begin : begin + whole]
    return torch.cat(
        (
            angles[cp_rank * half : (cp_rank + 1) * half],
            angles[whole - (cp_rank + 1) * half : whole - cp_rank * half],
        )
    )


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Turn queries or keys by their positions.

    Args:
        t: (s, b, h, d), (b, s, h, d) or (t, h, d), by ``tensor_format``.
        freqs: (s2, 1, 1, d2) or (s2, b, 1, d2) angles, s2 >= s (times ``cp_size``).
        tensor_format: "sbhd", "bshd" or "thd".
        start_positions: (b,) the position of each sequence's first token; 0 if None.
        interleaved: pairs are neighbours instead of halves.
        fused: accepted; one computation serves both.
        cu_seqlens: (b + 1,) where sequences begin and end, for "thd" (on all ranks together).
        cp_size: ranks that share each sequence.
        cp_rank: this one.

    Returns:
        As ``t``; computed in float32, rounded once.
    """
    if tensor_format not in ("sbhd", "bshd", "thd"):
        raise BadInput(f"tensor_format is 'sbhd', 'bshd' or 'thd', not {tensor_format!r}.")
    freqs = freqs.float()
    starts = None if start_positions is None else start_positions.tolist()
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise BadInput(
                "tensor_format 'thd' needs cu_seqlens: where each packed sequence begins and ends."
            )
        bounds = (cu_seqlens // cp_size).tolist()
        angles = torch.cat(
            [
                _piece(freqs, stop - start, starts[i] if starts else 0, cp_size, cp_rank)
                for i, (start, stop) in enumerate(pairwise(bounds))
            ]
        )[:, 0]
        rotated = _turn(t[: len(angles)], angles, interleaved)
        return rotated if len(angles) == len(t) else torch.cat((rotated, t[len(angles) :]))
    length = t.shape[1] if tensor_format == "bshd" else t.shape[0]
    if starts is None:
        angles = _piece(freqs, length, 0, cp_size, cp_rank)
    else:
        angles = torch.cat([_piece(freqs[:, :1], length, start, cp_size, cp_rank) for start in starts], 1)
    return _turn(t, angles.transpose(0, 1) if tensor_format == "bshd" else angles, interleaved)


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: list[int],
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a joint projection and turn its queries and keys.

    Args:
        qkv: (s, b, g, q + k + v) or (b, s, g, q + k + v): groups of heads side by side.
        q_freqs: angles of queries, see `apply_rotary_pos_emb`.
        k_freqs: angles of keys.
        qkv_split_arg_list: the sizes q, k and v; k is the size of a head.

    Returns:
        Queries (..., g * q / k, k), keys and values (..., g, k).
    """
    q, k, v = qkv.split(qkv_split_arg_list, dim=-1)
    q = q.reshape(*q.shape[:2], -1, qkv_split_arg_list[1])
    words: Any = (tensor_format, start_positions, interleaved, True, cu_seqlens, cp_size, cp_rank)
    return apply_rotary_pos_emb(q, q_freqs, *words), apply_rotary_pos_emb(k, k_freqs, *words), v
