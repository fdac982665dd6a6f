"""What problems of decoding attention are made of, over plain caches and packed ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewbits.kernels.generation.operands import RowNorm

BF16 = torch.bfloat16


def places(lengths: list[int], device: str) -> tuple[Tensor, Tensor]:
    """Where the new token of each sequence goes, and which is the first that it sees."""
    position = torch.tensor([n - 1 for n in lengths], device=device)
    first = torch.tensor([min(2 * b, n - 1) for b, n in enumerate(lengths)], device=device)
    return position, first


def rotary_tables(room: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines (room, width) as a model's rotary embedding has them, rounded to bfloat16."""
    angle = torch.outer(torch.arange(room), 1e4 ** -torch.linspace(0, 1, width // 2)).to(device)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(BF16).float(), angle.sin().to(BF16).float()


def head_norms(D: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Norms of queries and keys, as rules of attention."""
    weight = (torch.randn(D, device=device) * 0.1 + 1).to(dtype)
    return {"q_norm": RowNorm(weight, 1e-6), "k_norm": RowNorm(weight.flip(0), 1e-6)}
