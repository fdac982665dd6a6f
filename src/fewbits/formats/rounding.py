"""Rounding to nearest even and stochastic rounding, with random bits that are a function of (seed, position).

The random bits come from Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
in integer arithmetic, so every device gives the same. Exactly:

* element ``i`` (row-major position in the tensor that is rounded) takes 32-bit word ``i % 4`` of
  ``philox(counter=(i // 4 mod 2**32, i // 4 >> 32, 0, 0), key=(seed mod 2**32, (seed >> 32) mod 2**32))``;
* its uniform number is ``u = (word >> 8) * 2**-24``, a float32 in [0, 1), exact;
* it rounds up if ``u < x - floor(x)``, a difference taken in float32: with probability
  ``ceil(frac * 2**24) / 2**24``. The difference is exact but for x in (-0.5, 0), where ``x + 1`` is first
  rounded to the nearest multiple of 2**-24, which is then the probability. Either way the mean of the result
  differs from x by less than 2**-24 steps.

In Triton the four words of counter ``j`` are ``tl.randint4x(seed, j)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_CHUNK = 1 << 16  # counters at a time: the int64 temporaries of a round stay in cache


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int], rounds: int = 10
) -> list[Tensor]:
    """Philox-4x32.

    Args:
        counter: four int64 tensors of one shape with values in [0, 2**32).
        key: two words in [0, 2**32).
        rounds: 10, the number that curand and Triton use.

    Returns:
        Four int64 tensors of that shape with values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # an int64 product wraps to the 64 bits of the unsigned one; the mask undoes the signed shift
        p0, p1 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c2 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def random_words(n: int, seed: int, device: torch.device | str = "cpu", *, offset: int = 0) -> Tensor:
    """The 32-bit words of positions ``offset ... offset + n - 1``: (n,) int64 with values in [0, 2**32)."""
    first, last = offset // 4, -(-(offset + n) // 4)
    key = (seed & _MASK, (seed >> 32) & _MASK)
    words = torch.empty(last - first, 4, dtype=torch.int64, device=device)
    for start in range(first, last, _CHUNK):
        stop = min(start + _CHUNK, last)
        index = torch.arange(start, stop, dtype=torch.int64, device=device)
        zero = torch.zeros_like(index)
        torch.stack(
            philox((index & _MASK, index >> 32, zero, zero), key),
            dim=-1,
            out=words[start - first : stop - first],
        )
    return words.view(-1)[offset - 4 * first : offset - 4 * first + n]


def random_uniform(
    shape: tuple[int, ...], seed: int, device: torch.device | str = "cpu", *, offset: int = 0
) -> Tensor:
    """Uniform float32 numbers (n,) in [0, 1), multiples of 2**-24, from position ``offset`` on."""
    n = 1
    for s in shape:
        n *= s
    return (random_words(n, seed, device, offset=offset) >> 8).to(torch.float32).mul_(2.0**-24).view(shape)


def sum_in_order(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sums of x (..., n, ...) over ``dims``, which stay as 1, in one order on every device: halves are added.

    torch's own sums are taken in an order of each device's own, and searches that compare them then choose
    other codes on a GPU than on a CPU.
    """
    for dim in dims:
        while (size := x.shape[dim]) > 1:
            half = size // 2
            added = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
            x = added if size % 2 == 0 else torch.cat([added, x.narrow(dim, size - 1, 1)], dim)
        if size == 0:
            x = x.sum(dim, keepdim=True)
    return x


def first_of_largest(x: Tensor) -> Tensor:
    """Where the largest value of the last dimension stands, (..., 1); of equals the first, everywhere."""
    size = x.shape[-1]
    places = torch.arange(size, device=x.device).expand(x.shape)
    return torch.where(x == x.amax(-1, keepdim=True), places, size - 1).amin(-1, keepdim=True)


def round_to_integer(x: Tensor, uniform: Tensor | None = None) -> Tensor:
    """Round float32 to whole numbers, in a new tensor.

    Args:
        x: any shape, float32.
        uniform: None rounds to nearest, ties to even; else `random_uniform` of x's shape, to round
            stochastically.
    """
    if uniform is None:
        return x.round()
    low = x.floor()
    return low + (uniform < x - low)  # exact in float32, but for x in (-0.5, 0): see the top of this file
