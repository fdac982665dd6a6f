"""The sum over ranks: its own source on a CPU, for all ranks one after the other, and its machine code."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from fewbits.errors import Unsupported
from fewbits.kernels.generation import rank_sum
from fewbits.kernels.generation.rank_sum import RankSum, arguments_type, blocks_for, macros, rank_sum_ref
from fewbits.kernels.launch import nvrtc
from tests.kernels.emulated import COMPILER, build
from tests.training.processes import run_ranks


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(("ranks", "shape"), [(2, (1, 70)), (3, (5, 1024)), (4, (64, 640))])
def test_all_ranks_have_the_sum_in_their_order(
    ranks: int, shape: tuple[int, int], tmp_path_factory: Any
) -> None:
    """Turn after turn with one inbox; more values than threads; to the bit."""
    folder = Path(tmp_path_factory.getbasetemp())
    library = build(folder, rank_sum.SOURCE, "rank_sum_emulation.cpp", macros(ranks, False))
    kind, pairs = arguments_type(ranks), shape[0] * shape[1] // 2
    blocks = blocks_for(pairs)
    inboxes = [torch.zeros(2 * ranks * pairs, 4, dtype=torch.int32) for _ in range(ranks)]
    turns = [torch.zeros(blocks, dtype=torch.int32) for _ in range(ranks)]
    generator = torch.Generator().manual_seed(ranks)
    for turn in range(3):
        xs = [torch.randn(shape, generator=generator) * 10**turn for _ in range(ranks)]
        want = rank_sum_ref([x.clone() for x in xs])
        places = (ctypes.c_void_p * ranks)(*(inbox.data_ptr() for inbox in inboxes))
        given = (kind * ranks)(
            *(kind(x.data_ptr(), places, turns[r].data_ptr(), pairs, r) for r, x in enumerate(xs))
        )
        library.run(given, blocks)
        assert all(torch.equal(x, want) for x in xs)
        assert all(int(t) == turn + 1 for each in turns for t in each)


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize(("capability", "early"), [(80, False), (90, True)])
def test_it_compiles(capability: int, early: bool) -> None:
    assert nvrtc.cubin(rank_sum.SOURCE, macros(2, early), capability)[:4] == b"\x7fELF"


def test_what_it_does_not_take() -> None:
    for x in (torch.zeros(1, 8).half(), torch.zeros(3, 3), torch.zeros(8, 2).t()):
        with pytest.raises(Unsupported, match="ranks sum contiguous float32 of an even number, not"):
            RankSum(x, None, 0, 2)


def test_three_processes_have_the_definition() -> None:
    xs = [torch.full((2, 4), 0.1 * 3**r) for r in range(3)]
    assert all(torch.equal(x, rank_sum_ref(xs)) for x in run_ranks(summed, 3))


def summed() -> torch.Tensor:
    """What a rank has."""
    rank = distributed.get_rank()
    return rank_sum.rank_sum(torch.full((2, 4), 0.1 * 3**rank), distributed.group.WORLD, rank, 3)
