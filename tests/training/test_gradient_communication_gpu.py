"""The DDP hook over NCCL: the same promise as over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing

from tests.training.communication_workers import exact_mean, nccl_rank


def check(size: int, folder: Path, format: str, how: dict[str, Any]) -> None:
    multiprocessing.spawn(nccl_rank, (size, str(folder), format, how), nprocs=size)
    found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]
    exact = [exact_mean(step, size) for step in range(4)]
    for name in exact[0]:
        for mine, theirs in zip(found[0]["steps"], found[-1]["steps"], strict=True):
            assert torch.equal(mine[name], theirs[name])
        arrived = sum(step[name].double() for step in found[0]["steps"])
        whole = sum(step[name] for step in exact)
        kept = found[0]["pending"][name][: whole.numel()].view(whole.shape)
        # products on a GPU add in another order: 40 terms of at most 30, each rounded to 2**-24
        torch.testing.assert_close(arrived + kept, whole, rtol=0, atol=4 * 30 * 40 * 2**-24)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int8", "int4", "float8_e4m3"])
def test_one_rank(format: str, tmp_path: Path) -> None:
    check(1, tmp_path, format, {})


@pytest.mark.multi
@pytest.mark.parametrize(
    ("format", "how"),
    [("int8", {}), ("int4", {"stochastic": True, "seed": 7}), ("int4", {"node_size": 2})],
    ids=str,
)
def test_several_ranks(format: str, how: dict[str, Any], tmp_path: Path) -> None:
    check(2, tmp_path, format, how)
