"""Names for the positions of what may train.

An autograd node takes tensors, and gives gradients, as one flat tuple. Nothing here counts positions by hand:
a value that stands beside each tensor (the tensor itself, whether it needs a gradient, its gradient) is held
by name, and `flat` and `of_parts` are the only two places that know the order.

    one part of a projection      PerPart    weight (N, K), bias (N,), a (r, K), b (N, r)
    one half of a decoder layer   PerHalf    norms (by name), parts of the way in, parts of the way back
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class PerPart(Generic[T]):
    """One value for each tensor of a part that may train."""

    weight: T
    bias: T
    a: T
    b: T

    def flat(self) -> tuple[T, T, T, T]:
        """In the order in which a node takes them."""
        return self.weight, self.bias, self.a, self.b


def of_parts(values: Iterator[T], count: int) -> list[PerPart[T]]:
    """The next values of ``count`` parts, as `PerPart.flat` gave them."""
    return [PerPart(next(values), next(values), next(values), next(values)) for _ in range(count)]


@dataclass
class PerHalf(Generic[T]):
    """One value for each tensor of a half that may train.

    Attributes:
        norms: by the norm's name; the order is the half's.
        into: of the projection that reads the norm's output.
        back: of the projection whose output is added to x.
    """

    norms: dict[str, T]
    into: list[PerPart[T]]
    back: list[PerPart[T]]

    def flat(self) -> list[T]:
        """In the order in which the node takes them."""
        return [*self.norms.values(), *(one for part in (*self.into, *self.back) for one in part.flat())]


def of_half(values: Sequence[T], norms: Sequence[str], into: int, back: int) -> PerHalf[T]:
    """The inverse of `PerHalf.flat`, for these norms and numbers of parts."""
    left = iter(values)
    half = PerHalf({name: next(left) for name in norms}, of_parts(left, into), of_parts(left, back))
    assert next(left, None) is None, "more values than tensors"
    return half
