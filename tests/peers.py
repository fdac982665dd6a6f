"""Other libraries as peers of tests: what their codes and scales say, and whether they decode as these say.

A peer can be wrong on one machine (bitsandbytes 0.50.2 decodes rows that are no multiple of the block wrongly
on CPUs with AVX512-BF16). So nothing of ours is held against a live peer before the peer agrees with its own
codes times its own scales on that input, which is plain arithmetic and stands here; what ours has to be is in
golden files, and in that arithmetic.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor


def same_or_skip(peer: str, found: Tensor, need: Tensor, what: str, *, rtol: float = 0.0) -> None:
    """Skip the test, in a sentence, where what ``peer`` computed is not what its own numbers say."""
    if found.shape == need.shape and torch.allclose(found, need, rtol=rtol, atol=rtol, equal_nan=True):
        return
    wrong = f"{int((found != need).sum())} of {need.numel()}" if found.shape == need.shape else "all"
    pytest.skip(
        f"{peer} {version(peer)} is wrong on this machine: {what}, {wrong} values differ from its own codes "
        "times its own scales; golden files and these products are what ours is compared with here"
    )


def nibbles(stored: Tensor, count: int) -> Tensor:
    """The first ``count`` 4-bit codes of bitsandbytes' bytes, the high half of a byte first."""
    flat = stored.flatten().view(torch.uint8).long()
    return torch.stack([flat >> 4, flat & 15], dim=1).flatten()[:count]


def times_scales(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Flat ``values`` times the scale of their block of ``block``, one float32 product each."""
    at = torch.arange(values.numel()) // block
    return values.float() * scales.flatten().float()[at]


def bitsandbytes_scales(state: Any) -> Tensor:
    """The float32 scale of each block, from codes and scales of its own where these are quantised too."""
    if state.state2 is None:
        return state.absmax.float()
    inner = state.state2
    return times_scales(inner.code[state.absmax.long()], inner.absmax, inner.blocksize) + state.offset


def bitsandbytes_decoded(codes: Tensor, state: Any) -> Tensor:
    """What a 4-bit weight of bitsandbytes is by its codes and scales, in its shape and dtype."""
    count = state.shape.numel()
    values = state.code[nibbles(codes, count)]
    return times_scales(values, bitsandbytes_scales(state), state.blocksize).view(state.shape).to(state.dtype)


def live_bitsandbytes(codes: Tensor, state: Any) -> Tensor:
    """The same by bitsandbytes' own function, on a copy; the test is skipped where it is another."""
    import bitsandbytes.functional as bnb

    found = bnb.dequantize_4bit(codes.clone(), state).view(state.shape)
    what = f"{tuple(state.shape)} {state.quant_type} in blocks of {state.blocksize}, {state.dtype}"
    same_or_skip("bitsandbytes", found, bitsandbytes_decoded(codes, state), what)
    return found
