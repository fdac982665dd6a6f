"""Linears of a step of decoding and their low-rank branches (adapters): who computes what of these.

A branch adds ``scaling * t B^T`` to a product, with t = x A^T. For one or two rows of x the kernel that makes
x begins t (inner_parts.cu): `begin` says with which copies, `take_up` what the product behind it then gets.
Where that is not to be had, a launch of its own computes t, or the product's own kernel in front.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.decoder.parts import part_of
from fewbits.decoder.projection import Branch, Part, RoundedPart
from fewbits.errors import Unsupported
from fewbits.families.spec import ModelSpec
from fewbits.kernels.generation.operands import LowRankSum, NextInner, RowNorm
from fewbits.kernels.launch.jit import cdiv
from fewbits.models.generation.adapters_by_row import AdaptersByRow, Mixed


@dataclass(frozen=True)
class Reader:
    """What reads an output next: the linears of a product, and the norm in front of them."""

    parts: Sequence[Part]
    norm: RowNorm | None = None

    @property
    def branches(self) -> list[Branch]:
        """Those there are."""
        return [part.branch for part in self.parts if part.branch is not None]

    @property
    def ranks(self) -> list[int]:
        """Of each branch."""
        return [int(branch.a.shape[0]) for branch in self.branches]

    @property
    def padded(self) -> int:
        """Their sum, each in whole fours."""
        return _places(self.ranks)[-1]


@dataclass
class StepBranches:
    """16-bit copies of adapters' weights, in which kernels find them; `refresh` takes over new values.

    Attributes:
        dtype: of the copies.
        by_row: adapters that are chosen by row; None: every row has the active one.
    """

    dtype: torch.dtype
    by_row: AdaptersByRow | None = None
    _copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (copy, the adapter's own)
    _begun: tuple[Tensor, list[Tensor]] | None = None  # x, and of each branch that reads it (parts, M, r)

    def part(self, module: nn.Module, path: str) -> Part:
        """A linear of a module, as decoding's kernels take it, with its branches."""
        linear: Any = module.get_submodule(path)
        if self.by_row is not None and hasattr(linear, "base_layer"):
            return self.by_row.part(linear, path)
        return plain_part(module, path)

    def copy_of(self, *weights: Tensor, dim: int = 0) -> Tensor:
        """A copy of weights (r, K) or (N, r), side by side along ``dim``; `refresh` keeps it equal."""
        copy = torch.cat([weight.detach().to(self.dtype) for weight in weights], dim).contiguous().clone()
        pieces = copy.split([weight.shape[dim] for weight in weights], dim)
        self._copies.extend(zip(pieces, weights, strict=True))
        return copy

    def masks(self, reader: Reader, inner: Tensor) -> list[Callable[[], Tensor]]:
        """What leaves of the inner values (M, ranks) of a product each row's own adapter."""
        if self.by_row is None:
            return []
        return [partial(inner.mul_, self.by_row.mask(reader.branches, len(inner), inner.device))]

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the newest values of all adapters."""
        for copy, weight in self._copies:
            copy.copy_(weight.unflatten(1, (-1, 8)) if copy.dim() == 3 else weight)

    def begin(self, out: Tensor, reader: Reader) -> NextInner | None:
        """What the kernel that makes ``out`` (M, N) begins for its reader; None: it has no branches."""
        if not reader.branches or out.shape[1] % 8 or self.by_row is not None:
            return None
        places = _places(reader.ranks)
        size = (out.shape[1] // 8, places[-1], 8)
        whole = torch.zeros(size, dtype=self.dtype, device=out.device)
        for branch, place, rank in zip(reader.branches, places, reader.ranks, strict=False):
            copy = whole[:, place : place + rank].transpose(0, 1)
            self._copies.append((copy, branch.a))
            copy.copy_(branch.a.detach().unflatten(1, (-1, 8)))
        return NextInner(whole, reader.norm)

    def leave(self, out: Tensor, sums: Tensor, ranks: Sequence[int]) -> None:
        """``sums`` (parts, M, ranks) are what the kernel that makes ``out`` leaves."""
        places = _places(ranks)
        self._begun = out, [sums[:, :, at:end] for at, end in pairwise(places)]

    def take_up(self, x: Tensor, reader: Reader) -> list[LowRankSum | None] | None:
        """The branches of the product that reads x (M, K), if the kernel in front has begun them."""
        begun, self._begun = self._begun, None
        if begun is None or begun[0] is not x:
            return None
        sums = []
        for branch, inner in zip(reader.branches, begun[1], strict=True):
            b = branch.b.detach()
            whole = torch.zeros(len(b), inner.shape[2], dtype=self.dtype, device=b.device)
            copy = whole[:, : b.shape[1]]
            self._copies.append((copy, branch.b))
            sums.append(LowRankSum(whole, inner, branch.scaling))
            copy.copy_(b)
        return _placed(reader, sums)

    def whole(
        self, reader: Reader, inner: Tensor, beside: bool
    ) -> tuple[list[LowRankSum | None], list[Tensor]]:
        """The branches with inner values in ``inner`` (M, sum of ranks), and their As.

        ``beside``: the product itself computes these.
        """
        own = [_each(branch) for branch in reader.branches]
        weights = [self.copy_of(*(branch.a for branch in each)) for each in own]
        bs = [self.copy_of(*(branch.b for branch in each), dim=1) for each in own]
        sums = [
            LowRankSum(b, t, branch.scaling, a if beside else None)
            for branch, b, t, a in zip(
                reader.branches, bs, inner.split(reader.ranks, dim=1), weights, strict=True
            )
        ]
        return _placed(reader, sums), weights


def _each(branch: Branch) -> list[Branch]:
    """The branches of which one is made."""
    return [own for _, own in branch.of] if isinstance(branch, Mixed) else [branch]


def _placed(reader: Reader, sums: Sequence[LowRankSum]) -> list[LowRankSum | None]:
    """One for each linear, None where it has no branch."""
    left = iter(sums)
    return [None if part.branch is None else next(left) for part in reader.parts]


def plain_part(module: nn.Module, path: str) -> Part:
    """A linear of a module, as decoding's kernels take it."""
    part, _ = part_of(module.get_submodule(path), path)
    if isinstance(part, RoundedPart):
        raise Unsupported(f"{path} is rounded in training; pack it first.")
    return part


def norm_of(module: nn.Module, path: str | None, spec: ModelSpec) -> RowNorm:
    """An RMSNorm of a module."""
    assert path is not None  # `why_not_by_spec` has refused layers without
    norm: Any = module.get_submodule(path)
    eps = getattr(norm, "variance_epsilon", None)
    return RowNorm(norm.weight, norm.eps if eps is None else eps, spec.norm.offset)


def _places(ranks: Sequence[int]) -> list[int]:
    """Where each branch's columns begin, a multiple of four, and where the last one's end."""
    places = [0]
    for rank in ranks:
        places.append(places[-1] + cdiv(rank, 4) * 4)
    return places
