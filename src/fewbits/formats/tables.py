"""Lookup tables on a device. The constants live with their formats; here they become tensors, once."""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.formats.table_cache import keep_tables


@keep_tables(maxsize=256)
def table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """``values`` (n,) as float32 on ``device``. Shared: never write to it."""
    with torch.inference_mode(
        False
    ):  # a tensor born in inference mode could not be saved for a later backward
        return torch.tensor(values, dtype=torch.float32, device=device)


@keep_tables(maxsize=64)
def midpoints(values: tuple[float, ...], device: torch.device) -> Tensor:
    """The float32 thresholds (n - 1,) between neighbours of ascending ``values``."""
    with torch.inference_mode(False):
        t = table(values, device)
        return (t[:-1] + t[1:]) / 2


@keep_tables(maxsize=64)
def pairs_table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """The two values of each byte of 4-bit codes, (256,) float64 that are two float32 each."""
    with torch.inference_mode(False):
        byte = torch.arange(256, device=device)
        t = table(values, device)
        # two float32 seen as one float64: a lookup moves 8 bytes, and no arithmetic is ever done on it
        return torch.stack([t[byte & 15], t[byte >> 4]], dim=-1).view(torch.float64).flatten()


def lookup_nibbles(packed: Tensor, values: tuple[float, ...], out: Tensor | None = None) -> Tensor:
    """The values of 4-bit codes, two a byte, the first in the low nibble.

    Args:
        packed: (n,) uint8.
        values: 16 numbers; code i stands for the i-th.
        out: (2 * n,) float32 to write to; None allocates it.

    Returns:
        (2 * n,) float32.
    """
    pairs, index = pairs_table(values, packed.device), packed.to(torch.int32)
    if out is None:
        return pairs.index_select(0, index).view(torch.float32)
    torch.index_select(pairs, 0, index, out=out.view(torch.float64))
    return out


def round_to_table(x: Tensor, values: tuple[float, ...], uniform: Tensor | None = None) -> Tensor:
    """For each value of x the place of an entry of a table: its code.

    Args:
        x: any shape, float32.
        values: at most 256 numbers, ascending.
        uniform: None takes the nearest entry, and of two that are equally near the lower; else
            `random_uniform` of x's shape, which takes one of the two entries around x, so that their mean
            is x. A value outside the table takes the first or the last.

    Returns:
        uint8 of x's shape.
    """
    if uniform is None:
        return torch.bucketize(x, midpoints(values, x.device), out_int32=True).to(torch.uint8)
    entries = table(values, x.device)
    low = torch.bucketize(x, entries, right=True).sub_(1).clamp_(0, len(values) - 2)
    step = entries[low + 1] - entries[low]
    return (low + (uniform * step < x - entries[low])).to(torch.uint8)
