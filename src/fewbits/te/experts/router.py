"""Which experts a token goes to: scores, the top k of them, and the loss that balances experts."""

from __future__ import annotations

import enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.te.layers.module import refuse


class RoutingMapFormat(enum.IntEnum):
    """How a routing map is written: a boolean an expert, or eight in a byte, lowest bit first."""

    BYTEMAP = 0
    BITMAP_U8 = 1


def _written(chosen: Tensor, format: Any) -> Tensor:
    """A map (..., experts) in the format asked for."""
    if isinstance(format, str):
        words = {kind.name.lower(): kind for kind in RoutingMapFormat}
        if format.lower() not in words:
            raise BadInput(f"routing_map_format is 'bytemap' or 'bitmap_u8', not {format!r}.")
        format = words[format.lower()]
    if RoutingMapFormat(format) is RoutingMapFormat.BYTEMAP:
        return chosen
    padded = F.pad(chosen.to(torch.uint8), (0, -chosen.shape[-1] % 8)).unflatten(-1, (-1, 8))
    weights = 2 ** torch.arange(8, device=chosen.device)
    bytes_: Tensor = (padded * weights).sum(-1).to(torch.uint8)
    return bytes_


def _top(scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> Tensor:
    """Indices (..., topk) of the largest scores, taken from the best groups of experts if there are groups.

    A group is as good as the sum of its ``topk / group_topk`` largest scores.
    """
    if group_topk and num_groups:
        grouped = scores.unflatten(-1, (num_groups, -1))
        quality = grouped.topk(topk // group_topk, -1).values.sum(-1)
        best = torch.zeros_like(quality, dtype=torch.bool).scatter(
            -1, quality.topk(group_topk, -1).indices, True
        )
        scores = grouped.masked_fill(~best[..., None], -torch.inf).flatten(-2)
    return scores.topk(topk, -1).indices


def _score(logits: Tensor, function: str) -> Tensor:
    wide = logits.float()
    if function == "softmax":
        return wide.softmax(-1)
    if function == "sigmoid":
        return wide.sigmoid()
    if function == "sqrtsoftplus":
        return F.softplus(wide).sqrt()
    raise BadInput(f"score_function is 'softmax', 'sigmoid' or 'sqrtsoftplus', not {function!r}.")


def _share(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: Any = RoutingMapFormat.BYTEMAP,
    topk_indices: Tensor | None = None,
    qb_histogram: Tensor | None = None,
    qb_bin_bounds: Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The probabilities of the top k experts of each token.

    Args:
        logits: (..., experts).
        topk: experts a token.
        use_pre_softmax: "softmax" over all experts before the choice, instead of over the chosen ones.
        num_groups: groups of experts, of which `group_topk` are chosen first.
        group_topk: see there.
        scaling_factor: multiplies the probabilities.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus"; the latter two are divided by their sum over
            the chosen, unless topk is 1.
        expert_bias: (experts,), added to the latter two for the choice alone.
        routing_map_format: see `RoutingMapFormat`.
        topk_indices: (tokens, topk), filled with the chosen experts and returned instead of the map.
        qb_histogram: quantile balancing is refused, as are the next two.

    Returns:
        Probabilities (..., experts) in the logits' dtype, 0 where not chosen, and the map.
    """
    quantiles = (qb_histogram, qb_bin_bounds, qb_histogram_mode)
    refuse(any(q is not None for q in quantiles), "quantile balancing", "leave the qb_ arguments at None")
    after = score_function == "softmax" and not use_pre_softmax
    scores = logits if after else _score(logits, score_function)
    biased = scores if expert_bias is None or score_function == "softmax" else scores + expert_bias
    index = _top(biased.detach(), topk, num_groups, group_topk)
    chosen = scores.gather(-1, index)
    if after:
        chosen = chosen.float().softmax(-1)
    elif score_function != "softmax" and topk > 1:
        chosen = _share(chosen)
    if scaling_factor:
        chosen = chosen * scaling_factor
    probs = torch.zeros_like(logits).scatter(-1, index, chosen.to(logits.dtype))
    if topk_indices is not None:
        topk_indices.copy_(index.reshape(topk_indices.shape))
        return probs, topk_indices
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, True)
    return probs, _written(mask, routing_map_format)


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str, routing_map_format: Any = RoutingMapFormat.BYTEMAP
) -> tuple[Tensor, Tensor]:
    """The map of the top k experts and all scores, for the balancing loss.

    Args:
        logits: (..., experts).
        topk: experts a token.
        score_function: "softmax", or "sigmoid" or "sqrtsoftplus" divided by their sum.
        routing_map_format: see `RoutingMapFormat`.

    Returns:
        The map, and scores (..., experts) float32.
    """
    scores = _score(logits, score_function)
    scores = scores if score_function == "softmax" else _share(scores)
    index = scores.detach().topk(topk, -1).indices
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, True)
    return _written(mask, routing_map_format), scores


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: Any, num_experts: int, topk: int, coeff: float
) -> Tensor:
    """``coeff * experts / (topk * total**2) * sum of (probs summed) * (tokens)``, in probs' dtype.

    Args:
        probs: (tokens, experts).
        tokens_per_expert: (experts,) counts.
        total_num_tokens: a number, or a tensor of shape ().
        num_experts: over all ranks.
        topk: experts a token.
        coeff: of the loss.
    """
    summed = probs.float().sum(0) * tokens_per_expert.float()
    factor = num_experts * coeff / topk / total_num_tokens / total_num_tokens
    loss: Tensor = (summed.sum() * factor).to(probs.dtype)
    return loss
