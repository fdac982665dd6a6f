"""A few steps of training on one batch, whose loss must fall."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def losses_of_steps(model: nn.Module, ids: Tensor, steps: int, *, lr: float = 1e-2) -> list[float]:
    """The loss of every step of AdamW over the parameters that train, on the same tokens."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
