"""FSDP2 over NCCL: two GPUs learn what one learns (run on two H200s)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import multiprocessing

from tests.training.fsdp_workers import nccl_rank

STEPS = 3
KINDS = ["full", "lora", "lora_bf16", "nf4", "nf4_dq", "int4", "full+float8_gather", "full+int8_reduce"]
# Losses near 6. float32: products of a GPU may take TF32's 10 bits; bfloat16: 8; E4M3: 4 bits of each weight;
# INT8: a 254th of each block's largest gradient.
TOLERANCES = {"lora_bf16": 1e-2, "full+float8_gather": 2e-2, "full+int8_reduce": 1e-2}


@pytest.mark.multi
def test_two_gpus_learn_what_one_learns(tmp_path: Path) -> None:
    multiprocessing.spawn(nccl_rank, (2, str(tmp_path), KINDS, STEPS), nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for kind in KINDS:
        untrained, alone, sharded, fallbacks = found[0][kind]
        assert fallbacks == {}
        assert abs(alone[-1] - untrained[-1]) > 2 * TOLERANCES.get(kind, 5e-3)  # its steps show
        assert sharded == found[1][kind][2]
        torch.testing.assert_close(sharded, alone, rtol=0, atol=TOLERANCES.get(kind, 5e-3))
