"""Random sequences of calls, fused beside plain: a few seeds here, thousands by hand; see `sequences.run`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fewbits.decoder.parts import LayerParts
from fewbits.errors import NotFused
from tests.models.sequences import changing, run
from tests.models.sequences.pair import Pair
from tests.models.sequences.setup import Setup


@pytest.mark.parametrize("seed", [1])
def test_a_sequence(seed: int) -> None:
    assert not run.run_seed(seed).problem, run.told(seed)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "count", [pytest.param(6, marks=pytest.mark.slow), pytest.param(400, marks=pytest.mark.nightly)]
)
def test_many_sequences(count: int) -> None:
    failing = [seed for seed in range(2, 2 + count) if run.run_seed(seed).problem]
    assert not failing, run.told(failing[0])


def test_gradients_behind_a_delayed_scale_keep_their_dtype() -> None:
    """Frozen gate and up without adapters: their gradient is in 8 bits alone, and its product was in 16."""
    pair = Pair(Setup(seed=1698, family="gemma", recipe="fp8", layers=1, attention="eager", delayed=True))
    assert not any("mlp" in name for name, p in pair.fused.named_parameters() if p.requires_grad)
    pair.call("train", 717653)
    pair.call("train_from_embeddings", 501749)


# 2. The fuzz itself sees what it is for.


def failure_of(setup: Setup, *names: str) -> str:
    """What it says of these calls, as a program."""
    calls = [run.Call(name, 5) for name in names]
    outcome = run.run(setup, calls)
    return run.as_python(setup, *run.shrunk(setup, calls, outcome.problem)) if outcome.problem else ""


@pytest.mark.parametrize(
    ("dtype", "scale"), [pytest.param("float32", 1.0001, marks=pytest.mark.slow), ("bfloat16", 1.15)]
)
def test_a_small_difference_is_seen(dtype: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what one layer adds; measured: from 1.00001 on in float32, from 1.1 on in bfloat16."""
    setup = Setup(dtype=dtype, layers=2)
    assert failure_of(setup, "train") == ""
    real = LayerParts.run

    def scaled(self: LayerParts, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return x + (real(self, x, *rest) - x) * scale

    monkeypatch.setattr(LayerParts, "run", scaled)
    text = failure_of(setup, "mode", "train")
    assert 'pair.call("train", 5)' in text and '"mode"' not in text
    with pytest.raises(AssertionError, match="is explained"):
        exec(text, {})  # noqa: S102 (the program that it prints fails as the sequence did)


def test_a_lost_fast_path_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> torch.Tensor:
        raise NotFused("it is Monday")

    monkeypatch.setattr(LayerParts, "run", refuse)
    assert "layer 0 must run fused, and: it is Monday" in failure_of(Setup(), "evaluate_as_it_is")


def test_a_fast_path_over_a_hook_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the hook does nothing, so that no number differs."""
    monkeypatch.setattr(changing, "_double", changing._nothing)
    monkeypatch.setattr("fewbits.decoder.guard.refuse_hooks", lambda *_: None)
    pair = Pair(Setup())
    pair.placed.inside.add((0, "mlp"))
    with pytest.raises(AssertionError, match="layer 0 must take its own forward"):
        pair.call("train", 5)
