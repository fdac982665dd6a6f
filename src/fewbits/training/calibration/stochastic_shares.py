"""Attention's share of a budget of cycles: several shares, screened on the calibration text.

How much of a loss comes from the errors of QK^T and PV cannot be read from those errors: softmax forgives
some and not others. So shares are tried. Each candidate gives QK^T and PV lengths that are multiples of the
budget and leaves the rest to the linears, so that all take the budget's cycles, weighted by MACs. They run on
the same windows, and those that are worse with confidence are given up early
(`fewbits.inference.stochastic.screen`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.inference.evaluate import TextWindows, Window
from fewbits.inference.paired import Interval
from fewbits.inference.stochastic.screen import Candidate, Screening, Standing, screen
from fewbits.inference.stochastic.work import count_work
from fewbits.recipes.stochastic_config import AttentionSetting, StochasticConfig

OPS = ("scores", "values")
SCORES = (0.5, 1.0, 1.5, 2.0, 3.0)  # lengths of QK^T to try, in units of the budget
VALUES = (0.25, 0.5, 1.0, 1.5)  # and of PV
_ROUND = 4  # windows
Rest = Callable[[float], StochasticConfig]


@dataclass(frozen=True)
class Shares:
    """What was chosen.

    Attributes:
        config: the whole configuration.
        scores: stream length of QK^T.
        values: stream length of PV.
        mean_cycles: of a product, attention's included.
        against_equal: the loss against the budget as the length of all products, nats for a token, on the
            windows that chose; None where that is what was chosen.
        tried: how many candidates.
    """

    config: StochasticConfig
    scores: int
    values: int
    mean_cycles: float
    against_equal: Interval | None
    tried: int


def choose_shares(
    model: Any,
    batches: Sequence[Tensor],
    budget: float,
    linear_macs: float,
    longest: int,
    rest: Rest,
    *,
    shortest: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Shares:
    """The best shares for attention's products.

    Args:
        model: in its original form, and so again afterwards.
        batches: token ids (B, T); each row is a window.
        budget: cycles for each product, on average over linears and attention.
        linear_macs: products of the linears that run in streams, for each token.
        longest: stream length.
        rest: a configuration, without attention, whose linears take so many cycles on average.
        shortest: stream length of a linear.
        progress: called as ``progress(windows done, windows in all)``.

    Raises:
        BadInput: no share leaves the linears their shortest streams.
        Unsupported: attention that cannot run in streams.
    """
    macs = _attention_macs(model, batches[0])
    total = linear_macs + sum(macs.values())
    settings: dict[AttentionSetting, float] = {}  # cycles that are left to a product of the linears
    for of_scores, of_values in product(SCORES, VALUES):
        lengths = {"scores": round(budget * of_scores), "values": round(budget * of_values)}
        left = budget * total - sum(macs[op] * lengths[op] for op in OPS)
        if min(lengths.values()) >= 1 and max(lengths.values()) <= longest and left >= shortest * linear_macs:
            settings.setdefault(
                AttentionSetting(scores=lengths["scores"], values=lengths["values"]), left / linear_macs
            )
    equal = AttentionSetting(scores=round(budget), values=round(budget))
    if not settings or equal not in settings:
        raise BadInput(
            f"a budget of {budget:g} cycles leaves attention no lengths to choose between (from {shortest} "
            f"to {longest} steps); give another budget, or attention's length as a number."
        )
    configs = {s: replace(rest(left), attention=(("*", s),)) for s, left in settings.items()}
    others = [Candidate(f"{s.scores}, {s.values}", c) for s, c in configs.items() if s != equal]
    standings = []
    if others:
        text, how = _windows(batches), Screening(batch_size=_ROUND)
        standings = list(screen(model, text, configs[equal], others, how, progress=progress).rows)
    best = standings[0] if standings and _is_better(standings[0]) else None
    chosen = equal if best is None else dict(best.candidate.config.attention)["*"]
    spent = sum(macs[op] * chosen.lengths(op)[0] for op in OPS)
    config = configs[chosen]
    mean = (spent + linear_macs * config.calibration["mean_cycles"]) / total
    return Shares(
        config=config,
        scores=chosen.lengths("scores")[0],
        values=chosen.lengths("values")[0],
        mean_cycles=mean,
        against_equal=None if best is None else best.against_base,
        tried=len(settings),
    )


def _is_better(row: Standing) -> bool:
    return not row.given_up and row.against_base.mean < 0


def _attention_macs(model: Any, ids: Tensor) -> dict[str, float]:
    """Products of QK^T and of PV, for each token of a window."""
    work = count_work(model, ids)
    return {op: sum(p.macs for p in work.products if p.op == op) / work.tokens for op in OPS}


def _windows(batches: Sequence[Tensor]) -> TextWindows:
    """Each row a window, its first token not scored."""
    rows = [row for ids in batches for row in ids]
    ends = torch.tensor([len(row) for row in rows]).cumsum(0).tolist()
    windows = [Window(end - len(row), end - len(row) + 1, end) for row, end in zip(rows, ends, strict=True)]
    longest = max(len(row) for row in rows)
    return TextWindows(torch.cat(rows).cpu(), windows, None, 0, longest, longest)
