"""What the linears of a model are given on a text: for scales of activations and for importance matrices.

The merged weights run through transformers' own modules, each made just before it computes and dropped after
(`fewbits.models.writing.streamed_logits`): the memory is that of one layer and of the text's own activations,
however large the model is and however its decoder was fused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import NotFinite
from fewbits.models.writing.streamed_logits import streaming

_TOKENS_AT_ONCE = 4096


@dataclass
class InputMoments:
    """The inputs of one linear.

    Attributes:
        absmax: the largest magnitude.
        mean_square: (K,) float32, of each column.
        rows: inputs that were seen.
    """

    absmax: float
    mean_square: Tensor
    rows: int

    def add(self, x: Tensor) -> None:
        """Take more inputs (..., K)."""
        x = x.detach().reshape(-1, x.shape[-1]).float()
        self.absmax = max(self.absmax, float(x.abs().max()))
        rows = self.rows + x.shape[0]
        self.mean_square = self.mean_square * (self.rows / rows) + x.square().sum(0) / rows
        self.rows = rows


@torch.no_grad()
def measure_inputs(
    skeleton: Any, weight: Callable[[str], Tensor], windows: Tensor
) -> dict[str, InputMoments]:
    """The inputs of every linear below the head.

    Args:
        skeleton: the model on the meta device, from `fewbits.models.writing.streamed_logits.skeleton`.
        weight: gives a tensor by its name in transformers.
        windows: (windows, length) int64 tokens.

    Raises:
        NotFinite: a linear is given a NaN or an infinity.
    """
    moments: dict[str, InputMoments] = {}
    inner = getattr(skeleton, skeleton.base_model_prefix)
    linears = {
        f"{skeleton.base_model_prefix}.{name}": module
        for name, module in inner.named_modules()
        if isinstance(module, nn.Linear)
    }
    with streaming(skeleton, weight):
        hooks = [m.register_forward_pre_hook(partial(_take, moments, name)) for name, m in linears.items()]
        try:
            for batch in windows.split(max(_TOKENS_AT_ONCE // windows.shape[1], 1)):
                inner(input_ids=batch, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
    for name, moment in moments.items():
        if not bool(moment.mean_square.isfinite().all()):
            raise NotFinite(
                f"the inputs of {name} hold a NaN or an infinity on this text; nothing was written."
            )
    return moments


def _take(moments: dict[str, InputMoments], name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
    x = args[0]
    if name not in moments:
        moments[name] = InputMoments(0.0, torch.zeros(x.shape[-1], dtype=torch.float32), 0)
    moments[name].add(x)
