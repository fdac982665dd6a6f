"""Stream lengths under a budget: which rows and chunks of which linear are worth how many cycles.

A linear's product is a sum over chunks of its inner dimension, and its input rows fall into groups by their
largest magnitude. For each (linear, group, chunk) and each length the error of the product against the exact
one is measured on captured rows, weighted by how much the loss depends on each output. The lengths then
minimise

    sum of errors    subject to    sum of MACs * length  <=  budget * sum of MACs

by a Lagrange multiplier: each entry takes the length of least ``error + lambda * MACs * length``, lambda is
bisected until the budget is met, and what is left of it goes to the steps that gain most for each cycle.
Errors of different chunks are taken to add up, which they do but for their bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.stochastic import Stochastic
from fewbits.kernels.stochastic.codes import stochastic_codes
from fewbits.kernels.stochastic.quantize import quantize_stochastic


@dataclass(frozen=True)
class ErrorTable:
    """Errors of one linear.

    Attributes:
        errors: (groups, chunks, lengths), weighted squared errors: means over rows, times the group's share.
        macs: (groups, chunks), products for each row that passes, times the group's share.
        thresholds: between the groups, descending.
    """

    errors: Tensor
    macs: Tensor
    thresholds: tuple[float, ...]


def error_table(
    x: Tensor,
    weight: Tensor,
    importance: Tensor,
    options: Stochastic,
    levels: Sequence[int],
    *,
    smooth_scales: Tensor | None = None,
    groups: int = 1,
) -> ErrorTable:
    """Measure the errors of one linear.

    Args:
        x: captured input rows (n, K).
        weight: (M, K).
        importance: of each output, (M,).
        options: of the product.
        levels: the stream lengths to measure.
        smooth_scales: (K,).
        groups: row groups of about the same size.
    """
    errors = chunk_errors(x, weight, importance, options, levels, smooth_scales)
    size = x.abs().amax(-1) if smooth_scales is None else (x / smooth_scales.to(x)).abs().amax(-1)
    thresholds = tuple(float(size.float().quantile(1 - g / groups)) for g in range(1, groups))
    thresholds = tuple(sorted(set(thresholds), reverse=True))
    member = torch.zeros(len(x), dtype=torch.long, device=x.device)
    for threshold in thresholds:
        member += size < threshold
    ones = torch.nn.functional.one_hot(member, len(thresholds) + 1).to(errors)  # (n, G)
    shares = ones.mean(0)
    chunk_sizes = torch.tensor(
        [float(c.stop - c.start) for c in options.chunks(x.shape[1])], dtype=torch.float32
    )
    return ErrorTable(
        torch.einsum("ng,ncl->gcl", ones, errors).cpu() / len(x),
        shares.cpu()[:, None] * chunk_sizes * weight.shape[0],
        thresholds,
    )


def chunk_errors(
    x: Tensor,
    weight: Tensor,
    importance: Tensor,
    options: Stochastic,
    levels: Sequence[int],
    smooth_scales: Tensor | None = None,
) -> Tensor:
    """The weighted squared error of each row's chunk at each length, (n, chunks, lengths) float32."""
    x, weight = x.float(), weight.detach().float()
    qa, sa = quantize_stochastic(x, options, smooth_scales)
    qb, sb = quantize_stochastic(weight, options, smooth_scales, is_b=True)
    one = replace(options, chunk_d=0)
    errors = []
    for i, chunk in enumerate(options.chunks(x.shape[1])):
        exact = x[:, chunk] @ weight[:, chunk].mT
        operands = (qa[None, :, chunk], sa[None, :, i : i + 1], qb[None, :, chunk], sb[None, :, i : i + 1])
        parts = [stochastic_codes(*operands, one, (level,))[0] for level in levels]
        errors.append(
            torch.stack([((part - exact).square() * importance.to(x)).sum(-1) for part in parts], -1)
        )
    return torch.stack(errors, 1)


def choose_lengths(
    tables: Sequence[ErrorTable], levels: Sequence[int], budget: float
) -> tuple[list[Tensor], float]:
    """Lengths (groups, chunks) of each linear, and the cycles they take for each product on average.

    Args:
        tables: of each linear.
        levels: the stream lengths, ascending, that the tables measured.
        budget: cycles for each product, on average over all of them.

    Raises:
        BadInput: a budget below the shortest length.
    """
    if list(levels) != sorted(set(levels)):
        raise BadInput(f"stream lengths {list(levels)} must ascend; sort them and name each once.")
    if not levels or budget < levels[0]:
        shortest = levels[0] if levels else None
        raise BadInput(
            f"a budget of {budget:g} cycles is below the shortest stream length, {shortest}; raise the "
            "budget or allow shorter streams."
        )
    errors = torch.cat([table.errors.flatten(0, 1) for table in tables]).double()
    macs = torch.cat([table.macs.flatten() for table in tables]).double()
    length = torch.tensor(levels, dtype=torch.float64)
    costs = macs[:, None] * length / macs.sum()
    chosen = _spend(_bisect(errors, costs, budget), errors, costs, budget)
    mean = float(costs.gather(1, chosen[:, None]).sum())
    picked = length.long()[chosen].split([table.macs.numel() for table in tables])
    return [p.view(table.macs.shape) for p, table in zip(picked, tables, strict=True)], mean


def _bisect(errors: Tensor, costs: Tensor, budget: float) -> Tensor:
    """The lengths of the smallest multiplier that meets the budget."""

    def choice(multiplier: float) -> Tensor:
        return (errors + multiplier * costs).argmin(1)

    def cost(chosen: Tensor) -> float:
        return float(costs.gather(1, chosen[:, None]).sum())

    if cost(choice(0.0)) <= budget:
        return choice(0.0)
    low, high = 0.0, 1.0
    while cost(choice(high)) > budget and high < 1e300:
        low, high = high, high * 16
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(choice(middle)) > budget else (low, middle)
    return choice(high)


def _spend(chosen: Tensor, errors: Tensor, costs: Tensor, budget: float) -> Tensor:
    """What is left of the budget, step by step where an error falls most for each cycle."""
    chosen = chosen.clone()
    left = budget - float(costs.gather(1, chosen[:, None]).sum())
    index = torch.arange(errors.shape[1])
    while True:
        gain = errors.gather(1, chosen[:, None]) - errors
        price = costs - costs.gather(1, chosen[:, None])
        possible = (gain > 0) & (price > 0) & (price <= left + 1e-12) & (index > chosen[:, None])
        if not possible.any():
            return chosen
        rate = torch.where(possible, gain / price.clamp(min=1e-300), -torch.inf)
        item, level = divmod(int(rate.argmax()), errors.shape[1])
        left -= float(price[item, level])
        chosen[item] = level
