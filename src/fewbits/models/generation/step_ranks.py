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

from collections.abc import Mapping
from typing import Any
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
    lists = (module for module in all_modules(model) if isinstance(module, nn.ModuleList) and len(module))
    layers = next(lists, None)
    return None if layers is None else vars(layers[0]).get("tensor_group")


def check_same_call(group: TensorGroup, device: torch.device, arguments: Mapping[str, Any]) -> None:
    """Raise `BadInput` on all ranks unless they call ``generate`` with the same.

    Args:
        group: the ranks.
        device: where the model is.
        arguments: of the call, by name; tensors of any shape and dtype. Of objects that are neither tensors
            nor plain values only the kind is compared, and a streamer is each rank's own business.
    """
    digest = 0
    for name, value in sorted(arguments.items()):
        if name in ("self", "streamer"):
            continue
        digest = crc32(f"{name}: {_described(value)}".encode(), digest)
        if isinstance(value, Tensor):
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            digest = crc32(content, digest)
    ends = torch.tensor([digest, -digest], dtype=torch.long, device=device)
    distributed.all_reduce(ends, distributed.ReduceOp.MAX, group=group.process_group)
    highest, lowest = ends.tolist()
    if highest != -lowest:
        raise BadInput(
            f"the {group.size} ranks that share this model's layers were called with different prompts or"
            " settings; call generate() with the same on all of them."
        )


def check_draws(model: nn.Module, draws: bool, reason: str) -> None:
    """Raise `Unsupported` where ranks would each draw tokens of their own, in transformers' loop.

    Args:
        model: the model, whose layers ranks may share.
        draws: whether the call draws tokens.
        reason: why it goes through that loop.
    """
    if draws and ranks_of(model) is not None:
        raise Unsupported(
            f"ranks that share a model's layers draw the same tokens in fewbits' own loop alone: {reason};"
            " decode greedily (do_sample=False), or change the call."
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return str((tuple(value.shape), value.dtype))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    if isinstance(value, dict):
        return _described(sorted(value.items(), key=str))
    to_dict = getattr(value, "to_dict", None)
    return repr(sorted(to_dict().items(), key=str)) if callable(to_dict) else type(value).__name__


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

    def any(self, is_so: bool) -> bool:
        """Whether it is so on any rank."""
        mark = torch.tensor([is_so], dtype=torch.long, device=self._hidden.device)
        return bool(self.group.sum_(mark))

    def agree(self, values: Tensor) -> Tensor:
        """The first rank's ``values``, of any shape, in their place on all ranks."""
        distributed.broadcast(values, group=self.group.process_group, group_src=0)
        return values
