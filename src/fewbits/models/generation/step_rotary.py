"""What a step of decoding needs of a model's rotary embedding: which kind it is, and its tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import SpecMismatch
from fewbits.families.spec import ModelSpec


def rope_kind(model: Any) -> str:
    """The name of a model's rotary embedding; "default" if nothing is said."""
    config = model.config.get_text_config()
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def tables_of(
    base: nn.Module, spec: ModelSpec, room: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (room, rotary) float32, rounded to ``dtype`` as the model's own are."""
    path = spec.embed.rpartition(".")[0]
    rotary = getattr(base.get_submodule(path), "rotary_emb", None)
    if rotary is None:
        raise SpecMismatch(f"{type(base).__name__} has no rotary embedding at {path}.rotary_emb.")
    positions = torch.arange(room, device=device)[None]
    with torch.no_grad():
        cosines, sines = rotary(torch.zeros(1, dtype=dtype, device=device), positions)
    return cosines[0].float().contiguous(), sines[0].float().contiguous()
