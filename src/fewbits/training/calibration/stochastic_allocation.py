"""Stream lengths by measured loss: a knapsack over a swap table, with how sure its answer is.

Each operator of a swap table takes one of its settings: the one that it has in the base, or one that was
measured. Losses of different operators are taken to add up (`fewbits sc screen` tells how far they do). With
MACs m_i and length L of operator i, the choice minimises the sum of losses subject to one of two budgets B:

    over "stochastic"   sum over stochastic operators of m_i (L_i - B)  <=  0
    over "all"          sum of m_i L_i  <=  B * sum of m_i, where whole numbers count ``int8_cycles``

Both weigh cycles by MACs. The first leaves the INT8 mask out on both sides, so masked operators cannot leave
a budget unspent; it puts no price on the mask, though, so a choice that may widen it (``int8``) belongs with
the second. Products that a table does not swap stay as they are in the base, and count.

The knapsack is exact: states (cost, loss) that none beats are merged operator by operator; only where more
than ``STATES`` of them remain are they thinned out, and `Allocation.exact` says so.

Measured losses are noisy. A longer stream of one operator does not lose more, so along the lengths losses are
made monotone (pool adjacent violators); ``risk`` adds so many standard errors to each. The loss of the choice
is estimated on windows that it did not see: each fold of windows is judged by the choice made without it. And
the choice is made again on resamples of the windows, whose agreement with it is `Allocation.agreement`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fewbits.errors import BadInput
from fewbits.inference.paired import Interval, paired_interval
from fewbits.inference.stochastic.swap import ATTENTION, Operator, Swap, SwapTable, swapped
from fewbits.recipes.stochastic_config import StochasticConfig

STATES = 20_000
OVER = ("stochastic", "all")
Setting = int | str  # as in a swap table, or "base"
Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What may be spent, and how carefully.

    Attributes:
        cycles: B, stream steps of a product on average.
        over: "stochastic" or "all".
        int8_cycles: what a product of whole numbers counts under "all".
        levels: stream lengths that may be chosen; None: all that were measured.
        int8: whether operators may be given to whole numbers, of whatever bits, where that was measured.
        risk: standard errors added to every loss.
        folds: parts of the windows for the estimate of the loss.
        resamples: of the windows, for the agreement; 0: none.
        seed: of the resamples.
    """

    cycles: float
    over: str = "stochastic"
    int8_cycles: float = 0.0
    levels: tuple[int, ...] | None = None
    int8: bool = False
    risk: float = 0.0
    folds: int = 4
    resamples: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if self.over not in OVER:
            raise BadInput(f"a budget over {self.over!r} is unknown; choose one of {', '.join(OVER)}.")
        if not self.cycles > 0 or self.int8_cycles < 0 or self.risk < 0:
            raise BadInput(
                f"a budget of {self.cycles:g} cycles, int8_cycles={self.int8_cycles:g}, risk={self.risk:g} "
                "is refused: give a budget above zero and nothing negative."
            )
        if self.folds < 2 or self.resamples < 0:
            raise BadInput(f"folds={self.folds}, resamples={self.resamples}: give at least 2 and 0.")


@dataclass(frozen=True)
class Allocation:
    """What a budget was spent on.

    Attributes:
        settings: of each operator, by its name: as in the swap table, or "base".
        config: the base with these settings.
        cycles: what they take, in the budget's terms.
        predicted: loss against the base, nats for a token, on the windows that chose: too good to be true.
        held_out: the same on windows that did not choose.
        agreement: by operator, the share of resamples that chose the same.
        exact: whether no better choice exists for these losses.
    """

    settings: Mapping[str, Setting]
    config: StochasticConfig
    cycles: float
    predicted: Interval
    held_out: Interval
    agreement: Mapping[str, float]
    exact: bool


@dataclass(frozen=True)
class _Item:
    operator: Operator
    settings: tuple[Setting, ...]
    whole: tuple[bool, ...]  # whether a setting has no streams
    costs: Numbers  # (settings,)
    differences: Numbers  # (settings, windows)


def allocate(table: SwapTable, budget: Budget) -> Allocation:
    """Spend a budget.

    Args:
        table: measured swaps.
        budget: what may be spent.

    Raises:
        BadInput: too few windows, or a budget that no choice meets.
    """
    n = len(table.tokens)
    if n < budget.folds:
        raise BadInput(
            f"{n} windows make no {budget.folds} folds; measure more windows, or ask for fewer folds."
        )
    items, limit = _items(table, budget), _limit(table, budget)
    tokens = np.array(table.tokens, dtype=np.float64)
    every = np.arange(n)
    chosen, exact = _choose(items, limit, tokens, every, budget)
    names = [item.operator.name for item in items]
    held_out = np.zeros(n)
    for fold in range(budget.folds):
        judged = every % budget.folds == fold
        picks, _ = _choose(items, limit, tokens, every[~judged], budget)
        held_out[judged] = _total(items, picks)[judged]
    random = np.random.default_rng(budget.seed)
    same = np.zeros(len(items))
    for _ in range(budget.resamples):
        picks, _ = _choose(items, limit, tokens, random.integers(0, n, n), budget)
        same += np.array(picks) == np.array(chosen)
    settings = {name: item.settings[pick] for name, item, pick in zip(names, items, chosen, strict=True)}
    agreement = (same / max(budget.resamples, 1)).tolist() if budget.resamples else []
    return Allocation(
        settings,
        _config(table, items, chosen),
        _spent(table, items, chosen, budget),
        paired_interval(_total(items, chosen).tolist(), table.tokens),
        paired_interval(held_out.tolist(), table.tokens),
        dict(zip(names, agreement, strict=False)),
        exact,
    )


def _items(table: SwapTable, budget: Budget) -> list[_Item]:
    operators = {swap.operator.name: swap.operator for swap in table.swaps}
    items = []
    for name, operator in operators.items():
        base = table.cycles[name]
        options: dict[Setting, tuple[float, Sequence[float]]] = {"base": (base, [0.0] * len(table.tokens))}
        for swap in table.swaps:
            if swap.operator.name == name and _allowed(swap.to, budget):
                options[swap.to] = (_length(table, swap), swap.differences)
        if budget.levels is not None and base > 0 and base not in budget.levels and len(options) > 1:
            del options["base"]
        whole = tuple(length == 0 for length, _ in options.values())
        costs = [_cost(table.macs[name], length, budget) for length, _ in options.values()]
        differences = np.array([d for _, d in options.values()], dtype=np.float64)
        items.append(_Item(operator, tuple(options), whole, np.array(costs), differences))
    return items


def _allowed(to: Setting, budget: Budget) -> bool:
    if isinstance(to, str) and to.startswith("int"):
        return budget.int8
    return budget.levels is None or to in budget.levels


def _length(table: SwapTable, swap: Swap) -> float:
    """Stream steps of a product of an operator, on average, after a swap; as they were measured."""
    if isinstance(swap.to, str) and swap.to.startswith("int"):
        return 0.0
    name = swap.operator.name
    return max(table.cycles[name] - swap.freed / table.macs[name], 0.0)


def _cost(macs: float, length: float, budget: Budget) -> float:
    """What an operator takes of the budget; a length of 0 stands for whole numbers, the mask."""
    if budget.over == "stochastic":
        return macs * (length - budget.cycles) if length else 0.0
    return macs * (length or budget.int8_cycles)


def _limit(table: SwapTable, budget: Budget) -> float:
    """What the choice may cost, products that are not swapped being paid for already."""
    swapped_names = {swap.operator.name for swap in table.swaps}
    rest = [name for name in table.macs if name not in swapped_names]
    paid = sum(_cost(table.macs[name], table.cycles[name], budget) for name in rest)
    total = 0.0 if budget.over == "stochastic" else budget.cycles * sum(table.macs.values())
    return total - paid


def _losses(item: _Item, tokens: Numbers, windows: NDArray[np.int64], risk: float) -> Numbers:
    """Nats for a token of each setting, monotone along the lengths."""
    total, n = tokens[windows].sum(), len(windows)
    differences = item.differences[:, windows]
    losses: Numbers = differences.sum(1) / total
    if risk and n > 1:
        spread = differences - losses[:, None] * tokens[windows]
        losses = losses + risk * np.sqrt(n / (n - 1) * (spread**2).sum(1)) / total
    order = sorted((i for i, whole in enumerate(item.whole) if not whole), key=lambda i: item.costs[i])
    losses[order] = _falling(losses[order])
    return losses


def _falling(values: Numbers) -> Numbers:
    """The nearest sequence that never rises (pool adjacent violators)."""
    groups: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, count = value, 1
        while groups and groups[-1][0] < mean:
            before, size = groups.pop()
            mean, count = (mean * count + before * size) / (count + size), count + size
        groups.append((mean, count))
    return np.array([mean for mean, count in groups for _ in range(count)])


def _choose(
    items: Sequence[_Item], limit: float, tokens: Numbers, windows: NDArray[np.int64], budget: Budget
) -> tuple[list[int], bool]:
    """The number of each item's setting, and whether the choice is exact."""
    costs, losses, exact = np.zeros(1), np.zeros(1), True
    back: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    least = [float(item.costs.min()) for item in items]
    for i, item in enumerate(items):
        room = limit - sum(least[i + 1 :]) + 1e-9 * (1 + abs(limit))
        new_costs = (costs[:, None] + item.costs[None, :]).ravel()
        new_losses = (losses[:, None] + _losses(item, tokens, windows, budget.risk)[None, :]).ravel()
        fits = np.flatnonzero(new_costs <= room)
        if not len(fits):
            raise BadInput(_too_small(items, limit, budget))
        order = fits[np.lexsort((new_losses[fits], new_costs[fits]))]
        falling = np.minimum.accumulate(new_losses[order])
        best = order[np.r_[True, new_losses[order][1:] < falling[:-1]]]
        if len(best) > STATES:
            best, exact = best[_thinned(new_costs[best])], False
        costs, losses = new_costs[best], new_losses[best]
        back.append((best // len(item.costs), best % len(item.costs)))
    at, chosen = int(np.argmin(losses)), list[int]()
    for previous, option in reversed(back):
        chosen.append(int(option[at]))
        at = int(previous[at])
    return chosen[::-1], exact


def _thinned(costs: Numbers) -> NDArray[np.int64]:
    """Of states by rising cost and falling loss, the best of each of ``STATES`` equal steps of cost."""
    step = (costs[-1] - costs[0]) / STATES
    cell = np.floor((costs - costs[0]) / step).astype(np.int64)
    return np.flatnonzero(np.r_[cell[1:] != cell[:-1], True])


def _too_small(items: Sequence[_Item], limit: float, budget: Budget) -> str:
    shortest = min((to for item in items for to in item.settings if isinstance(to, int)), default=None)
    return (
        f"a budget of {budget.cycles:g} cycles over {budget.over} products is below what these settings can "
        f"take (the shortest stream is {shortest}); raise it, or measure shorter streams."
    )


def _total(items: Sequence[_Item], chosen: Sequence[int]) -> Numbers:
    """The loss of a choice in each window, summed over its tokens."""
    total: Numbers = np.sum([item.differences[i] for item, i in zip(items, chosen, strict=True)], axis=0)
    return total


def _config(table: SwapTable, items: Sequence[_Item], chosen: Sequence[int]) -> StochasticConfig:
    config = table.base
    for item, i in zip(items, chosen, strict=True):
        to = item.settings[i]
        if to != "base":
            config = swapped(config, item.operator, to)
    names = {n for item in items if item.operator.op in ATTENTION for n in item.operator.names}
    attention = tuple((n, config.attention_of(n)) for n in sorted(names))
    rest = tuple(pair for pair in table.base.attention if pair[0] not in names)
    first = {name: config.linears[i][1] for i, (name, _) in reversed([*enumerate(config.linears)])}
    ordered = dict.fromkeys(name for name, _ in config.linears)
    return replace(config, attention=(*attention, *rest), linears=tuple((n, first[n]) for n in ordered))


def _spent(table: SwapTable, items: Sequence[_Item], chosen: Sequence[int], budget: Budget) -> float:
    """Stream steps of a product on average, in the budget's terms."""
    cycles, macs = dict(table.cycles), dict(table.macs)
    for item, i in zip(items, chosen, strict=True):
        to = item.settings[i]
        if to != "base":
            swap = next(s for s in table.swaps if s.operator == item.operator and s.to == to)
            cycles[item.operator.name] = _length(table, swap)
    if budget.over == "stochastic":
        running = [name for name in macs if cycles[name] > 0]
        total = sum(macs[name] for name in running)
        return sum(macs[name] * cycles[name] for name in running) / total if total else 0.0
    spent = sum(macs[n] * (cycles[n] if cycles[n] > 0 else budget.int8_cycles) for n in macs)
    return spent / math.fsum(macs.values())
