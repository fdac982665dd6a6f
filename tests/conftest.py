"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data and small real models beside the checkout; without it, tests skip."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("needs ../shared")
    return path


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny products gain nothing from a second thread, and lose much on busy cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _old_objects_are_not_searched(_one_thread: None) -> None:
    """What is there before a module's tests, above all millions of objects of imported libraries, stays.

    Every training run collects garbage when it ends or runs out of memory: half a second with them, and
    hundreds of times. What a module's own tests leave behind is found as ever.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)
