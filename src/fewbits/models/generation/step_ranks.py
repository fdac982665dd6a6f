"""Ranks that share a model's layers (tensor parallelism), in a step of decoding.

Each rank has its own heads, their keys and values, and its part of the MLP; embeddings, norms and the output
head are whole, but for a few rows each rank multiplies its own share of the vocabulary alone. The residual
stream is the same on all of them: the first rank adds its share of a product to it, the others leave theirs
alone, and the sum of all is the new stream (`StepRanks`). On GPUs that reach each other's memory a kernel of
ours sums (rank_sum.py), else the process group's own collective.

Every rank makes the same calls with the same inputs, as torch's collectives want it; `check_same_call` says
so before anybody would wait for another. Tokens are the first rank's on all (`StepRanks.agree`).
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor, distributed, nn

from fewbits.decoder.projection import Part
from fewbits.errors import BadInput, Unsupported
from fewbits.host.walks import all_modules
from fewbits.kernels.generation.rank_sum import RankSum
from fewbits.models.generation.branches import Reader
from fewbits.nn.tensor_group import TensorGroup

_MOST_ROWS = 64  # of which letters of 8 bytes a value are worth it
_MOST_ROWS_OF_LOGITS = 8


def ranks_of(model: nn.Module) -> TensorGroup | None:
    """The ranks that share this model's layers; None if nobody does."""
    groups = (vars(module).get("tensor_group") for module in all_modules(model))
    return next((group for group in groups if group is not None), None)


def check_same_call(group: TensorGroup, device: torch.device, *values: Tensor | int | bool | None) -> None:
    """Raise `BadInput` on all ranks unless ``values`` are the same on all of them.

    Args:
        group: the ranks.
        device: where the model is.
        values: what the call is about; tensors of any shape and dtype.
    """
    digest = 0
    for value in values:
        if isinstance(value, Tensor):
            shape = str((tuple(value.shape), value.dtype))
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            digest = crc32(content, crc32(shape.encode(), digest))
        else:
            digest = crc32(str(value).encode(), digest)
    ends = torch.tensor([digest, -digest], dtype=torch.long, device=device)
    distributed.all_reduce(ends, distributed.ReduceOp.MAX, group=group.process_group)
    highest, lowest = ends.tolist()
    if highest != -lowest:
        raise BadInput(
            f"the {group.size} ranks that share this model's layers were called with different prompts or"
            " lengths; call generate() with the same on all of them."
        )


class StepRanks:
    """What a step of one rank does about the others.

    Attributes:
        group: the ranks.
        goes_on: whether this one adds its share of a product to the stream; the others write it there alone.
        direct: the kernel of ours that sums; None: the group's own collective does.
        why_not_direct: why, on any rank.
    """

    def __init__(self, group: TensorGroup, hidden: Tensor) -> None:
        """Agree on who sums; all ranks make their steps at the same time.

        Args:
            group: the ranks.
            hidden: (rows, width) float32: the stream, which stays where it is.
        """
        self.group, self.goes_on, self._hidden = group, group.rank == 0, hidden
        self.why_not_direct = "" if len(hidden) <= _MOST_ROWS else f"{len(hidden)} rows"
        self.direct = None if self.why_not_direct else self._agreed(hidden)

    def _agreed(self, x: Tensor) -> RankSum | None:
        """The kernel that sums x (rows, width), if every rank has it."""
        kernel = None
        early = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
        try:
            kernel = RankSum(x, self.group.process_group, self.group.rank, self.group.size, early=early)
        except Unsupported as error:
            self.why_not_direct = str(error).rstrip(".")
        missing = self.group.sum_(torch.tensor([kernel is None], dtype=torch.long, device=x.device))
        if int(missing) and kernel is not None:
            kernel, self.why_not_direct = None, "another rank has no such kernel"
        return kernel

    def launch(self) -> Tensor:
        """The stream (rows, width): the sum of all ranks' shares, in its place."""
        return self.group.sum_(self._hidden) if self.direct is None else self.direct.launch()

    def share_of_head(self, head: Reader, logits: Tensor) -> tuple[Reader, Tensor, RankSum] | None:
        """The rows of a head in 16 bits that this rank multiplies, and what sums all ranks' logits.

        Args:
            head: the linear that reads the stream last.
            logits: (rows, vocabulary) float32: zeros but for this rank's columns.

        Returns:
            The head's share, its columns of ``logits``, and the sum; None: each rank has all rows.
        """
        (part,), (rows, width) = head.parts, logits.shape
        shares = [width * i // self.group.size // 8 * 8 for i in range(self.group.size)] + [width]
        plain = isinstance(part.weight, Tensor) and part.branch is None
        if self.direct is None or not plain or rows > _MOST_ROWS_OF_LOGITS or shares[1] == 0:
            return None
        kernel = self._agreed(logits)
        if kernel is None:
            return None
        own = slice(*shares[self.group.rank : self.group.rank + 2])
        bias = None if part.bias is None else part.bias[own]
        assert isinstance(part.weight, Tensor)
        return Reader([Part(part.weight[own], bias)], head.norm), logits[:, own], kernel

    def agree(self, values: Tensor) -> Tensor:
        """The first rank's ``values``, of any shape, in their place on all ranks."""
        distributed.broadcast(values, group=self.group.process_group, group_src=0)
        return values
