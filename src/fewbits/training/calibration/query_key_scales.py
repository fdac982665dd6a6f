"""Scales between queries and keys that make the stochastic product of both lose least, from calibration text.

With k_i and q_i the root mean squares of channel i of a head of keys and of its queries (over the two
channels that are turned together), candidates are

    s_i = k_i**alpha / q_i**beta        alpha, beta in 0, 1/4, 1/2, 3/4, 1

divided by their geometric mean. For each head of keys (for all heads together, where one norm serves them)
the one is taken whose attention weights lie nearest to the exact ones: the least mean Kullback-Leibler
divergence of softmax(exact scores) from softmax(stochastic scores), over the queries of the text. s = 1 is
among the candidates, so on the calibration text no head gets worse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.stochastic import Stochastic
from fewbits.models.stochastic.query_key_scales import (
    QueriesAndKeys,
    QueryKeyPlace,
    captured_queries_and_keys,
    query_key_places,
)
from fewbits.nn.stochastic.product import stochastic_product

_EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class QueryKeyChoice:
    """The scales of one attention module, and what they are worth on the calibration text.

    Attributes:
        scales: (heads of keys, head size), for `fold_query_key_scales`.
        before: divergence of the attention weights without scales, mean over queries and heads, in nats.
        after: the same with them.
    """

    scales: Tensor
    before: float
    after: float


def choose_query_key_scales(
    model: Any, batches: Iterable[Tensor], options: Stochastic, *, powers_of_two: bool = False
) -> dict[str, QueryKeyChoice]:
    """The best scales of every attention module, by its full name.

    Args:
        model: a Hugging Face model of a known family, in its original form.
        batches: token ids (B, T), without padding.
        options: of the product of queries and keys, its stream length included.
        powers_of_two: take only such scales: folding them changes no bit of what the model computes exactly.

    Raises:
        BadInput: no tokens.
        Unsupported: see `fewbits.models.stochastic.query_key_scales.query_key_places`.
    """
    places = query_key_places(model)
    operands = list(captured_queries_and_keys(model, batches))
    if not operands or not all(o.q.numel() for of_batch in operands for o in of_batch.values()):
        raise BadInput("there are no tokens to choose scales by; give at least one batch of them.")
    return {
        name: _choice([of_batch[name] for of_batch in operands], place, options, powers_of_two)
        for name, place in places.items()
    }


def _choice(
    operands: list[QueriesAndKeys], place: QueryKeyPlace, options: Stochastic, powers_of_two: bool
) -> QueryKeyChoice:
    candidates = _candidates(operands, place, powers_of_two)
    # (candidates, heads of keys)
    losses = torch.stack([_divergence(operands, place, s, options) for s in candidates])
    if place.shared:
        losses = losses.mean(1, keepdim=True).expand_as(losses)
    best = losses.argmin(0)
    scales = candidates[best, torch.arange(place.heads)]
    after = losses.gather(0, best[None]).mean()
    return QueryKeyChoice(scales, float(losses[0].mean()), float(after))


def _candidates(operands: list[QueriesAndKeys], place: QueryKeyPlace, powers_of_two: bool) -> Tensor:
    """(candidates, heads of keys, head size) float32 on the CPU, the first of ones."""
    q = _channel_size([o.q for o in operands], place, place.group)
    k = _channel_size([o.k for o in operands], place, 1)
    if place.shared:
        q, k = (x.square().mean(0, keepdim=True).sqrt().expand_as(x) for x in (q, k))
    candidates = []
    for alpha in _EXPONENTS:
        for beta in _EXPONENTS:
            logs = alpha * k.log2() - beta * q.log2()
            logs = logs - logs.mean(1, keepdim=True)
            candidates.append((logs.round() if powers_of_two else logs).exp2())
    return torch.stack(candidates)


def _channel_size(xs: list[Tensor], place: QueryKeyPlace, group: int) -> Tensor:
    """Root mean square of each channel of each head of keys, one for channels that are turned together."""
    squares = torch.stack([x.float().square().mean((0, 2)).cpu() for x in xs]).mean(0)  # (heads, D)
    squares = squares.view(place.heads, group, place.size).mean(1)
    if place.pairs is not None:
        both = squares[:, place.pairs].mean(1)
        squares = squares.clone()
        squares[:, place.pairs[0]] = squares[:, place.pairs[1]] = both
    smallest = squares.amax(1, keepdim=True).clamp(min=1e-30) * 1e-8  # a channel that is never used
    return torch.maximum(squares, smallest).sqrt()


def _divergence(
    operands: list[QueriesAndKeys], place: QueryKeyPlace, scales: Tensor, options: Stochastic
) -> Tensor:
    """Mean divergence of each head of keys, (heads,) float32."""
    total = torch.stack([_of_batch(o, place, scales.to(o.q.device), options) for o in operands])
    return total.mean(0).cpu()


def _of_batch(o: QueriesAndKeys, place: QueryKeyPlace, scales: Tensor, options: Stochastic) -> Tensor:
    B, _, T, D = o.q.shape
    q = o.q.float().view(B, place.heads, place.group, T, D) * scales[:, None, None]
    k = o.k.float() / scales[:, None]
    rows = q.reshape(B * place.heads, place.group * T, D), k.reshape(B * place.heads, T, D)
    logs = []
    for product in (None, options):
        scores = stochastic_product(*rows, product).view(B, place.heads, place.group, T, T) * o.factor
        if o.soft_cap is not None:
            scores = o.soft_cap * torch.tanh(scores / o.soft_cap)
        hidden = torch.ones(T, T, dtype=torch.bool, device=scores.device).triu(1)
        logs.append(scores.masked_fill(hidden, -torch.inf).log_softmax(-1))
    exact, counted = logs
    gaps = (exact - counted).masked_fill(exact == -torch.inf, 0.0)
    return (exact.exp() * gaps).sum(-1).mean((0, 2, 3))
