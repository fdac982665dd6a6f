"""Ranks that share a model's layers (tensor parallelism), in a step of decoding.

Each rank has its own heads, their keys and values, and its part of the MLP; embeddings, norms and the output
head are whole. The residual stream are the same on all of them: the first rank adds its share of a product to
it, the others leave theirs alone, and the sum of all is the new stream (`StepRanks`). On GPUs that reach each
other's memory a kernel of ours sums (rank_sum.py), else the process group's own collective.

Every rank makes the same calls with the same inputs, as torch's collectives want it; `check_same_call` says
so before anybody would wait for another. Tokens are the first rank's on all (`StepRanks.agree`).
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor, distributed, nn

from fewbits.errors import BadInput, Unsupported
from fewbits.host.walks import all_modules
from fewbits.kernels.generation.rank_sum import RankSum
from fewbits.nn.tensor_group import TensorGroup

_MOST_ROWS = 64  # of which letters of 8 bytes a value are worth it


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
        self.direct: RankSum | None = None
        self.why_not_direct = ""
        if len(hidden) > _MOST_ROWS:
            self.why_not_direct = f"{len(hidden)} rows"
        else:
            early = hidden.is_cuda and torch.cuda.get_device_capability(hidden.device) >= (9, 0)
            try:
                self.direct = RankSum(hidden, group.process_group, group.rank, group.size, early=early)
            except Unsupported as error:
                self.why_not_direct = str(error).rstrip(".")
            missing = group.sum_(torch.tensor([self.direct is None], dtype=torch.long, device=hidden.device))
            if int(missing) and self.direct is not None:
                self.direct, self.why_not_direct = None, "another rank has no such kernel"

    def launch(self) -> Tensor:
        """The stream (rows, width): the sum of all ranks' shares, in its place."""
        return self.group.sum_(self._hidden) if self.direct is None else self.direct.launch()

    def agree(self, values: Tensor) -> Tensor:
        """The first rank's ``values``, of any shape, in their place on all ranks."""
        distributed.broadcast(values, group=self.group.process_group, group_src=0)
        return values
