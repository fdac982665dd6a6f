"""A GGUF file's tensors by the gguf package: for tests that have the package."""

from __future__ import annotations

from pathlib import Path

import torch

from tests import peers


def decoded(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Of each tensor its values and its kind."""
    import gguf

    tensors = gguf.GGUFReader(file).tensors
    values = {t.name: peers.live_gguf(t.data, t.tensor_type) for t in tensors}
    return values, {t.name: t.tensor_type.name for t in tensors}


def turned(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of rows, in the words of its own converter."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)
