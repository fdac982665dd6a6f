"""A tensor seen as the blocks that share a scale.

A block is given as (rows, columns) of the last two axes, where 0 means all of them:

* ``(0, 0)``: one scale for the tensor, of shape (1,);
* ``(1, 0)``: one a row, (..., N, 1);
* ``(1, c)``: one for c values along the last axis, (..., N, ceil(K / c)); the last block may be short;
* ``(r, c)``: one for a tile, (..., ceil(N / r), ceil(K / c)); for a tensor of one axis, as ``(1, c)``.

A tensor of no axes counts as one of shape (1,).
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.base import Format, Packed

Block = tuple[int, int]

SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: its inverse is finite, and zeros decode to zeros


def check_floating(x: Tensor) -> None:
    """Refuse what is not a real floating-point tensor.

    x may have any shape.
    """
    if not x.is_floating_point():
        raise BadInput(
            f"a number format quantises floating-point tensors, got {x.dtype}; convert it with .float()."
        )


def ceil_div(a: int, b: int) -> int:
    """Smallest integer that is not below a / b."""
    return -(-a // b)


def packed_nothing(format: Format, x: Tensor) -> Packed | None:
    """What a tensor without elements is in a format; None for one with elements, of any shape.

    The parts are all zeros. Each format's ``quantize`` begins with it.

    Raises:
        BadInput: x is not of floating point.
    """
    check_floating(x)
    if x.numel():
        return None
    shape = tuple(x.shape)
    parts = {
        name: torch.zeros(spec.shape, dtype=spec.dtype, device=x.device)
        for name, spec in format.layout(shape).items()
    }
    return Packed(format, shape, x.dtype, parts)


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Shape of the scales of a tensor of ``shape``."""
    r, c = block
    if (r, c) == (0, 0):
        return (1,)
    *lead, K = shape or (1,)
    columns = ceil_div(K, c) if c else 1
    if r > 1 and lead:
        lead[-1] = ceil_div(lead[-1], r)
    return (*lead, columns)


def to_blocks(x: Tensor, block: Block) -> Tensor:
    """View x as (R, r, C, c): block (i, j) is ``[i, :, j, :]``. Short blocks are filled with zeros."""
    r, c = block
    if (r, c) == (0, 0):
        return x.reshape(1, 1, 1, x.numel())
    shape = x.shape or (1,)
    N, K = (shape[-2] if len(shape) > 1 else 1), shape[-1]
    r, c = (r if len(shape) > 1 else 1), c or max(K, 1)
    lead = prod(shape[:-2])
    x = x.reshape(lead, N, K)
    if N % r or K % c:
        x = torch.nn.functional.pad(x, (0, -K % c, 0, -N % r))
    return x.reshape(lead * x.shape[1] // r, r, x.shape[2] // c, c)


def from_blocks(blocks: Tensor, shape: tuple[int, ...], block: Block) -> Tensor:
    """The inverse of `to_blocks`: (R, r, C, c) to a contiguous tensor of ``shape``."""
    r, c = block
    if (r, c) != (0, 0):
        whole = shape or (1,)
        N, K = (whole[-2] if len(whole) > 1 else 1), whole[-1]
        R, r, C, c = blocks.shape
        lead = prod(whole[:-2])
        if R * r != lead * N or C * c != K:
            blocks = blocks.reshape(lead, R * r // max(lead, 1), C * c)[:, :N, :K]
    return blocks.reshape(shape).contiguous()


def own_memory(x: Tensor) -> Tensor:
    """x of any shape, or a copy where it is a part of more memory, such as blocks that were filled up.

    What is stored holds all of that memory, and safetensors refuses it.
    """
    if torch.compiler.is_compiling():
        return x  # a graph of torch.compile cannot ask for the memory behind a tensor, and keeps no weights
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def divide(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, rounded once on every device; for a Python number CUDA multiplies by its inverse.

    x is floating point of any shape, and the result of x's shape and dtype.
    """
    return x / x.new_full((), divisor)


def block_absmax(blocks: Tensor) -> Tensor:
    """Largest magnitude of each block: (R, 1, C, 1) float32, NaN where a value is not finite."""
    absmax = blocks.abs().amax(dim=(1, 3), keepdim=True).float()
    return absmax.masked_fill_(absmax.isinf(), torch.nan)
