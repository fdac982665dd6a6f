"""Text that the plain model writes itself, so that a recovery on few rows does not learn them by heart.

Each window begins with an eighth of a window of the user's rows; the rest is drawn, token by token, from what
the model says (no temperature, nothing cut off). On such text the model's own distribution is what a packed
model has to follow, and there is as much of it as one has time for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_AT_ONCE = 65536  # tokens of windows that are written together, keys and values of all of them
_BEGINNING = 8  # a window's share that is given


@torch.no_grad()
def written_windows(
    model: Any, windows: Tensor, tokens: int, progress: Callable[[int, int], None] | None = None
) -> Tensor:
    """Windows that the model goes on with.

    Args:
        model: the plain model, in evaluation mode.
        windows: (windows, T) int64 of the user's text, which beginnings are taken from.
        tokens: to write, at least; whole windows are.
        progress: called as ``progress(tokens written, tokens in all)``.

    Returns:
        (ceil(tokens / T), T) int64, the same for the same model, windows and device.
    """
    length = windows.shape[1]
    beginning, count = max(length // _BEGINNING, 1), -(-tokens // length)
    generator = torch.Generator(windows.device).manual_seed(0)
    pieces = []
    for begin in range(0, count, rows := max(_AT_ONCE // length, 1)):
        picked = torch.arange(begin, min(begin + rows, count), device=windows.device) % len(windows)
        pieces.append(_continued(model, windows[picked, :beginning], length, generator))
        if progress is not None:
            progress(min((begin + rows) * length, tokens), tokens)
    return torch.cat(pieces) if pieces else windows[:0]


def _continued(model: Any, ids: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """(rows, T) of texts that begin with ``ids`` (rows, t)."""
    from transformers import DynamicCache

    cache, step = DynamicCache(config=model.config), ids
    while ids.shape[1] < length:
        out = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        shares = out.logits[:, -1].float().softmax(-1)
        step = torch.multinomial(shares, 1, generator=generator)
        ids = torch.cat([ids, step], 1)
    return ids
