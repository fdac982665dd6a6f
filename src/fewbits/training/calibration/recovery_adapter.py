"""A small adapter that a recovery trains beside a packed model's linears.

    y = linear(x) + (x A^T) B^T        A (r, K), B (N, r), float32

It begins as the best branch of rank r for what rounding took away from the linear's outputs on some text:

    E = W_plain - W_packed        C = L L^T = mean of x x^T        U S V^T ~ E L
    B = U sqrt(S)                 A = sqrt(S) V^T L^-1

C whole and not its diagonal alone: calibration makes errors of columns that make up for each other, and a
branch that knew only how large inputs are took such pairs apart.

Afterwards it is an adapter of
PEFT's as any other, in a folder of its own inside the model's: opened by its path, it brings the model along;
it is merged, trained further and served like one. The packed model is whole without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.adapting.files import RECOVERED
from fewbits.models.packing.packed import put

FOLDER = RECOVERED  # in the model's
_MORE = 8  # directions beyond the rank, of which the largest are taken
_ROUNDS = 4  # of the randomised decomposition
_DAMPING = 0.01  # of the mean square of an input
_AT_ONCE = 8  # linears whose inputs are measured in one pass over the text


class WithBranch(nn.Linear):
    """Stands for a linear while a branch beside it is trained.

    Attributes:
        linear: what it stands for, trained or not.
        a, b: (r, K) and (N, r) float32.
    """

    def __init__(self, linear: nn.Linear, a: Tensor, b: Tensor) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.linear, self.a, self.b = linear, nn.Parameter(a), nn.Parameter(b)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        y: Tensor = self.linear(x)
        return y + x @ self.a.to(x.dtype).t() @ self.b.to(x.dtype).t()


@torch.no_grad()
def input_moments(model: nn.Module, names: Iterable[str], windows: Iterable[Tensor]) -> dict[str, Tensor]:
    """The mean of x x^T (K, K) of what linears of these names are given, over windows (T,) of tokens."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rows = inputs[0].flatten(0, -2).float()
            sums[name] = sums.get(name, 0.0) + rows.t() @ rows
            counts[name] = counts.get(name, 0) + len(rows)

        return hook

    hooks = [model.get_submodule(name).register_forward_pre_hook(hook_of(name)) for name in names]
    try:
        for window in windows:
            model(input_ids=window[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: total / max(counts[name], 1) for name, total in sums.items()}


@torch.no_grad()
def first_branch(lost: Tensor, moment: Tensor | None, rank: int) -> tuple[Tensor, Tensor]:
    """A (r, K) and B (N, r) whose product is nearest to ``lost`` (N, K) on inputs of this ``moment`` (K, K).

    It is None where no token reached the linear: inputs then weigh the same.
    """
    lost = lost.float()
    K = lost.shape[1]
    moment = torch.eye(K, dtype=torch.float32, device=lost.device) if moment is None else moment.clone()
    size = float(moment.diagonal().mean()) or 1.0
    moment.diagonal().add_(_DAMPING * size)  # some inputs may always be the same, or nothing
    lower = torch.linalg.cholesky(moment)
    count = min(rank + _MORE, *lost.shape)
    with torch.random.fork_rng([lost.device] if lost.is_cuda else []):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(lost @ lower, q=count, niter=_ROUNDS)
    rank = min(rank, count)
    root = s[:rank].sqrt()
    a = torch.linalg.solve_triangular(lower, (v[:, :rank] * root).t(), upper=False, left=False)
    return a.contiguous(), (u[:, :rank] * root).contiguous()


def put_branches(
    model: nn.Module, teacher: nn.Module, names: Iterable[str], windows: Iterable[Tensor], rank: int
) -> dict[str, WithBranch]:
    """Put a branch beside each of these packed linears; by their names. ``windows`` are of tokens (T,)."""
    names, windows = list(names), list(windows)
    branches: dict[str, WithBranch] = {}
    moments: dict[str, Tensor] = {}
    for number, name in enumerate(names):
        if number % _AT_ONCE == 0:  # moments of all linears of a large model would fill the memory
            moments = input_moments(teacher, names[number : number + _AT_ONCE], windows)
        layer: Any = model.get_submodule(name)
        plain: Any = teacher.get_submodule(name)
        packed = getattr(layer, "packed_linear", layer).packed  # scales may be in training
        lost = plain.weight.detach().float() - packed.dequantize(torch.float32)
        branches[name] = WithBranch(layer, *first_branch(lost, moments.get(name), rank))
        put(model, name, branches[name])
    return branches


def write_adapter(model: nn.Module, branches: dict[str, WithBranch], folder: Path, base: Path) -> None:
    """Write branches as an adapter of PEFT's over the model, whose linears are back in their places.

    Args:
        model: the packed model; afterwards it has the adapter, and is of no further use.
        branches: by the linears' names.
        folder: is made.
        base: where the model will be found.
    """
    rank = max(branch.a.shape[0] for branch in branches.values())
    adapted = get_peft_model(model, r=rank, lora_alpha=rank, target_modules=list(branches))
    with torch.no_grad():
        for name, branch in branches.items():
            layer: Any = adapted.base_model.model.get_submodule(name)
            for part, values in (("lora_A", branch.a), ("lora_B", branch.b)):
                weight = getattr(layer, part)["default"].weight
                weight.zero_()  # a linear narrower than the rank fills a part of it
                weight[: values.shape[0], : values.shape[1]].copy_(values)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(folder, save_embedding_layers=False)  # packed or not, they are the base's
