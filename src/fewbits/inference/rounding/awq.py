"""AWQ (Lin et al. 2023): columns that see large inputs are made larger before rounding, their inputs smaller.

For linears that read the same input x, ``W x = (W diag(s)) (x / s)``. The division is folded into what makes
x: the norm before q, k, v and before gate, up; the up projection before down. ``s = mean|x| ** power``, and
the power of twenty between 0 and 1 with the least error of the outputs (by H, see `gptq`) is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fewbits.formats.base import Format
from fewbits.inference.rounding.gptq import loss_of, nearest

_POWERS = tuple(number / 20 for number in range(20))
# What makes the input (a norm, or a linear whose rows it is), and the linears that read it.
FOLDS = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp.up_proj", ("mlp.down_proj",)),
)


@torch.no_grad()
def fold_scales(
    layer: Any,
    hessians: Mapping[str, Tensor],
    magnitudes: Mapping[str, Tensor],
    formats: Mapping[str, Format],
) -> dict[str, Tensor]:
    """Scale the columns of a decoder layer's linears, in place.

    Args:
        layer: a decoder layer with plain linears; what it lacks of `FOLDS` is left out.
        hessians: H by the linear's name in the layer; it is scaled along.
        magnitudes: mean |x| (K,) likewise.
        formats: how each linear will be stored.

    Returns:
        The hessians of the scaled layer.
    """
    changed = dict(hessians)
    for maker_name, readers in FOLDS:
        present = [name for name in readers if name in formats]
        maker = _find(layer, maker_name)
        if maker is None or len(present) != len(readers) or not _scales(maker):
            continue
        weights = [layer.get_submodule(name).weight for name in present]
        scale = _best(weights, [formats[n] for n in present], changed[present[0]], magnitudes[present[0]])
        for name, weight in zip(present, weights, strict=True):
            weight.data = (weight.float() * scale).to(weight.dtype)
            changed[name] = changed[name] / scale[:, None] / scale[None, :]
        maker.weight.data = (
            maker.weight.float() / (scale[:, None] if maker.weight.dim() == 2 else scale)
        ).to(maker.weight.dtype)
        if getattr(maker, "bias", None) is not None:
            maker.bias.data = (maker.bias.float() / scale).to(maker.bias.dtype)
    return changed


def _find(layer: Any, name: str) -> Any:
    try:
        return layer.get_submodule(name)
    except AttributeError:
        return None


def _scales(maker: Any) -> bool:
    """Whether dividing the module's weight divides its output: not for norms that multiply by 1 + weight."""
    return isinstance(maker, torch.nn.Linear) or type(maker).__name__ in ("LlamaRMSNorm", "MistralRMSNorm",
        "Qwen2RMSNorm", "Qwen3RMSNorm", "Phi3RMSNorm")  # fmt: skip


def _best(weights: Sequence[Tensor], formats: Sequence[Format], hessian: Tensor, magnitude: Tensor) -> Tensor:
    plain = torch.ones_like(magnitude)
    best, least = plain, float("inf")
    for power in _POWERS:
        scale = magnitude.clamp_min(1e-6) ** power
        scale = scale / (scale.max() * scale.min()).sqrt()
        moved = hessian / scale[:, None] / scale[None, :]
        error = 0.0
        for weight, format in zip(weights, formats, strict=True):
            wide = weight.float() * scale
            error += loss_of(wide, nearest(wide, format, search=False), moved)
        if error < least:
            best, least = scale, error
    return best
