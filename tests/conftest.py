"""Fixtures shared by all tests."""

from __future__ import annotations

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


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)
