"""The mean of all ranks' gradients, once a step, after its last backward pass.

Torch's DistributedDataParallel averages during that pass, which hides the travel but ties the ranks together:
a rank that runs out of memory in the middle cannot begin its pass again, and a CUDA graph would have to hold
collectives. Where gradients are small beside the passes (adapters) or passes are replayed graphs, the travel
comes afterwards: 42 million float32 gradients, an adapter of rank 16 on an 8B model, are 0.17 GB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET_BYTES = 256 << 20


class GradientMean:
    """Replaces each gradient by its mean over the ranks of a group; called by all of them."""

    def __init__(self, parameters: Iterable[nn.Parameter], size: int, group: dist.ProcessGroup | None = None):
        """Of the parameters that train.

        Args:
            parameters: of the model, the same on every rank.
            size: how many ranks.
            group: which ones; None: all.
        """
        self.parameters = [p for p in parameters if p.requires_grad]
        self.size, self.group = size, group

    @torch.no_grad()
    def __call__(self) -> None:
        """A parameter that had no gradient here has one afterwards: another rank may have used it."""
        if self.size == 1:
            return
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for bucket in self._buckets():
            gradients = [p.grad for p in bucket if p.grad is not None]
            flat = torch.cat([g.reshape(-1) for g in gradients])
            dist.all_reduce(flat, group=self.group)
            flat /= self.size
            parts = flat.split([g.numel() for g in gradients])
            torch._foreach_copy_(gradients, [t.view_as(g) for t, g in zip(parts, gradients, strict=True)])

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        """Parameters of one dtype and device, of some size together."""
        bucket: list[nn.Parameter] = []
        held = 0
        for p in self.parameters:
            if bucket and (_kind(p) != _kind(bucket[0]) or held + _bytes(p) > _BUCKET_BYTES):
                yield bucket
                bucket, held = [], 0
            bucket.append(p)
            held += _bytes(p)
        if bucket:
            yield bucket


def _kind(p: Tensor) -> tuple[torch.dtype, torch.device]:
    return p.dtype, p.device


def _bytes(p: Tensor) -> int:
    return p.numel() * p.element_size()
