"""What is written down of a run: with what it was begun, and what it left behind."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fewbits
from fewbits.training.run_folder.layout import RunFolder
from fewbits.training.setup.model_and_trainer import Built

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TrainResult:
    """What a run left behind."""

    output_dir: Path
    final: Path  # the adapter or the model
    steps: int
    tokens: int
    seconds: float
    metrics: dict[str, Any]  # the newest of each of metrics.jsonl's numbers
    best_metric: float | None = None  # the lowest evaluation loss
    best_step: int | None = None
    stopped_early: bool = False
    merged: Path | None = None
    report: Path | None = None
    leads: bool = True  # of several processes, one does, and tells


def result_of(folder: RunFolder) -> TrainResult:
    """Of a run that has ended, from its folder."""
    from fewbits.training.setup.callbacks import read_metrics

    facts = folder.read()
    metrics: dict[str, Any] = {}
    for record in read_metrics(folder.metrics):
        metrics |= record
    report = facts.get("report")
    return TrainResult(
        output_dir=folder.path,
        final=folder.final,
        steps=facts["steps"],
        tokens=facts["tokens"],
        seconds=facts["seconds"],
        metrics=metrics,
        best_metric=facts["best_metric"],
        best_step=facts["best_step"],
        stopped_early=facts["stopped_early"],
        merged=folder.merged if folder.merged.is_dir() else None,
        report=Path(report) if report else None,
    )


def versions() -> dict[str, str]:
    """Of the software that numbers depend on."""
    import peft
    import transformers

    return {
        "fewbits": fewbits.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "python": platform.python_version(),
    }


def device_of(model: nn.Module) -> str:
    """What the model computes on, for people."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU, {torch.get_num_threads()} threads ({platform.machine()}, {sys.platform})"


def recipe_of(built: Built) -> Any:
    """The recipe as a mapping, with the adapters that were built; None without one."""
    from fewbits.recipes import recipe_to_config

    return None if built.recipe is None else recipe_to_config(replace(built.recipe, lora=built.lora))
