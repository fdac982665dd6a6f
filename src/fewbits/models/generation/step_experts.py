"""Experts in a step of decoding that no host watches: transformers' own, and packed ones that keep values.

    y_t = sum over e: c_te W_down,e act(W_up,e x_t)        c_te = 0 for experts that routing has not chosen

x_t (H,), W_up,e (I', H), W_down,e (H, I); T rows, E experts, k of them a row, P = T k pairs.

transformers' "eager" asks the host which experts have rows, and so does its "grouped_mm" where torch has no
kernel for the dtype. Its interface for experts takes another way by a name of its own, which stands in the
configuration while a step runs: torch's grouped product where its kernel asks nobody; the P matrices that are
hit, where they are few (`batched_mm`); else all E experts for all T rows, whose weights are read once, as
nearly all of them would be. The numbers are the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.host.walks import all_modules
from fewbits.kernels.launch.jit import capability_of
from fewbits.models.generation.step_names import named
from fewbits.nn.experts import QuantizedExperts

_NAME = "fewbits_step"
_THEIRS = ("eager", "grouped_mm", None)  # what it stands in for; whatever else was chosen stays
_GATHERED = 3  # a gathered matrix is read, written and read again


@contextmanager
def experts_without_the_host(model: nn.Module) -> Iterator[None]:
    """While a step runs, experts of ``model`` go the ways of this file, and none keeps decoded weights."""
    modules = all_modules(model)
    keeping = [m for m in modules if isinstance(m, QuantizedExperts) and m.keeps_values]
    configs = _configs(modules)
    try:
        for module in keeping:  # a graph would read what somebody else may let go of
            module.keeps_values = False
        with named(configs, "_experts_implementation", _NAME):
            yield
    finally:
        for module in keeping:
            module.keeps_values = True


def _configs(modules: list[nn.Module]) -> list[Any]:
    """The configurations that say how transformers' experts multiply, where that may ask the host."""
    by_id: dict[int, Any] = {}
    for module in modules:
        if hasattr(module, "is_transposed") and not isinstance(module, QuantizedExperts):
            config = getattr(module, "config", None)
            if getattr(config, "_experts_implementation", "") in _THEIRS and not _is_parallel(module):
                by_id[id(config)] = config
    if by_id:
        _register()
    return list(by_id.values())


def _is_parallel(module: Any) -> bool:
    return bool(getattr(module, "_is_expert_parallel", False))


def _register() -> None:
    """Make the way known to transformers, which has one table of them; no entry of it is changed."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

    if _NAME not in ALL_EXPERTS_FUNCTIONS:
        ExpertsInterface.register(_NAME, _experts)


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Rows (T, H), their experts (T, k) and weights (T, k) to (T, H), as transformers calls such a way."""
    from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

    weight = module.gate_up_proj if module.has_gate else module.up_proj
    if _is_grouped_by_a_kernel(weight):
        way: Any = grouped_mm_experts_forward
    elif _GATHERED * top_k_index.numel() <= weight.shape[0]:
        way = batched_mm_experts_forward
    else:
        way = _all_experts
    return way(module, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]


def _is_grouped_by_a_kernel(weight: Tensor) -> bool:
    """Whether torch's grouped product of weights (E, N, K) is one kernel; any other asks the host."""
    return weight.is_cuda and weight.dtype == torch.bfloat16 and capability_of(weight.device)[0] in (9, 10)


def _all_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What `_experts` gives, by every expert for every row."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    weight = getattr(module, name)
    x = hidden_states.to(weight.dtype)
    inner = _product(module, name, x[None].expand(weight.shape[0], *x.shape))  # (E, T, I')
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)  # (E, T, I)
    outer = _product(module, "down_proj", inner)  # (E, T, H)
    if getattr(module, "has_post_expert_norm", False):
        outer = module.post_expert_norm(outer)
    share = top_k_weights.new_zeros(len(x), weight.shape[0]).scatter_add_(1, top_k_index, top_k_weights)
    share = share.t()[:, :, None]  # (E, T, 1)
    # Of rows that are not its own an expert may make infinity, and zero times that is NaN.
    return torch.where(share != 0, outer * share, 0).sum(0).to(hidden_states.dtype)


def _product(module: Any, name: str, x: Tensor) -> Tensor:
    """Rows x (E, T, inputs) by each expert's weight and bias: (E, T, outputs)."""
    weight = getattr(module, name)
    y = torch.bmm(x, weight if module.is_transposed else weight.transpose(1, 2))
    return y + getattr(module, f"{name}_bias")[:, None] if module.has_bias else y
