"""Every optimizer under DDP: two ranks are one process with the same global batch, also when they go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fewbits.errors import Unsupported
from fewbits.training.config import OPTIMIZERS, TrainConfig
from fewbits.training.setup.model_and_trainer import optimizer_class
from tests.training.optimizer_workers import run_all
from tests.training.processes import run_ranks
from tests.training.test_resume import FULL, LORA, settings

CASES = [(name, kind) for name in OPTIMIZERS for kind in ("lora", "full")]


def present(name: str) -> bool:
    """Whether its package is installed."""
    here = {"model": "m", "train_data": "d"}
    try:
        optimizer_class(TrainConfig.from_mapping({**here, "optimizer": name, "scheduler": "constant"}))
    except Unsupported:
        return False
    return True


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next((folder / "final").glob("*model.safetensors")))


@pytest.mark.slow
def test_two_ranks_are_one_process(tiny_folder, tiny_data, tmp_path):
    """Two passes a step, one on each rank, so a sum of two numbers knows no order; dropout is on.

    Of adapters of rank 64 moments are packed, in 4 and in 8 bits: those of fewer than 4,096 values are not.
    """

    def config(name: str, kind: str, where: str, steps: int) -> dict:
        options = {**LORA, "lora_r": 64} if kind == "lora" else FULL
        options = {**options, "gradient_accumulation": 2, "scheduler": "constant"}
        options |= {"optimizer": name, "weight_decay": 0.1, "max_steps": steps, "save_steps": 2, "samples": 0}
        options["learning_rate"] = 0.5 if name == "sgd" else 5e-3
        folder = tmp_path / f"{name}-{kind}-{where}"
        return settings(tiny_folder, tiny_data, folder, **{**options, "eval_fraction": 0.0})

    cases = [case for case in CASES if present(case[0])]
    assert len(cases) >= 10  # the others are of packages that are not installed
    run_ranks(run_all, 2, [config(*case, "two", steps) for case in cases for steps in (2, 4)])
    run_all([config(*case, "one", 4) for case in cases])
    wrong = []
    for name, kind in cases:
        one, two = (weights(tmp_path / f"{name}-{kind}-{where}") for where in ("one", "two"))
        assert one.keys() == two.keys()
        worst = max((two[key] - one[key]).abs().max().item() for key in one)
        if worst > 0:
            wrong.append((name, kind, worst))
    assert not wrong, "the optimizer, what is trained, and by how much a weight differs"
