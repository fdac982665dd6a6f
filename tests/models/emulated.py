"""Decoding's kernels by their definitions on a CPU: everything but the question whether there is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from fewbits.models.generation import calls as decode_calls
from fewbits.models.generation import loop as decode_generate
from fewbits.models.generation import step as decode_step
from fewbits.models.generation.live import answers


def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models on a CPU have a decode step."""
    real = decode_step.why_not

    def without_the_gpu(model: Any) -> str:
        reason = real(model)
        return "" if reason == "the model is not on one GPU" else reason

    for module in (decode_calls, decode_generate, answers):
        monkeypatch.setattr(module, "why_not", without_the_gpu)


def count_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list of one number: the decode steps taken from now on."""
    count = [0]
    real = decode_step.DecodeStep.advance

    def advance(self: Any) -> Tensor:
        count[0] += 1
        return real(self)

    monkeypatch.setattr(decode_step.DecodeStep, "advance", advance)
    return count
