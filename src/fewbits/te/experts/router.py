"""Which experts a token goes to: scores, the top k of them, and the loss that balances experts."""

from __future__ import annotations

import enum
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.errors import BadInput


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


def _check_quantiles(
    words: tuple[Any, Any, Any], score_function: str, groups: Any, expert_bias: Tensor | None
) -> bool:
    """Whether quantile balancing is asked for, by words that fit together."""
    if all(word is None for word in words):
        return False
    if any(word is None for word in words):
        raise BadInput("qb_histogram, qb_bin_bounds and qb_histogram_mode must be provided together.")
    if score_function != "sigmoid" or groups or expert_bias is None:
        raise BadInput(
            "quantile balancing only supports score_function 'sigmoid' with an expert_bias and no groups of "
            "experts: leave num_groups and group_topk at None."
        )
    if words[2] not in ("two_kernel", "fused_atomic"):
        raise BadInput(f"qb_histogram_mode must be 'two_kernel' or 'fused_atomic', not {words[2]!r}.")
    return True


def _top_and_next(scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Indices (..., topk) of the largest scores (..., experts), and the largest of the others (..., 1).

    Of equal ones at the border that with the highest number is left out.
    """
    best = scores.topk(topk + 1, -1)
    cutoff = best.values[..., -1:]
    last = best.indices.masked_fill(best.values != cutoff, -1).amax(-1, keepdim=True)
    return best.indices[best.indices != last].view(*scores.shape[:-1], topk), cutoff


def _count_biases(biases: Tensor, histogram: Tensor, bounds: Tensor) -> None:
    """Count, for each expert, the biases (..., experts) with which tokens would have chosen it, by bins.

    Bins (experts, bins) of equal width lie between two bounds; what is outside counts to the outermost ones.
    """
    lower, upper = bounds.tolist()
    if not (math.isfinite(lower) and math.isfinite(upper) and lower < upper):
        raise BadInput(f"qb_bin_bounds must be finite with lower < upper, not [{lower}, {upper}].")
    experts, bins = histogram.shape
    steps = (biases - bounds[0]) * (bins / (bounds[1] - bounds[0]))
    index = steps.floor().long().clamp_(0, bins - 1) + torch.arange(experts, device=biases.device) * bins
    histogram += torch.bincount(index.flatten(), minlength=experts * bins).view(experts, bins)


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
        qb_histogram: (experts, bins) int32 of quantile balancing, added to: for each expert, how many tokens
            need which bias to choose it, see `_count_biases`. For "sigmoid" without groups.
        qb_bin_bounds: (2,) float32, where the bins begin and end.
        qb_histogram_mode: "two_kernel" or "fused_atomic", the same here.

    Returns:
        Probabilities (..., experts) in the logits' dtype, 0 where not chosen, and the map.
    """
    quantiles = (qb_histogram, qb_bin_bounds, qb_histogram_mode)
    balances = _check_quantiles(quantiles, score_function, num_groups or group_topk, expert_bias)
    after = score_function == "softmax" and not use_pre_softmax
    scores = logits if after else _score(logits, score_function)
    biased = scores if expert_bias is None or score_function == "softmax" else scores + expert_bias
    if balances and qb_histogram is not None and qb_bin_bounds is not None:
        index, cutoff = _top_and_next(biased.detach(), topk)
        _count_biases(cutoff - scores.detach(), qb_histogram, qb_bin_bounds)
    else:
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
