"""Attention with two stochastic products, ``scores = q k^T`` and ``out = p v``; each row has its own scale.

    scores[b, h, i, :] = sc(q[b, h, i], k[b, g, :]) * scale         g = h * K // H: keys are never repeated
    p = softmax(scores + mask)                                      as ever, in float32
    out[b, h, i, :]    = sc(p[b, h, i], v[b, g].T)                  inner dimension: the keys

Either product may stay exact. A row of p is quantised against its own largest value, a channel of v against
the largest value of its keys, a chunk of ``chunk_d`` keys at a time: keys that a token does not see have the
code 0 in p and count nothing, but those in the same chunk do take part in the scale of v. So a token's output
depends, by rounding, on later tokens of its last chunk, as it does in the hardware that is modelled; with a
key-value cache the last chunk is quantised anew at each step.

Straight-through: the gradient of a stochastic product is that of the exact one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.stochastic import Stochastic
from fewbits.nn.row_plan import STREAMS, RowPlan
from fewbits.nn.stochastic.product import stochastic_product


@dataclass(frozen=True)
class AttentionProducts:
    """How the two products of one layer's attention are computed; None: exactly.

    Attributes:
        scores: options of q k^T.
        values: options of p v.
        scores_plan: how the rows of q run: a call is all heads of all sequences.
        values_plan: the same of p.
    """

    scores: Stochastic | None = None
    values: Stochastic | None = None
    scores_plan: RowPlan = STREAMS
    values_plan: RowPlan = STREAMS

    def __post_init__(self) -> None:
        if self.values is not None and self.values.streams.signed and not self.values_plan.integer:
            raise Unsupported(
                f'attention values with signs "{self.values.signs}": the weight of a token that is not seen '
                "is a 0, which counts in such streams; leave values out (exact), or give them their own bits."
            )
        if self.values is not None and self.values.or_group > 1 and not self.values_plan.integer:
            raise Unsupported(
                f"attention values with or_group={self.values.or_group}: their inner dimensions are the "
                "tokens, which make no whole groups as they come; leave values out (exact), or give them "
                "their own bits."
            )
        for name in ("scores", "values"):
            options = getattr(self, name)
            if options is not None and options.granularity != "per_row":
                raise Unsupported(
                    f'attention {name} with granularity "{options.granularity}"; both products are "per_row".'
                )


def stochastic_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    products: AttentionProducts,
    *,
    scale: float,
    soft_cap: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, H, S, D) over k, v (B, K, T, D).

    Args:
        q: queries.
        k: keys; K divides H.
        v: values.
        mask: added to the scores, broadcastable to (B, H, S, T), or bool (True is seen); None: all is seen.
        products: how the two products are computed.
        scale: of the scores.
        soft_cap: scores go through ``soft_cap * tanh(score / soft_cap)``.
        dropout: probability of dropping a weight.

    Returns:
        out (B, S, H, D) and the weights (B, H, S, T), both in q's dtype.
    """
    B, H, S, D = q.shape
    K, T = k.shape[1:3]
    grouped = (B * K, H // K * S)  # the heads of one group are rows of one product: each row has its scale
    scores = stochastic_product(
        q.reshape(*grouped, D),
        k.reshape(B * K, T, D),
        products.scores,
        plan=products.scores_plan,
        groups=_grouped_rows(products.scores, products.scores_plan, q),
    )
    scores = scores.view(B, H, S, T) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.float().softmax(-1).to(q.dtype)
    if dropout:
        weights = torch.nn.functional.dropout(weights, dropout)
    out = stochastic_product(
        weights.view(*grouped, T),
        v.reshape(B * K, T, D).mT,
        products.values,
        plan=products.values_plan,
        groups=_grouped_rows(products.values, products.values_plan, weights),
    )
    return out.to(q.dtype).view(B, H, S, D).transpose(1, 2).contiguous(), weights


def _grouped_rows(options: Stochastic | None, plan: RowPlan, x: Tensor) -> Tensor | None:
    """The group of each row of x (B, H, S, K), as the product takes them; None where there is one."""
    return None if options is None else plan.groups(x)
