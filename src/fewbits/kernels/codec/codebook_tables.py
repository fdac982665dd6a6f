"""What the kernels of quantize_triton.py need to know of a codebook (NF4, FP4), as tensors."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fewbits.formats.table_cache import keep_tables
from fewbits.formats.tables import midpoints, table


def codebook_tables(values: tuple[float, ...], device: torch.device) -> tuple[int, Tensor, Tensor]:
    """The codes by value, as nibbles; the thresholds, also by cell, (144,); the values, (16,).

    Order 0 stands for ascending values of which two thresholds share a cell.
    """
    order = sorted(range(16), key=lambda i: values[i])
    ascending = tuple(values[i] for i in order)
    sorted_already = order == list(range(16))
    nibbles = sum(code << (4 * i) for i, code in enumerate(order))
    if sorted_already and not _cells_differ(ascending):
        nibbles = 0
    return nibbles, thresholds(ascending, device), table(values, device)


@keep_tables(maxsize=64)
def thresholds(ascending: tuple[float, ...], device: torch.device) -> Tensor:
    """(144,): 15 thresholds, a gap; each of 64 cells' own or infinity; how many lie in the cells below it."""
    middles = midpoints(ascending, torch.device("cpu"))
    cells = (middles.double() * 16).round().long() + 16  # to even, as the kernel's float32 sum
    own = torch.full((64,), torch.inf, dtype=torch.float32)
    own[cells] = middles
    below = (cells[None, :] < torch.arange(64)[:, None]).sum(1).float()
    return torch.cat([middles, middles.new_zeros(1), own, below]).to(device)


@keep_tables(maxsize=64, of_numbers=True)
def _cells_differ(ascending: tuple[float, ...]) -> bool:
    middles = midpoints(ascending, torch.device("cpu")).double()
    return len(set((middles * 16).round().tolist())) == len(middles)


def code_of_zero(values: tuple[float, ...]) -> int:
    """The code that 0 gets."""
    order = sorted(range(16), key=lambda i: values[i])
    return order[sum(values[a] + values[b] < 0 for a, b in pairwise(order))]
