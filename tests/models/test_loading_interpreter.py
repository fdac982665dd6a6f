"""Python's collector stands still and turns are short while a model is loaded; then all is as it was."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest

from fewbits import FastLanguageModel
from fewbits.errors import BadCheckpoint
from fewbits.models.loading.loading_interpreter import TURN_S, collector_paused, quick_turns
from tests.models.loading import save_tiny


def test_the_last_that_leaves_gives_it_back() -> None:
    first, second = collector_paused(), collector_paused()
    with first:
        assert not gc.isenabled()
        second.__enter__()
    assert not gc.isenabled()  # another thread's load goes on
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused(), collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_turns_are_short_and_then_as_they_were() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.02)
    try:
        with quick_turns(), quick_turns():
            assert sys.getswitchinterval() == pytest.approx(TURN_S, rel=0.02)
        assert sys.getswitchinterval() == pytest.approx(0.02, rel=0.02)
        sys.setswitchinterval(TURN_S / 5)  # shorter already
        with quick_turns():
            assert sys.getswitchinterval() == pytest.approx(TURN_S / 5, rel=0.02)
    finally:
        sys.setswitchinterval(before)


def test_nothing_is_collected_while_a_model_is_loaded(tmp_path: Path) -> None:
    save_tiny(tmp_path / "llama", "llama")
    phases: list[Any] = []

    def note(phase: str, _: Any) -> None:
        phases.append(phase)

    gc.set_threshold(50, 2, 2)
    gc.callbacks.append(note)
    try:
        FastLanguageModel.from_pretrained(tmp_path / "llama")
        during = len(phases)
        (tmp_path / "llama" / "model.safetensors").write_bytes(b"short")
        with pytest.raises(BadCheckpoint):
            FastLanguageModel.from_pretrained(tmp_path / "llama")
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(700, 10, 10)
    assert during < 20  # of some thousand: those before it begins and after it has ended
