"""Nearest of 16 values: the part of _quantize_triton.py that codebooks (NF4, FP4) alone need."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from fewbits.formats.codebook import Codebook
from fewbits.formats.tables import midpoints, table
from fewbits.kernels._launch import jit, tl


@jit
def _sixteenth(x, midpoints_ptr):
    """How many of 15 ascending thresholds lie below x, 15 for NaN: int32, by a tree of 4 comparisons."""
    m0, m1, m2 = tl.load(midpoints_ptr), tl.load(midpoints_ptr + 1), tl.load(midpoints_ptr + 2)
    m3, m4, m5 = tl.load(midpoints_ptr + 3), tl.load(midpoints_ptr + 4), tl.load(midpoints_ptr + 5)
    m6, m7, m8 = tl.load(midpoints_ptr + 6), tl.load(midpoints_ptr + 7), tl.load(midpoints_ptr + 8)
    m9, m10, m11 = tl.load(midpoints_ptr + 9), tl.load(midpoints_ptr + 10), tl.load(midpoints_ptr + 11)
    m12, m13, m14 = tl.load(midpoints_ptr + 12), tl.load(midpoints_ptr + 13), tl.load(midpoints_ptr + 14)
    b3 = m7 >= x
    b2 = tl.where(b3, m3, m11) >= x
    b1 = tl.where(b3, tl.where(b2, m1, m5), tl.where(b2, m9, m13)) >= x
    low = tl.where(b2, tl.where(b1, m0, m2), tl.where(b1, m4, m6))
    high = tl.where(b2, tl.where(b1, m8, m10), tl.where(b1, m12, m14))
    b0 = tl.where(b3, low, high) >= x
    return tl.where(b3, 0, 8) + tl.where(b2, 0, 4) + tl.where(b1, 0, 2) + tl.where(b0, 0, 1)


@jit
def _sixteenth_by_cell(x, midpoints_ptr):
    """The same for x in [-1, 1] if each of 33 cells around the multiples of 1/16 has one threshold at most.

    Beside the thresholds lie the 64 cells' own thresholds (infinity for none), and how many lie below each.
    """
    # x * 16 is exact, and the sum's last bits are the multiple: the cell
    cell = (x * 16.0 + 12582928.0).to(tl.int32, bitcast=True) & 63
    flat = tl.reshape(cell, (x.shape[0] * x.shape[1],))
    thresholds = tl.load(midpoints_ptr + 16 + tl.arange(0, 64))
    below = tl.load(midpoints_ptr + 80 + tl.arange(0, 64)).to(tl.int32)
    threshold = tl.reshape(tl.gather(thresholds, flat, 0), x.shape)
    code = tl.reshape(tl.gather(below, flat, 0), x.shape)
    return code + tl.where(threshold >= x, 0, 1)


@jit
def codebook_codes(x, midpoints_ptr, ORDER: tl.constexpr, DIVIDE: tl.constexpr):
    """Codes (int32) and scales of blocks x (blocks, values); DIVIDE: as a tensor's short last block."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    absmax = tl.where(bits >= 0x7F800000, float("nan"), bits.to(tl.float32, bitcast=True))
    smallest = tl.full((), 1e-38, tl.float32)  # a plain 1e-38, below normal numbers, would be a float64
    guarded = tl.where(absmax < smallest, smallest, absmax)
    scaled = x * tl.div_rn(1.0, guarded)[:, None]
    if DIVIDE:
        scaled = tl.div_rn(x, tl.broadcast_to(guarded[:, None], x.shape))
        absmax = guarded
    # beyond -1 and 1 all thresholds are on one side: nothing need be cut
    if ORDER == 0xFEDCBA9876543210:
        code = _sixteenth_by_cell(scaled, midpoints_ptr)
        code = tl.where((bits >= 0x7F800000)[:, None], 15, code)
    else:
        code = _sixteenth(scaled, midpoints_ptr)
    if (ORDER != 0xFEDCBA9876543210) & (ORDER != 0):
        high: tl.constexpr = ORDER >> 32
        low: tl.constexpr = ORDER & 0xFFFFFFFF
        nibbles = tl.where(code >= 8, tl.full(code.shape, high, tl.int64), tl.full(code.shape, low, tl.int64))
        code = ((nibbles >> ((code & 7) * 4).to(tl.int64)) & 15).to(tl.int32)
    return code, absmax


@jit
def codebook_values(code, values_ptr):
    """float32 values of 4-bit codes (blocks, values); see dequantize.py for the gather."""
    entries = tl.load(values_ptr + tl.arange(0, 16))
    flat = tl.reshape(code, (code.shape[0] * code.shape[1],))
    return tl.reshape(tl.gather(entries, flat, 0), code.shape)


def codebook_tables(format: Codebook, device: torch.device) -> tuple[int, Tensor, Tensor]:
    """The codes in ascending order of their values, as nibbles; the thresholds, also by cell; the 16 values.

    Order 0 stands for ascending values of which two thresholds share a cell.
    """
    order = sorted(range(16), key=lambda i: format.values[i])
    ascending = tuple(format.values[i] for i in order)
    sorted_already = order == list(range(16))
    nibbles = sum(code << (4 * i) for i, code in enumerate(order))
    if sorted_already and not _cells_differ(ascending):
        nibbles = 0
    return nibbles, _thresholds(ascending, device), table(format.values, device)


@lru_cache(maxsize=64)
def _thresholds(ascending: tuple[float, ...], device: torch.device) -> Tensor:
    """15 thresholds, a gap; each cell's own or infinity (64); how many lie in the cells below it (64)."""
    found = midpoints(ascending, torch.device("cpu"))
    cells = (found.double() * 16).round().long() + 16  # to even, as the kernel's float32 sum
    own = torch.full((64,), torch.inf)
    own[cells] = found
    below = (cells[None, :] < torch.arange(64)[:, None]).sum(1).float()
    return torch.cat([found, found.new_zeros(1), own, below]).to(device)


@lru_cache(maxsize=64)
def _cells_differ(ascending: tuple[float, ...]) -> bool:
    found = midpoints(ascending, torch.device("cpu")).double()
    return len(set((found * 16).round().tolist())) == len(found)


def code_of_zero(values: tuple[float, ...]) -> int:
    """The code that 0 gets."""
    order = sorted(range(16), key=lambda i: values[i])
    return order[sum(values[a] + values[b] < 0 for a, b in pairwise(order))]
